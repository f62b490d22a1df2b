"""The section of failures: what each has cost, by what the time was spent on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmorph.recovery.ledger import PHASES
from jaxmorph.reporting.page.elements import Html, element
from jaxmorph.reporting.page.run_files import EventLine
from jaxmorph.reporting.page.tables import UNKNOWN, table
from jaxmorph.reporting.records import RESTARTED

_NOTE = (
    "Seconds. Detect: from the end of the last step to the first evidence that a rank has failed. "
    "Start: processes, imports, joining, data. Plan: the steps that are run for their timings. "
    "Replay: the steps that were lost, done again."
)


def recoveries(events: Sequence[EventLine]) -> list[Mapping[str, Any]]:
    """What events say of failures after which the ranks were started again."""
    found = (event.more.get("evidence") for event in events if event.kind == RESTARTED)
    return [told for told in found if isinstance(told, Mapping) and _phases_s(told)]


def recoveries_section(told: Sequence[Mapping[str, Any]]) -> Html:
    """A table with a row for each failure, and one for all of them.

    Args:
        told: At least one, of `recoveries`.
    """
    heads = ["step", "what failed", "goes on from", *(_words(phase) for phase in PHASES), "in all"]
    return element(
        "section",
        element("h2", "Failures"),
        table(heads, _rows(told), text_columns=2, label="What failures have cost, seconds"),
        element("p", _NOTE, class_="note"),
        id="failures",
    )


def _rows(told: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for each in told:
        lengths_s = _phases_s(each)
        cells = [_seconds(lengths_s.get(phase)) for phase in PHASES]
        over = " (not over)" if each.get("cut_off") else ""
        reason, from_step = f"{each.get('reason', '')}{over}", each.get("from_step")
        yield [
            _count(each.get("step")), reason, _count(from_step), *cells,
            _seconds(sum(lengths_s.values())),
        ]  # fmt: skip
    if len(told) > 1:
        every = [_phases_s(each) for each in told]
        sums = [sum(lengths_s.get(phase, 0.0) for lengths_s in every) for phase in PHASES]
        yield ["", f"all {len(told)}", "", *map(_seconds, sums), _seconds(sum(sums))]


def _phases_s(told: Mapping[str, Any]) -> dict[str, float]:
    lengths_s = told.get("phases_s")
    if not isinstance(lengths_s, Mapping):
        return {}
    return {
        phase: float(length_s)
        for phase, length_s in lengths_s.items()
        if phase in PHASES and isinstance(length_s, int | float)
    }


def _words(phase: str) -> str:
    return phase.replace("_", " ")


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else UNKNOWN


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}"
