"""Reads one planning problem from a JSON object and checks it field by field."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from jaxmorph.errors import UserError, quoted
from jaxmorph.placement import Placement, PlacementKind, placement_of
from jaxmorph.records import Link
from jaxmorph.schedule.costs import (
    JITTER_MARGIN,
    Limits,
    LinkDelay,
    Links,
    StageCosts,
    StashBytes,
)
from jaxmorph.schedule.ops import LiveUntil, Op
from jaxmorph.schedule.schedule import Schedule, ScheduleError

_CAP, _AFTER_FORWARD, _AFTER_BACKWARD = _BYTE_FIELDS = (
    "max_stash_bytes",
    "stash_bytes_after_forward",
    "stash_bytes_after_backward",
)
SimulatedLinkModel = Literal["latency", "serialized", "blocking"]
"""A ``replay.LinkModel``, or ``blocking``: transfers hold the queues of both ends."""

_REQUIRED = (
    "name", "num_stages", "num_microbatches", "forward_ms", "backward_input_ms",
    "backward_weight_ms", "link_ms",
)  # fmt: skip
_OPTIONAL = (
    "max_live", "live_until", "schedule", "warmup_forwards", "orders", "placement", "chunks",
    "link_model", "time_step_ms", "planned_link_ms", "link_forward_ms", "link_backward_ms",
    "link_occupancy_ms", "link_jitter_ms", "weight_group", *_BYTE_FIELDS,
)  # fmt: skip
_MOST_MICROBATCHES_OVER_STAGES = 2**22
_CHUNKS_OF_INTERLEAVED = 2
_LONGEST_MS = 1e12
_SHORTEST_TIME_STEP_MS = 1e-9  # a picosecond, the planner's unit


@dataclass(frozen=True)
class Problem:
    """What to plan and to simulate; its fields are options of ``jaxmorph plan``.

    Args:
        schedule: The name of the schedule to plan.
        orders: A valid schedule to simulate instead of planning one.
        jitter_ms: Standard deviation of the latency of each link between neighbours.
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
    """Reads a problem from a decoded JSON object with the fields of ``jaxmorph plan --batch``.

    A list of one number per stage or link may also be a single number for all of them.

    Raises:
        UserError: Names the field, what was got and what was expected.
    """
    fields = _known_fields(data)
    return _problem(fields, _orders(fields, *_sizes(fields)))


def problem_of(schedule: Schedule, fields: Mapping[str, Any]) -> Problem:
    """The problem of simulating a given schedule; ``fields`` are its costs, links and caps.

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
    placement = orders.placement if orders else placement_of(schedule, stages, chunks)
    links = _links(fields, placement)
    link_model = one_of(
        "link_model", fields.get("link_model") or "latency", get_args(SimulatedLinkModel)
    )
    return Problem(
        name=text("name", fields["name"]),
        num_microbatches=microbatches,
        costs=_costs(fields, stages),
        links=links.simulated,
        planned_links=links.planned,
        limits=_limits(fields, stages),
        schedule=schedule,
        warmup_forwards=counts("warmup_forwards", fields.get("warmup_forwards"), stages),
        orders=orders,
        num_chunks=chunks,
        link_model=cast(SimulatedLinkModel, link_model),
        time_step_ms=_time_step_ms(fields.get("time_step_ms"), link_model),
        jitter_ms=_jitter_ms(links.jitter_ms, link_model),
    )


def default_chunks(schedule: str) -> int:
    """The number of chunks of a schedule if none is given."""
    return placement_of(schedule, 1, _CHUNKS_OF_INTERLEAVED).num_chunks


def _known_fields(data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"got {quoted(data)}, expected a JSON object")
    for field in data:
        if field not in _REQUIRED + _OPTIONAL:
            near = difflib.get_close_matches(field, _REQUIRED + _OPTIONAL, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"{quoted(field)}: unknown field{hint}")
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
    """The number of chunks: that of the orders, the given one, or the schedule's default."""
    if orders is not None:
        if value is not None and value != orders.num_chunks:
            raise UserError(f"chunks: got {quoted(value)}, but orders have {orders.num_chunks}")
        return orders.num_chunks
    chunks = default_chunks(schedule) if value is None else count("chunks", value)
    own = placement_of(schedule, 1, chunks).num_chunks
    if chunks != own:
        raise UserError(f"chunks: got {chunks}, expected {own} for {schedule} (or interleaved)")
    return chunks


