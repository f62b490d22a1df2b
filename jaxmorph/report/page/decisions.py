"""Tables of events, with the evidence of decisions: samples, and the plans that were compared."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

from markupsafe import Markup

from jaxmorph.records import Event
from jaxmorph.report.page.charts import plot_samples
from jaxmorph.report.page.files import finite
from jaxmorph.report.page.html import UNKNOWN, inline_svg, milliseconds
from jaxmorph.report.text import describe_routes

MOST_ROWS = 200
"""A longer table keeps its first and last events, half of this number each."""

_MOST_SAMPLES = 24
_MOST_CHARACTERS = 500
_MOST_CANDIDATES = 12


class Evidence(NamedTuple):
    """A piece of evidence of an event: a text with a picture of its samples, or compared plans.

    Attributes:
        plans: For each its role, the plan in words, and whether it was chosen.
    """

    text: str = ""
    picture: Markup | None = None
    plans: Sequence[tuple[str, str, bool]] = ()


class EventRow(NamedTuple):
    """An event's cells; `change` is the number of its change."""

    step: str
    time: str
    what: str
    change: int | None
    link: str
    why: str
    evidence: Sequence[Evidence]


class EventTable(NamedTuple):
    """Rows, and the number of events left out in the middle."""

    rows: Sequence[EventRow]
    left_out: int


def event_table(events: Sequence[Event], number_of: Mapping[int, int] | None = None) -> EventTable:
    """Events with their evidence.

    Args:
        number_of: The number of each event's change, by the event's `id`.
    """
    half = MOST_ROWS // 2
    shown = events if len(events) <= MOST_ROWS else [*events[:half], *events[-half:]]
    rows = [
        EventRow(
            f"{event.step:,}",
            f"{event.time_s:,.1f} s" if finite(event.time_s) is not None else UNKNOWN,
            event.kind.replace("_", " "),
            (number_of or {}).get(id(event)),
            event.link or UNKNOWN,
            event.detail or UNKNOWN,
            list(_evidence(event)),
        )
        for event in shown
    ]
    return EventTable(rows, len(events) - len(shown))


def _evidence(event: Event) -> Iterator[Evidence]:
    evidence = event.evidence or {}
    samples = list(_with_samples(evidence))
    if _plans(evidence.get("candidates")):
        yield Evidence(plans=list(_candidates(evidence)))
    elif samples:
        yield from (_samples(each, event) for each in samples)
    elif evidence:
        text = f"evidence: {_in_words(evidence)}"
        yield Evidence(shorten(text, _MOST_CHARACTERS, placeholder=" ..."))


def _plans(value: Any) -> list[Mapping[str, Any]]:
    """The plans among candidates: mappings with a predicted step."""
    listed = value if isinstance(value, list | tuple) else []
    return [each for each in listed if isinstance(each, Mapping) and "predicted_ms" in each]


def _candidates(evidence: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """The compared plans, the current one first."""
    rows = [("in force", each) for each in _plans([evidence.get("from")])]
    rows += [("or", each) for each in _plans(evidence["candidates"])]
    for what, plan in rows[:_MOST_CANDIDATES]:
        yield what, _plan_in_words(plan), plan == evidence.get("to")


def _plan_in_words(plan: Mapping[str, Any]) -> str:
    name = f"{plan.get('schedule', '')} {_in_words(plan.get('warmup_forwards', ''))}".strip()
    routes, predicted_ms = plan.get("routes"), plan["predicted_ms"]
    some = f", {describe_routes(routes)}" if isinstance(routes, Mapping) and routes else ""
    return f"{name}{some}: {milliseconds(finite(predicted_ms))}"


def _with_samples(value: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings with samples within a value."""
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
    return [known for each in value if (known := finite(each)) is not None]


def _samples(evidence: Mapping[str, Any], event: Event) -> Evidence:
    samples = _numbers(evidence["samples_ms"])[-_MOST_SAMPLES:]
    levels = {
        name: known
        for name in ("baseline", "threshold", "spread")
        if (known := finite(evidence.get(f"{name}_ms"))) is not None
    }
    parts = [f"samples {', '.join(f'{sample:.1f}' for sample in samples)} ms"]
    parts += [f"{name} {milliseconds(level, 2)}" for name, level in levels.items()]
    text = "; ".join(parts)
    drawn = inline_svg(
        f"Step {event.step}, {event.link or 'all links'}: {text}",
        lambda: plot_samples(samples, levels.get("baseline"), levels.get("threshold")),
    )
    return Evidence(text, drawn)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
