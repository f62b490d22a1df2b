"""Tables, and boxes that scroll by themselves where they are wider than the page."""

from collections.abc import Iterable, Sequence

from jaxmorph.reporting.page.elements import Html, element

UNKNOWN = "-"
"""What stands for a number that isn't known."""


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int, label: str
) -> Html:
    """A table in a box of its own.

    Args:
        heads: The names of the columns.
        rows: A cell for each column.
        text_columns: So many columns from the left are text; the others are numbers.
    """

    def cells(name: str, row: Sequence[str]) -> Html:
        looks = [_look(cell, is_text=at < text_columns) for at, cell in enumerate(row)]
        return element(
            "tr", *(element(name, cell, class_=look) for cell, look in zip(row, looks, strict=True))
        )

    head = element("thead", cells("th", heads))
    body = element("tbody", *(cells("td", row) for row in rows))
    return scroll_box(label, element("table", head, body))


def _look(cell: str, *, is_text: bool) -> str | None:
    looks = [*([] if is_text else ["number"]), *(["unknown"] if cell == UNKNOWN else [])]
    return " ".join(looks) or None


def scroll_box(label: str, *content: str) -> Html:
    """A box in which wide content scrolls sideways, by keyboard too.

    Args:
        content: As the children of an element.
    """
    return element("div", *content, class_="scroll", tabindex=0, role="region", aria_label=label)


def folded(summary: str, *content: str, open_: bool = False) -> Html:
    """Content that shows when its summary is clicked.

    Args:
        content: As the children of an element.
        open_: Whether it shows from the start.
    """
    opened = "" if open_ else None
    return element("details", element("summary", summary), *content, open=opened)


def milliseconds(value: float | None, digits: int = 1) -> str:
    """Milliseconds with their unit.

    Args:
        value: The number; None where it isn't known.
    """
    return UNKNOWN if value is None else f"{value:,.{digits}f} ms"


def share(value: float | None) -> str:
    """A share as percent.

    Args:
        value: The number, from 0 to 1; None where it isn't known.
    """
    return UNKNOWN if value is None else f"{100 * value:.1f} %"
