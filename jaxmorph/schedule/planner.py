"""Plans a step: a schedule that fits the costs, the links and the memory, with the reason."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from jaxmorph.errors import UserError
from jaxmorph.placement import placement_of
from jaxmorph.records import Routes
from jaxmorph.schedule.adaptive import adaptive_schedule
from jaxmorph.schedule.bound import certified_ms, lower_bound_ms
from jaxmorph.schedule.costs import Limits, Links, StageCosts, StageMemory
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, V_SCHEDULES, interleaved
from jaxmorph.schedule.list_schedule import make_workload, to_picoseconds, to_schedule
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.paper import (
    adapted_warmup_forwards,
    initial_schedule,
    reachable_warmup_forwards,
    select_ops,
)
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

INTERLEAVED = "interleaved"
SCHEDULE_NAMES = (*FIXED_SCHEDULES, INTERLEAVED, *V_SCHEDULES, "paper", "adaptive", "initial")
_ALTERNATIVES = ("paper", "initial", "zb-h1", "zb-h2")
_TAKES_WARMUPS = ("paper", "adaptive")
_WHOLE_BACKWARDS = ("gpipe", "1f1b", "1f1b-eager", INTERLEAVED)
_FIXED_REASON = "{} was asked for; its order depends on no cost"


@dataclass(frozen=True)
class Offloading:
    """The parameters by which `program.offload` moves stashes to host memory.

    Args:
        memory: What a microbatch holds on each stage, and the room on its device.
        spare: Places on the device kept free for stashes that are being copied.
        ahead: A stash's fetch starts at most this many ops before the op that reads it.
        early: Whether to prefer the stashes made first, among equally good choices.
    """

    memory: tuple[StageMemory, ...]
    spare: int = 0
    ahead: int = 1
    early: bool = False


@dataclass(frozen=True)
class Plan:
    """What every rank runs next, the step time to expect, and the reason in one line.

    Args:
        lower_bound_s: A step time that no schedule can beat.
        offloading: How stashes are offloaded; None if all fit on the devices.
    """

    schedule: Schedule
    routes: Routes
    predicted_step_s: float
    lower_bound_s: float
    reason: str
    offloading: Offloading | None = None

    def in_words(self) -> str:
        """Its schedule, its warm-up forwards, and the links that are not direct."""
        warmups = " ".join(map(str, self.schedule.warmup_forwards))
        delegated = (f"{link} {route}" for link, route in self.routes.items() if route != "direct")
        return "; ".join([f"{self.schedule.name}, warm-up forwards {warmups}", *delegated])


def plan(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    name: str = "adaptive",
    warmup_forwards: Sequence[int] | None = None,
    num_chunks: int = 1,
) -> Plan:
    """Plans one step with all links on the direct route; deterministic on every machine.

    Args:
        name: One of ``SCHEDULE_NAMES``. ``paper`` is Algorithm 2 with the greedy selection of
            Algorithms 3 and 4; ``adaptive`` is the shortest schedule found; ``initial`` tolerates
            delays of any one link (Algorithm 1).
        warmup_forwards: Warm-up forwards of each stage in place of Algorithm 2's. With them,
            ``adaptive`` is the same as ``paper``.
        num_chunks: Virtual stages per rank, for ``interleaved``; other schedules fix the number.

    Raises:
        UserError: An unknown name, a cap that the schedule cannot keep, or impossible warm-ups.
    """
    if name in _WHOLE_BACKWARDS:
        limits = limits.of_whole_backwards()
    problem = _Problem(costs, links, limits, num_microbatches)
    asked = _Asked(name, warmup_forwards, num_chunks)
    _validate(problem, asked)
    placement = placement_of(name, costs.num_stages, num_chunks)
    bound_ms = lower_bound_ms(costs, num_microbatches, links, limits, placement)
    schedule, reason = _order(problem, asked, bound_ms)
    require_room(schedule, limits)
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    return Plan(
        schedule,
        dict.fromkeys(schedule.placement.links, "direct"),
        makespan_ms / 1e3,
        certified_ms(bound_ms, makespan_ms) / 1e3,
        reason,
    )


class _Problem(NamedTuple):
    costs: StageCosts
    links: Links
    limits: Limits
    num_microbatches: int

    @property
    def caps(self) -> tuple[int, ...]:
        return self.limits.caps(self.costs.num_stages, self.num_microbatches)

    @property
    def of_single_weights(self) -> "_Problem":
        limits = self.limits.of_single_weights(self.costs.num_stages, self.num_microbatches)
        return self._replace(limits=limits)


class _Asked(NamedTuple):
    name: str
    warmup_forwards: Sequence[int] | None = None
    num_chunks: int = 1


def _validate(problem: _Problem, asked: _Asked) -> None:
    name, warmup_forwards, num_chunks = asked
    if name not in SCHEDULE_NAMES:
        raise UserError(f"schedule: got {name!r}, expected one of {', '.join(SCHEDULE_NAMES)}")
    if problem.num_microbatches < 1:
        raise UserError(f"num_microbatches: got {problem.num_microbatches}, expected at least 1")
    if num_chunks < 1:
        raise UserError(f"num_chunks: got {num_chunks}, expected at least 1")
    own_chunks = placement_of(name, problem.costs.num_stages, num_chunks).num_chunks
    if num_chunks not in (1, own_chunks):
        chunks = "one chunk" if own_chunks == 1 else f"{own_chunks} chunks"
        raise UserError(f"num_chunks: {name} has {chunks} per rank, got {num_chunks}")
    if warmup_forwards is not None and name not in _TAKES_WARMUPS:
        raise UserError(f"warmup_forwards: {name} has its own, expected paper or adaptive")
    require_feasible(problem.limits, problem.costs.num_stages, problem.num_microbatches)


def _order(problem: _Problem, asked: _Asked, bound_ms: float = 0.0) -> tuple[Schedule, str]:
    """The schedule that is asked for, and the reason for its order.

    It is planned with one W per microbatch; the W are grouped afterwards.

    Args:
        bound_ms: A step time that no schedule can beat: the search stops there.
    """
    group = problem.limits.weight_group
    schedule, reason = _single_order(problem.of_single_weights, asked, bound_ms)
    schedule = schedule.with_weight_groups(group)
    is_exact = group == 1 and not any(delay.occupies for delay in problem.links.values())
    if asked.name != "adaptive" or asked.warmup_forwards is not None or is_exact:
        return schedule, reason
    schedule = min(
        [schedule, *alternatives(*problem)],
        key=lambda each: simulate(each, problem.costs, problem.links).makespan_ms,
    )
    return schedule, _shortest(schedule)


def _single_order(problem: _Problem, asked: _Asked, bound_ms: float) -> tuple[Schedule, str]:
    name, warmup_forwards, num_chunks = asked
    stages, microbatches = problem.costs.num_stages, problem.num_microbatches
    if name == INTERLEAVED:
        return interleaved(stages, microbatches, num_chunks), _FIXED_REASON.format(name)
    if (make := (FIXED_SCHEDULES | V_SCHEDULES).get(name)) is not None:
        return make(stages, microbatches), _FIXED_REASON.format(name)
    if name == "initial":
        return initial_schedule(*problem)
    if warmup_forwards is not None:
        _require_possible(warmup_forwards, microbatches, problem.caps)
        return _selected(problem, name, warmup_forwards, "as given")
    warmup_forwards = adapted_warmup_forwards(
        problem.costs, problem.links, microbatches, problem.caps
    )
    if name == "paper":
        return _selected(problem, name, warmup_forwards, "by Equation 1, within the caps")
    return _adapted(problem, warmup_forwards, bound_ms)


def _selected(
    problem: _Problem, name: str, warmup_forwards: Sequence[int], origin: str
) -> tuple[Schedule, str]:
    schedule = select_ops(*problem, warmup_forwards, name)
    warmups = " ".join(map(str, warmup_forwards))
    # Before its first B arrives, a stage may have room for more forwards than these.
    return schedule, f"warm-up forwards at least {warmups} {origin}; then B before F before W"


def _adapted(
    problem: _Problem, warmup_forwards: Sequence[int], bound_ms: float
) -> tuple[Schedule, str]:
    workload = make_workload(*problem)
    bound = to_picoseconds(bound_ms)
    made = adaptive_schedule(workload, warmup_forwards, bound)
    schedule = to_schedule("adaptive", workload.num_stages, workload.num_microbatches, made.numbers)
    return schedule, _shortest(schedule)


def _shortest(schedule: Schedule) -> str:
    warmups = " ".join(map(str, schedule.warmup_forwards))
    return f"warm-up forwards {warmups}: the shortest step found within the caps"


def alternatives(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> list[Schedule]:
    """``paper``, ``initial``, ``zb-h1``, ``zb-h2`` and blocks, named adaptive, within the caps.

    The adaptive planner assumes one W per microbatch, and messages that overlap and block no queue.
    Where that does not hold, one of these may simulate a shorter step.
    """
    problem = _Problem(costs, links, limits, num_microbatches)
    made = [_order(problem, _Asked(name))[0] for name in _ALTERNATIVES]
    made += _in_blocks(problem)
    return [replace(schedule, name="adaptive") for schedule in made if fits(schedule, limits)]


def _in_blocks(problem: _Problem) -> Iterator[Schedule]:
    """The groups of W planned as if the microbatches of each were one; none if that has no room.

    F and B of a group then run in a row, so that its stashes wait for their W least.
    """
    group, count = problem.limits.weight_group, problem.num_microbatches
    if group == 1 or count % group:
        return
    limits = problem.limits
    caps, room = (
        None if most is None else tuple(each // group for each in most)
        for most in (limits.max_live, limits.max_stash_bytes)
    )
    if 0 in (caps or ()):
        return
    costs = StageCosts(*(tuple(group * ms for ms in row) for row in astuple(problem.costs)))
    limits = replace(limits, max_live=caps, max_stash_bytes=room, weight_group=1)
    blocks = _Problem(costs, problem.links, limits, count // group)
    try:
        require_feasible(limits, costs.num_stages, blocks.num_microbatches)
    except UserError:
        return
    schedule, _ = _order(blocks, _Asked("adaptive"))
    rows = (tuple(_of_block(order, group)) for order in schedule.orders)
    yield Schedule("adaptive", count, tuple(rows))


def _of_block(order: Sequence[Op], group: int) -> Iterator[Op]:
    for op in order:
        first = group * op.microbatch
        if op.kind is OpKind.W:
            yield Op(op.kind, first, group=group)
        else:
            yield from (Op(op.kind, first + place) for place in range(group))


def _require_possible(
    warmup_forwards: Sequence[int], num_microbatches: int, caps: Sequence[int]
) -> None:
    if len(warmup_forwards) != len(caps):
        raise UserError(
            f"warmup_forwards: got {len(warmup_forwards)} values, expected {len(caps)} "
            "(one per stage)"
        )
    reachable = reachable_warmup_forwards(warmup_forwards, num_microbatches, caps)
    for stage, (wanted, most) in enumerate(zip(warmup_forwards, reachable, strict=True)):
        if not 1 <= wanted <= most:
            raise UserError(
                f"warmup_forwards[{stage}]: got {wanted}, expected 1 to {max(most, 1)} (no more "
                "than the stage before, its cap, and the number of microbatches)"
            )


def require_feasible(limits: Limits, num_stages: int, num_microbatches: int) -> None:
    """Checks that every stage has room for one microbatch, or one group, so that a schedule fits.

    Raises:
        UserError: The first stage without that room, and how much it lacks.
    """
    group = min(limits.weight_group, num_microbatches)
    for stage, memory in enumerate(limits.stage_memory(num_stages, num_microbatches)):
        needed = memory.needed + (group - 1) * memory.after_backward
        if needed <= memory.room:
            continue
        if limits.max_stash_bytes is None:
            raise UserError(
                f"max_live[{stage}]: got {memory.room} until W on stage {stage}, expected at least "
                f"{needed}, as one W computes {group} microbatches"
            )
        kept = "one microbatch keeps" if group == 1 else f"{group} microbatches of one W keep"
        raise UserError(
            f"max_stash_bytes[{stage}]: got {memory.room:,} bytes, expected at least {needed:,}, "
            f"which {kept} on stage {stage}: {needed - memory.room:,} short; smaller microbatches, "
            "recomputing the stash or offloading it would help"
        )


def fits(schedule: Schedule, limits: Limits) -> bool:
    """Whether a schedule keeps every stage's memory cap."""
    try:
        require_room(schedule, limits)
    except UserError:
        return False
    return True