def _time_step_ms(value: object, link_model: str) -> float | None:
    if value is None:
        return None
    if link_model == "blocking":
        raise UserError("time_step_ms: blocking links are simulated in exact time, expected none")
    step_ms = duration_ms("time_step_ms", value)
    if step_ms < _SHORTEST_TIME_STEP_MS:
        expected = f"expected a number of ms above 0, at least {_SHORTEST_TIME_STEP_MS:g}"
        raise UserError(f"time_step_ms: got {quoted(value)}, {expected}")
    return step_ms


def _jitter_ms(jitter_ms: tuple[float, ...] | None, link_model: str) -> tuple[float, ...] | None:
    if jitter_ms is not None and link_model != "latency":
        raise UserError(
            f"link_jitter_ms: got link_model {link_model!r}, expected 'latency', the only one "
            "that is simulated with jitter"
        )
    return jitter_ms


def _orders(fields: Mapping[str, Any], stages: int, microbatches: int) -> Schedule | None:
    placement = fields.get("placement", "wrap")
    if placement not in get_args(PlacementKind):
        raise UserError(f"placement: got {quoted(placement)}, expected wrap or v")
    if fields.get("orders") is None:
        return None
    rows = listed("orders", fields["orders"], stages, "stage")
    orders = tuple(_order(f"orders[{stage}]", row) for stage, row in enumerate(rows))
    schedule = Schedule("given", microbatches, orders, placement)
    try:
        schedule.validate()
    except ScheduleError as error:
        raise UserError(f"orders: {error.reason}") from error
    return schedule


def _order(field: str, row: object) -> tuple[Op, ...]:
    if not isinstance(row, list):
        raise UserError(f"{field}: got {quoted(row)}, expected a list of ops such as 'F3'")
    try:
        return tuple(Op.parse(text(field, op)) for op in row)
    except ValueError as error:
        raise UserError(f"{field}: {error}") from error


@dataclass(frozen=True)
class _Links:
    """The links to simulate and to plan for; by default, the latter add a margin for jitter."""

    simulated: Links
    planned: Links
    jitter_ms: tuple[float, ...] | None


def _links(fields: Mapping[str, Any], placement: Placement) -> _Links:
    """Reads the fields about links: one number for all, or a list with one for each link.

    A list may leave out the wrap-around link of chunks, which then has no delay; ``link_jitter_ms``
    has one number for each pair of neighbours.
    """
    links, num_stages = placement.links, placement.num_ranks

    def given(field: str, fallback: tuple[float, ...]) -> tuple[float, ...]:
        value = fields.get(field)
        if isinstance(value, list) and len(value) == num_stages - 1 < len(links):
            value = [*value, 0.0]
        return fallback if value is None else durations_ms(field, value, len(links), "link")

    both = given("link_ms", ())
    occupancy = given("link_occupancy_ms", (0.0,) * len(links))
    forward, backward = given("link_forward_ms", both), given("link_backward_ms", both)
    simulated = _delays(links, forward, backward, occupancy)
    jitter = _jitter(fields.get("link_jitter_ms"), num_stages)
    planned = _with_margin(simulated, jitter or ())
    if fields.get("planned_link_ms") is not None:
        latency = given("planned_link_ms", ())
        planned = _delays(links, latency, latency, occupancy)
    return _Links(simulated, planned, jitter)


def _delays(links: tuple[Link, ...], *columns: tuple[float, ...]) -> dict[Link, LinkDelay]:
    forward, backward, occupancy = columns
    rows = zip(links, forward, backward, occupancy, occupancy, strict=True)
    return {link: LinkDelay(*delay) for link, *delay in rows}


