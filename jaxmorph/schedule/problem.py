"""One planning problem as a JSON object, checked field by field."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Limits, Links, StageCosts, chain_links
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.schedule import Schedule, ScheduleError

_REQUIRED = (
    "name",
    "num_stages",
    "num_microbatches",
    "forward_ms",
    "backward_input_ms",
    "backward_weight_ms",
    "link_ms",
)
_OPTIONAL = (
    "max_live",
    "live_until",
    "schedule",
    "planned_link_ms",
    "warmup_forwards",
    "orders",
)
_MOST_MICROBATCHES_OVER_STAGES = 2**22
_LONGEST_MS = 1e12


@dataclass(frozen=True)
class Problem:
    """What to plan and to simulate.

    Args:
        name: What the answer is to be called.
        num_microbatches: Number of microbatches.
        costs: Durations of the ops.
        links: Latencies to simulate.
        planned_links: Latencies the planner believes.
        limits: Memory caps.
        schedule: The name of the schedule to plan.
        warmup_forwards: Warm-up forwards in place of the planner's.
        orders: A valid schedule to simulate in place of planning one.
    """

    name: str
    num_microbatches: int
    costs: StageCosts
    links: Links
    planned_links: Links
    limits: Limits
    schedule: str
    warmup_forwards: tuple[int, ...] | None
    orders: Schedule | None


def parse_problem(data: object) -> Problem:
    """Checks a decoded JSON object and turns it into a problem.

    Args:
        data: The object; its fields are those of ``jaxmorph plan --batch``. Lists of one number
            per stage or per link may also be a single number for all of them.

    Returns:
        The problem.

    Raises:
        UserError: Names the field, what was got and what was expected.
    """
    fields = _known_fields(data)
    stages = _count("num_stages", fields["num_stages"])
    microbatches = _count("num_microbatches", fields["num_microbatches"])
    if stages * microbatches > _MOST_MICROBATCHES_OVER_STAGES:
        raise UserError(
            f"num_microbatches: got {microbatches} for {stages} stages, expected at most "
            f"{_MOST_MICROBATCHES_OVER_STAGES // stages}"
        )
    links = _latencies("link_ms", fields["link_ms"], stages)
    planned = fields.get("planned_link_ms")
    return Problem(
        name=_text("name", fields["name"]),
        num_microbatches=microbatches,
        costs=_costs(fields, stages),
        links=links,
        planned_links=links if planned is None else _latencies("planned_link_ms", planned, stages),
        limits=_limits(fields, stages),
        schedule=_text("schedule", fields.get("schedule") or "adaptive"),
        warmup_forwards=_counts("warmup_forwards", fields.get("warmup_forwards"), stages),
        orders=_orders(fields.get("orders"), stages, microbatches),
    )


def _known_fields(data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"got {_shown(data)}, expected a JSON object")
    for field in data:
        if field not in _REQUIRED + _OPTIONAL:
            near = difflib.get_close_matches(field, _REQUIRED + _OPTIONAL, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"{_shown(field)}: unknown field{hint}")
    for field in _REQUIRED:
        if field not in data:
            raise UserError(f"{field}: missing, expected a value")
    return data


def _costs(fields: Mapping[str, Any], stages: int) -> StageCosts:
    return StageCosts(
        *(
            _durations(field, fields[field], stages, "stage")
            for field in ("forward_ms", "backward_input_ms", "backward_weight_ms")
        )
    )


def _latencies(field: str, value: object, stages: int) -> Links:
    return chain_links(_durations(field, value, stages - 1, "link"))


def _limits(fields: Mapping[str, Any], stages: int) -> Limits:
    live_until = fields.get("live_until") or "B"
    if live_until not in ("B", "W"):
        raise UserError(f"live_until: got {_shown(live_until)}, expected 'B' or 'W'")
    return Limits(_counts("max_live", fields.get("max_live"), stages), live_until)


def _orders(value: object, stages: int, microbatches: int) -> Schedule | None:
    if value is None:
        return None
    rows = _list("orders", value, stages, "stage")
    orders = tuple(_order(f"orders[{stage}]", row) for stage, row in enumerate(rows))
    schedule = Schedule("given", microbatches, orders)
    try:
        schedule.validate()
    except ScheduleError as error:
        raise UserError(f"orders: {error.reason}") from error
    return schedule


def _order(field: str, row: object) -> tuple[Op, ...]:
    if not isinstance(row, list):
        raise UserError(f"{field}: got {_shown(row)}, expected a list of ops such as 'F3'")
    try:
        return tuple(Op.parse(_text(field, op)) for op in row)
    except ValueError as error:
        raise UserError(f"{field}: {error}") from error


def _list(field: str, value: object, length: int, per: str) -> list[Any]:
    """A list of ``length`` values; a single number stands for that many of it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value] * length
    if not isinstance(value, list):
        raise UserError(f"{field}: got {_shown(value)}, expected one number or a list of {length}")
    if len(value) != length:
        raise UserError(f"{field}: got {len(value)} values, expected {length} (one per {per})")
    return value


def _durations(field: str, value: object, length: int, per: str) -> tuple[float, ...]:
    values = _list(field, value, length, per)
    return tuple(_duration(f"{field}[{index}]", item) for index, item in enumerate(values))


def _duration(field: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_MS:
        return float(value)
    raise UserError(
        f"{field}: got {_shown(value)}, expected a number of ms from 0 to {_LONGEST_MS:g}"
    )


def _counts(field: str, value: object, stages: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = _list(field, value, stages, "stage")
    return tuple(_count(f"{field}[{stage}]", item) for stage, item in enumerate(values))


def _count(field: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"{field}: got {_shown(value)}, expected a whole number, at least 1")


def _text(field: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise UserError(f"{field}: got {_shown(value)}, expected text")


def _shown(value: object) -> str:
    """A value as an error shows it: on one line, and not too long."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
