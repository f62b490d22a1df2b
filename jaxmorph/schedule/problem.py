"""One planning problem as a JSON object, checked field by field."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.fields import (
    count,
    counts,
    duration_ms,
    durations_ms,
    listed,
    one_of,
    shown,
    text,
)
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.problem_limits import BYTE_FIELDS, parse_limits
from jaxmorph.schedule.problem_links import LINK_FIELDS, parse_links
from jaxmorph.schedule.schedule import Schedule, ScheduleError

SimulatedLinkModel = Literal["latency", "serialized", "blocking"]
"""How to simulate links: as ``link_models.LinkModel`` says, or as queues that transfers block."""

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
    "warmup_forwards",
    "orders",
    "chunks",
    "link_model",
    "time_step_ms",
    *LINK_FIELDS,
    *BYTE_FIELDS,
)
_MOST_MICROBATCHES_OVER_STAGES = 2**22
_CHUNKS_OF_INTERLEAVED = 2
_SHORTEST_TIME_STEP_MS = 1e-9  # a picosecond, which is what the planner counts in


@dataclass(frozen=True)
class Problem:
    """What to plan and to simulate.

    Args:
        name: What the answer is to be called.
        schedule: The name of the schedule to plan.
        warmup_forwards: Warm-up forwards in place of the planner's.
        orders: A valid schedule to simulate in place of planning one.
        num_chunks: Number of virtual stages each stage runs.
        time_step_ms: Step of a discrete clock for the simulation; None for exact time.
        jitter_ms: Standard deviation of the latency of each link between neighbours; None when
            the step under jitter was not asked for.
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
    num_chunks: int = 1
    link_model: SimulatedLinkModel = "latency"
    time_step_ms: float | None = None
    jitter_ms: tuple[float, ...] | None = None


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
    return _problem(fields, _orders(fields.get("orders"), *_sizes(fields)))


def problem_of(schedule: Schedule, fields: Mapping[str, Any]) -> Problem:
    """The problem of simulating a schedule as it is.

    Args:
        fields: A problem's further fields: costs, links and caps.

    Returns:
        The problem, which has the schedule's name and sizes.

    Raises:
        UserError: Names the field, what was got and what was expected.
    """
    sizes = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
    return _problem(_known_fields({**fields, "name": schedule.name, **sizes}), schedule)


def _problem(fields: Mapping[str, Any], orders: Schedule | None) -> Problem:
    stages, microbatches = _sizes(fields)
    schedule = text("schedule", fields.get("schedule") or "adaptive")
    chunks = _chunks(fields.get("chunks"), schedule, orders)
    _require_few_ops(stages * microbatches, chunks)
    links = parse_links(fields, stages, chunks)
    link_model = one_of(
        "link_model", fields.get("link_model") or "latency", get_args(SimulatedLinkModel)
    )
    return Problem(
        name=text("name", fields["name"]),
        num_microbatches=microbatches,
        costs=_costs(fields, stages),
        links=links.simulated,
        planned_links=links.planned,
        limits=parse_limits(fields, stages),
        schedule=schedule,
        warmup_forwards=counts("warmup_forwards", fields.get("warmup_forwards"), stages),
        orders=orders,
        num_chunks=chunks,
        link_model=cast(SimulatedLinkModel, link_model),
        time_step_ms=_time_step_ms(fields.get("time_step_ms"), link_model),
        jitter_ms=_jitter_ms(links.jitter_ms, link_model),
    )


def usual_chunks(schedule: str) -> int:
    """Number of virtual stages a stage runs under a schedule when none is asked for."""
    return _CHUNKS_OF_INTERLEAVED if schedule == "interleaved" else 1


def _known_fields(data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"got {shown(data)}, expected a JSON object")
    for field in data:
        if field not in _REQUIRED + _OPTIONAL:
            near = difflib.get_close_matches(field, _REQUIRED + _OPTIONAL, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"{shown(field)}: unknown field{hint}")
    for field in _REQUIRED:
        if field not in data:
            raise UserError(f"{field}: missing, expected a value")
    return data


def _sizes(fields: Mapping[str, Any]) -> tuple[int, int]:
    stages = count("num_stages", fields["num_stages"])
    microbatches = count("num_microbatches", fields["num_microbatches"])
    if stages * microbatches > _MOST_MICROBATCHES_OVER_STAGES:
        raise UserError(
            f"num_microbatches: got {microbatches} for {stages} stages, expected at most "
            f"{_MOST_MICROBATCHES_OVER_STAGES // stages}"
        )
    return stages, microbatches


def _require_few_ops(microbatches_over_stages: int, chunks: int) -> None:
    most = _MOST_MICROBATCHES_OVER_STAGES // microbatches_over_stages
    if chunks > most:
        raise UserError(
            f"chunks: got {chunks}, expected at most {most} for so many stages and microbatches"
        )


def _costs(fields: Mapping[str, Any], stages: int) -> StageCosts:
    return StageCosts(
        *(
            durations_ms(field, fields[field], stages, "stage")
            for field in ("forward_ms", "backward_input_ms", "backward_weight_ms")
        )
    )


def _chunks(value: object, schedule: str, orders: Schedule | None) -> int:
    """Virtual stages per stage: those of the orders, or what was asked for."""
    if orders is not None:
        if value is not None and value != orders.num_chunks:
            raise UserError(f"chunks: got {shown(value)}, but orders have {orders.num_chunks}")
        return orders.num_chunks
    chunks = usual_chunks(schedule) if value is None else count("chunks", value)
    if chunks > 1 and schedule != "interleaved":
        raise UserError(f"chunks: got {chunks}, expected 1 for {schedule} (or interleaved)")
    return chunks


def _time_step_ms(value: object, link_model: str) -> float | None:
    if value is None:
        return None
    if link_model == "blocking":
        raise UserError("time_step_ms: blocking links are simulated in exact time, expected none")
    step_ms = duration_ms("time_step_ms", value)
    if step_ms < _SHORTEST_TIME_STEP_MS:
        expected = f"expected a number of ms above 0, at least {_SHORTEST_TIME_STEP_MS:g}"
        raise UserError(f"time_step_ms: got {shown(value)}, {expected}")
    return step_ms


def _jitter_ms(jitter_ms: tuple[float, ...] | None, link_model: str) -> tuple[float, ...] | None:
    if jitter_ms is not None and link_model != "latency":
        raise UserError(
            f"link_jitter_ms: got link_model {link_model!r}, expected 'latency', the only one "
            "that is simulated with jitter"
        )
    return jitter_ms


def _orders(value: object, stages: int, microbatches: int) -> Schedule | None:
    if value is None:
        return None
    rows = listed("orders", value, stages, "stage")
    orders = tuple(_order(f"orders[{stage}]", row) for stage, row in enumerate(rows))
    schedule = Schedule("given", microbatches, orders)
    try:
        schedule.validate()
    except ScheduleError as error:
        raise UserError(f"orders: {error.reason}") from error
    return schedule


def _order(field: str, row: object) -> tuple[Op, ...]:
    if not isinstance(row, list):
        raise UserError(f"{field}: got {shown(row)}, expected a list of ops such as 'F3'")
    try:
        return tuple(Op.parse(text(field, op)) for op in row)
    except ValueError as error:
        raise UserError(f"{field}: {error}") from error