def _jitter(value: object, num_stages: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    return durations_ms("link_jitter_ms", value, num_stages - 1, "pair of neighbours")


def _with_margin(links: Links, jitter_ms: tuple[float, ...]) -> Links:
    margins = {
        Link(stage, stage + 1): JITTER_MARGIN * sigma for stage, sigma in enumerate(jitter_ms)
    }
    return {link: _slower(delay, margins.get(link, 0.0)) for link, delay in links.items()}


def _slower(delay: LinkDelay, by_ms: float) -> LinkDelay:
    return replace(
        delay,
        forward_latency_ms=delay.forward_latency_ms + by_ms,
        backward_latency_ms=delay.backward_latency_ms + by_ms,
    )


def _limits(fields: Mapping[str, Any], num_stages: int) -> Limits:
    """Reads the caps and the W groups; stash sizes may also be given without a cap on bytes."""
    given = fields.get("weight_group")
    group = 1 if given is None else count("weight_group", given)
    live_until = cast(LiveUntil, one_of("live_until", fields.get("live_until") or "B", ("B", "W")))
    max_live = counts("max_live", fields.get("max_live"), num_stages)
    cap = counts(_CAP, fields.get(_CAP), num_stages)
    after_forward = counts(_AFTER_FORWARD, fields.get(_AFTER_FORWARD), num_stages, least=0)
    after_backward = counts(_AFTER_BACKWARD, fields.get(_AFTER_BACKWARD), num_stages, least=0)
    if after_forward is None or after_backward is None:
        _require_no_bytes(fields)
        return Limits(max_live, live_until, weight_group=group)
    if cap is not None and max_live is not None:
        raise UserError(f"{_CAP}: got max_live as well, expected only one of them")
    sizes = StashBytes(after_forward, after_backward)
    return Limits(max_live, live_until, cap, sizes, group)


def _require_no_bytes(fields: Mapping[str, Any]) -> None:
    """Checks that no byte field is given: a cap needs both sizes, and each size the other."""
    given = [field for field in _BYTE_FIELDS if fields.get(field) is not None]
    missing = [field for field in _BYTE_FIELDS[1:] if field not in given]
    if given:
        raise UserError(f"{missing[0]}: missing, expected bytes, since {given[0]} is given")


# Readers of single values. Each raises a UserError with the field, the value and what is expected.


def listed(field: str, value: object, length: int, per: str) -> Sequence[Any]:
    """A list of one value per stage or link; a single number stands for all of them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value] * length
    if not isinstance(value, list | tuple):
        raise UserError(f"{field}: got {quoted(value)}, expected one number or a list of {length}")
    if len(value) != length:
        raise UserError(f"{field}: got {len(value)} values, expected {length} (one per {per})")
    return value


def durations_ms(field: str, value: object, length: int, per: str) -> tuple[float, ...]:
    """One duration per stage or link, in milliseconds."""
    values = listed(field, value, length, per)
    return tuple(duration_ms(f"{field}[{index}]", item) for index, item in enumerate(values))


def duration_ms(field: str, value: object) -> float:
    """A number of milliseconds, at least 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_MS:
        return float(value)
    raise UserError(
        f"{field}: got {quoted(value)}, expected a number of ms from 0 to {_LONGEST_MS:g}"
    )


def counts(field: str, value: object, length: int, least: int = 1) -> tuple[int, ...] | None:
    """One whole number per stage; None stays None."""
    if value is None:
        return None
    values = listed(field, value, length, "stage")
    return tuple(count(f"{field}[{index}]", item, least) for index, item in enumerate(values))


def count(field: str, value: object, least: int = 1) -> int:
    """A whole number, at least ``least``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise UserError(f"{field}: got {quoted(value)}, expected a whole number, at least {least}")


def text(field: str, value: object) -> str:
    """A text."""
    if isinstance(value, str):
        return value
    raise UserError(f"{field}: got {quoted(value)}, expected text")


def one_of(field: str, value: object, choices: Sequence[str]) -> str:
    """One of ``choices``."""
    if isinstance(value, str) and value in choices:
        return value
    *most, last = map(repr, choices)
    raise UserError(f"{field}: got {quoted(value)}, expected {', '.join(most)} or {last}")
