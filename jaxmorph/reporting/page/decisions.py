"""The section of decisions: what was found out and decided, with the evidence it rests on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from jaxmorph.reporting.page.changes import Change, is_decision
from jaxmorph.reporting.page.elements import Html, element, joined, number
from jaxmorph.reporting.page.run_files import EventLine
from jaxmorph.reporting.page.tables import UNKNOWN, folded, milliseconds, table
from jaxmorph.reporting.text import describe_routes

MOST_ROWS = 200
"""Of more events, so many of the first and last are in a table."""

_STRIP_WIDTH, _STRIP_HEIGHT, _STRIP_EDGE = 120.0, 34.0, 4.0
_MOST_SAMPLES = 24
_MOST_CHARACTERS = 500
_MOST_CANDIDATES = 12


def decisions_section(events: Sequence[EventLine], changes: Sequence[Change]) -> Html:
    """The table of decisions, and that of everything else that happened.

    Args:
        changes: The run's; decisions say which of them they belong to.
    """
    decisions = [event for event in events if is_decision(event)]
    others = [event for event in events if not is_decision(event)]
    number_of = {id(event): change.number for change in changes for event in change.events}
    return element(
        "section",
        element("h2", "Decisions"),
        events_table(decisions, label="Decisions with their evidence", number_of=number_of)
        if decisions
        else element("p", "None is recorded.", class_="note"),
        folded(
            f"Everything else that happened: {len(others):,}",
            events_table(others, label="Other events"),
        )
        if others
        else None,
        id="decisions",
    )


def events_table(
    events: Sequence[EventLine], *, label: str, number_of: Mapping[int, int] | None = None
) -> Html:
    """Events with what they rest on.

    Args:
        events: In their order.
        number_of: The numbers of the changes that events belong to, by their `id`; None: of none.
    """
    half = MOST_ROWS // 2
    shown = events if len(events) <= MOST_ROWS else [*events[:half], *events[-half:]]
    heads = ["step", "time", "what", "link", "why", "evidence"]
    rows = [_cells(event, number_of or {}) for event in shown]
    left_out = len(events) - len(shown)
    note = f"{left_out:,} events between are left out." if left_out else None
    return joined(
        [
            element("div", _table(heads, rows, label), class_="events"),
            element("p", note, class_="note") if note else None,
        ]
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> Html:
    return table(heads, rows, text_columns=len(heads), label=label)


def _cells(event: EventLine, number_of: Mapping[int, int]) -> list[str]:
    kind = element("b", event.kind.replace("_", " "))
    if id(event) in number_of:
        at = number_of[id(event)]
        leads = element("a", f"change {at}", href=f"#change-{at}")
        kind = joined([kind, " (", leads, ")"])
    time = UNKNOWN if event.time_s is None else f"{event.time_s:,.1f} s"
    return [
        f"{event.step:,}", time, kind, event.link or UNKNOWN, event.detail or UNKNOWN,
        joined(_evidence(event.more)) or UNKNOWN,
    ]  # fmt: skip


def _evidence(more: Mapping[str, Any]) -> Iterator[Html]:
    """What an event carries beside its usual fields: samples drawn, all else in words."""
    for name, value in more.items():
        found = list(_with_samples(value))
        if isinstance(value, Mapping) and _plans(value.get("candidates")):
            yield _candidates(value)
        elif found:
            yield from (_samples(evidence) for evidence in found)
        elif value not in (None, "", [], {}):
            text = f"{name.replace('_', ' ')}: {_in_words(value)}"
            yield element("div", shorten(text, _MOST_CHARACTERS, placeholder=" ..."))


def _plans(value: Any) -> list[Mapping[str, Any]]:
    """The plans among candidates: mappings that say what step is predicted."""
    listed = value if isinstance(value, list | tuple) else []
    return [each for each in listed if isinstance(each, Mapping) and "predicted_ms" in each]


def _candidates(evidence: Mapping[str, Any]) -> Html:
    """The plans that were weighed, the one in force first and the chosen one in bold."""
    rows = [("in force", each) for each in _plans([evidence.get("from")])]
    rows += [("or", each) for each in _plans(evidence["candidates"])]
    chosen = evidence.get("to")
    entries = (
        element("li", f"{what}: ", element("b" if each == chosen else "span", _plan(each)))
        for what, each in rows[:_MOST_CANDIDATES]
    )
    return element("ul", *entries, class_="candidates")


def _plan(option: Mapping[str, Any]) -> str:
    name = f"{option.get('schedule', '')} {_in_words(option.get('warmup_forwards', ''))}".strip()
    routes, predicted_ms = option.get("routes"), option["predicted_ms"]
    told = f", {describe_routes(routes)}" if isinstance(routes, Mapping) and routes else ""
    known = isinstance(predicted_ms, int | float)
    return f"{name}{told}: {milliseconds(float(predicted_ms) if known else None)}"


def _with_samples(value: Any) -> Iterator[Mapping[str, Any]]:
    """The mappings with samples that a value is or holds."""
    if isinstance(value, Mapping):
        if _numbers(value.get("samples_ms")):
            yield value
        else:
            for inner in value.values():
                yield from _with_samples(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _with_samples(inner)


def _numbers(value: Any) -> list[float]:
    if not isinstance(value, list | tuple):
        return []
    return [float(number_) for number_ in value if isinstance(number_, int | float)]


def _samples(evidence: Mapping[str, Any]) -> Html:
    samples = _numbers(evidence["samples_ms"])[-_MOST_SAMPLES:]
    levels = {
        name: float(evidence[f"{name}_ms"])
        for name in ("baseline", "threshold", "spread")
        if isinstance(evidence.get(f"{name}_ms"), int | float)
    }
    told = [f"samples {', '.join(f'{sample:.1f}' for sample in samples)} ms"]
    told += [f"{name} {milliseconds(level, 2)}" for name, level in levels.items()]
    return element(
        "div",
        _strip(samples, levels.get("baseline"), levels.get("threshold"), "; ".join(told)),
        element("div", "; ".join(told)),
        class_="evidence",
    )


def _strip(
    samples: Sequence[float], baseline: float | None, threshold: float | None, label: str
) -> Html:
    """Samples as dots over the levels they are judged by."""
    highest = max([*samples, baseline or 0.0, threshold or 0.0]) or 1.0

    def down(ms: float) -> str:
        room = _STRIP_HEIGHT - 2 * _STRIP_EDGE
        return number(_STRIP_EDGE + room * (1.0 - max(0.0, ms) / highest))

    apart = (_STRIP_WIDTH - 2 * _STRIP_EDGE) / len(samples)
    dots = "".join(
        f"M{number(_STRIP_EDGE + apart * (at + 0.5))} {down(sample)}h0"
        for at, sample in enumerate(samples)
    )
    levels = (("baseline", baseline), ("threshold", threshold))
    return element(
        "svg",
        *(
            element("path", class_=name, d=f"M0 {down(level)}H{number(_STRIP_WIDTH)}")
            for name, level in levels
            if level is not None
        ),
        element("path", class_="dots", d=dots),
        viewBox=f"0 0 {number(_STRIP_WIDTH)} {number(_STRIP_HEIGHT)}",
        width=_STRIP_WIDTH,
        height=_STRIP_HEIGHT,
        role="img",
        aria_label=label,
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