def require_room(schedule: Schedule, limits: Limits) -> None:
    """Checks that a schedule keeps every stage's memory cap; each of V chunks counts 1/V.

    Raises:
        UserError: The first stage that holds more, and how much it holds.
    """
    memory = limits.stage_memory(schedule.num_stages, schedule.num_microbatches)
    in_bytes = limits.max_stash_bytes is not None
    if not in_bytes and limits.max_live is None:
        return
    for stage, (order, room) in enumerate(zip(schedule.orders, memory, strict=True)):
        peak = -(-room.peak(order) // schedule.num_chunks)
        if peak > room.room:
            raise UserError(
                _too_many_bytes(schedule, stage, peak, room.room)
                if in_bytes
                else _too_many_live(schedule, stage, peak, room.room, limits)
            )


def _too_many_live(schedule: Schedule, stage: int, peak: int, cap: int, limits: Limits) -> str:
    return (
        f"max_live[{stage}]: {schedule.name} holds {peak} microbatches until "
        f"{limits.live_until} on stage {stage}, expected at most {cap}; "
        "paper and adaptive fit any cap"
    )


def _too_many_bytes(schedule: Schedule, stage: int, peak: int, cap: int) -> str:
    return (
        f"max_stash_bytes[{stage}]: {schedule.name} holds {peak:,} bytes on stage {stage}, "
        f"{peak - cap:,} more than {cap:,}; fewer microbatches in flight (as paper and adaptive "
        "plan them), recomputing the stash or offloading it would help"
    )
