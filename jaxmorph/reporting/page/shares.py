"""Where steps went, as stacked bars and numbers: a row for each step, or for each of its stages."""

from collections.abc import Iterable, Iterator, Sequence

from jaxmorph.reporting.page.elements import Html, element, number
from jaxmorph.reporting.page.gantt import look_of
from jaxmorph.reporting.page.tables import scroll_box, share
from jaxmorph.schedule.bubbles import IdleCause, StepShares

_COMPUTE = "compute"


def shares_table(
    rows: Iterable[tuple[str, str, StepShares]], heads: tuple[str, str], label: str
) -> Html:
    """A bar and the numbers of each row.

    Args:
        rows: Two texts, the second right-aligned, and shares that add up to 1.
        heads: The names of the two texts' columns.
    """
    names = [_COMPUTE, *map(str, IdleCause)]
    head = element(
        "tr",
        element("th", heads[0]),
        element("th", heads[1], class_="number"),
        element("th", "shares of the step", class_="bar-cell"),
        *(element("th", name, class_="number") for name in names),
    )
    body = (
        element(
            "tr",
            element("td", first),
            element("td", second, class_="number"),
            element("td", _bar(shares), class_="bar-cell"),
            *(element("td", share(part), class_="number") for part in shares),
        )
        for first, second, shares in rows
    )
    return scroll_box(
        label, element("table", element("thead", head), element("tbody", *body), class_="shares")
    )


def shares_legend() -> Html:
    """The colours of the bars."""
    looks = [(_COMPUTE, _COMPUTE), *((look_of(cause), str(cause)) for cause in IdleCause)]
    items = (
        element("li", element("span", class_=f"swatch {look}", aria_hidden="true"), name)
        for look, name in looks
    )
    return element("ul", *items, class_="legend")


def causes_explained() -> Html:
    """What each cause to idle means."""
    return element(
        "dl", *(part for name, text in _MEANINGS for part in _entry(name, text)), class_="meanings"
    )


_MEANINGS: Sequence[tuple[str, str]] = (
    (_COMPUTE, "an op runs"),
    (IdleCause.WARM_UP, "the stage fills: the data of its first op isn't made yet"),
    (IdleCause.DEPENDENCY, "the next op's data isn't made yet on another stage"),
    (IdleCause.TRANSFER, "the data is made and on its way"),
    (IdleCause.BLOCKING, "the data is made, but a transfer of other data holds a queue"),
    (
        IdleCause.COPIES,
        "the data is there, but the stash isn't back from host memory, or one hasn't made room yet",
    ),
    (IdleCause.DISPATCH, "the op is ready and the queue free: what starting ops costs"),
    (IdleCause.COOL_DOWN, "the stage has run its last op, others have not"),
    (
        IdleCause.OPTIMIZER,
        "before the first op of any stage and after the last: tied gradients, norms, the meeting "
        "of the ranks, the update",
    ),
)


def _entry(name: str, text: str) -> Iterator[Html]:
    yield element("dt", name)
    yield element("dd", text)


def _bar(shares: StepShares) -> Html:
    looks = [_COMPUTE, *map(look_of, IdleCause)]
    names = [_COMPUTE, *map(str, IdleCause)]
    parts = [
        element("span", class_=look, style=f"width:{number(100.0 * part)}%")
        for look, part in zip(looks, shares, strict=True)
        if part > 0.0005
    ]
    told = ", ".join(
        f"{name} {share(part)}" for name, part in zip(names, shares, strict=True) if part > 0.0005
    )
    return element("div", *parts, class_="bar", role="img", aria_label=told)
