"""Whether a plan is worth holding more than fits on the devices, with the rest in host memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, offload_step
from jaxmorph.errors import UserError
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.offload import count_offloads, offload_these, waiting_longest
from jaxmorph.schedule.costs import Limits, StageMemory, StashBytes
from jaxmorph.schedule.planner import Offloading, Plan, fits

PlanWithin = Callable[[Limits], Plan]

_WORTH = 0.005  # a step that is shorter by less is not worth more copies
_SPARES = (0, 1, 2, 4)
_SAMPLES = 2  # stashes of a stage whose copies are timed


@dataclass(frozen=True)
class _Candidate:
    """A plan as it would run: how long its step takes, and how many stashes it offloads."""

    plan: Plan
    step_ms: float
    offloads: int


def plan_with_offload(
    plan_within: PlanWithin, device: Limits, profile: Profile, num_tied: int = 0
) -> Plan:
    """The plan with the shortest step, copies included, and of those as short the fewest copies.

    Considered are the plan that fits, the one without caps, and some between, each with more or
    fewer places on the devices kept free for stashes on their way.

    Args:
        device: What the devices may hold.

    Returns:
        The plan; one that fits offloads nothing.

    Raises:
        UserError: If no plan can be made to fit.
    """
    free = plan_within(Limits(live_until=device.live_until))
    if _is_free(device) or fits(free.schedule, device):
        return free
    candidates = list(_within_devices(plan_within, device, profile, num_tied))
    programs = lower_step(free.schedule, profile, free.routes, num_tied)
    shortest_ms = _simulated_ms(programs, profile)  # no candidate can be expected to be shorter
    if not candidates or shortest_ms < candidates[0].step_ms * (1 - _WORTH):
        for wider in _wider(plan_within, device, free):
            most_ms = min((one.step_ms for one in candidates), default=math.inf)
            candidates += _offloaded(wider, device, profile, num_tied, most_ms)
    return _best(candidates).plan if candidates else _unfit(plan_within, free, device, programs)


def with_sampled_copies(programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    """The same programs, of which each without offloads moves some stashes: copies are timed."""
    return tuple(
        program if count_offloads([program]) else _with_samples(program) for program in programs
    )


def _with_samples(program: RankProgram) -> RankProgram:
    return offload_these(program, waiting_longest(program, _SAMPLES))


def _is_free(device: Limits) -> bool:
    return device.max_live is None and device.max_stash_bytes is None


def _within_devices(
    plan_within: PlanWithin, device: Limits, profile: Profile, num_tied: int
) -> Iterator[_Candidate]:
    """The plan that fits as it is, if there is one: schedules of a fixed order may not."""
    try:
        made = plan_within(device)
    except UserError:
        return
    programs = lower_step(made.schedule, profile, made.routes, num_tied)
    yield _Candidate(made, _simulated_ms(programs, profile), 0)


def _wider(plan_within: PlanWithin, device: Limits, free: Plan) -> Iterator[Plan]:
    """Plans that hold more and more than fits, up to the one without caps."""
    schedule = free.schedule
    memory = device.stage_memory(schedule.num_stages, schedule.num_microbatches)
    keeps_for_weights = any(stage.after_backward for stage in memory)
    caps = _caps_of_weights(memory) if keeps_for_weights else _raised_caps(memory, free)
    for limits in caps:
        try:
            yield plan_within(limits)
        except UserError:  # a schedule of a fixed order holds what it holds
            break
    yield free


def _raised_caps(memory: Sequence[StageMemory], free: Plan) -> Iterator[Limits]:
    """Caps with room for 1, 2, 4, ... microbatches more than fit, below what a plan holds."""
    schedule = free.schedule
    excess = max(
        (stage.peak(order) / schedule.num_chunks - stage.room) / max(1, stage.after_forward)
        for stage, order in zip(memory, schedule.orders, strict=True)
    )
    forward = tuple(stage.after_forward for stage in memory)
    extra = 1
    while extra < excess:
        rooms = tuple(stage.room + extra * stage.after_forward for stage in memory)
        none = (0,) * len(rooms)
        yield Limits(max_stash_bytes=rooms, stash_bytes=StashBytes(forward, none))
        extra *= 2


def _caps_of_weights(memory: Sequence[StageMemory]) -> Iterator[Limits]:
    """Caps on what B leaves for W, which is never moved; of a stash half has to fit, then nothing.

    There is room for it beside the stash of the op that runs, and in half of them for one more.
    """
    backward = tuple(2 * stage.after_backward for stage in memory)
    for halves, places in product((1, 0), (2, 1)):
        forward = tuple(halves * stage.after_forward for stage in memory)
        rooms = tuple(2 * (stage.room - places * stage.after_forward) for stage in memory)
        least = map(max, forward, backward)
        fitting = tuple(map(max, rooms, least))
        yield Limits(max_stash_bytes=fitting, stash_bytes=StashBytes(forward, backward))


def _offloaded(
    made: Plan, device: Limits, profile: Profile, num_tied: int, most_ms: float
) -> Iterator[_Candidate]:
    """A plan with its offloads, placed in several ways; nothing if it can't be made to fit.

    Nor if it would hardly be shorter than others that hold less, however little its copies took.
    More places are kept free for those only while they make the step longer.
    """
    schedule = made.schedule
    memory = device.stage_memory(schedule.num_stages, schedule.num_microbatches)
    programs = lower_step(schedule, profile, made.routes, num_tied)
    shortest_ms = _simulated_ms(programs, profile)
    beside = _ops_beside_a_copy(profile, schedule.num_chunks)
    near_ms = shortest_ms * (1 + _WORTH)
    if near_ms >= most_ms:
        return
    for spare in _SPARES:
        choices = product((beside, 2 * beside), (False, True))
        ways = (Offloading(memory, spare, *choice) for choice in choices)
        try:
            placed = [_placed(made, way, programs, profile) for way in ways]
        except UserError:
            return
        yield from placed
        if min(candidate.step_ms for candidate in placed) <= near_ms:
            return


def _placed(
    made: Plan, way: Offloading, programs: tuple[RankProgram, ...], profile: Profile
) -> _Candidate:
    """A plan whose programs offload in one way.

    Raises:
        UserError: If they can't be made to fit.
    """
    moving = offload_step(programs, way)
    step_ms, offloads = _simulated_ms(moving, profile), count_offloads(moving)
    reason = f"{made.reason}; {offloads} stashes of a step go to host memory and back"
    plan = replace(made, predicted_step_s=step_ms / 1e3, offloading=way, reason=reason)
    return _Candidate(plan, step_ms, offloads)


def _ops_beside_a_copy(profile: Profile, num_chunks: int) -> int:
    """How many ops pass while a stash comes back, rounded up, and one for luck."""
    if profile.copies is None:
        return 1
    costs = profile.costs
    per_stage = zip(
        profile.copies.fetch_ms,
        costs.forward_ms,
        costs.backward_input_ms,
        costs.backward_weight_ms,
        strict=True,
    )
    ops = (3 * num_chunks * fetch_ms / max(sum(op_ms), 1e-3) for fetch_ms, *op_ms in per_stage)
    return 1 + math.ceil(max(ops))


def _simulated_ms(programs: tuple[RankProgram, ...], profile: Profile) -> float:
    return simulate_blocking(
        programs, profile.costs, profile.links, copies=profile.copies
    ).makespan_ms


def _best(candidates: list[_Candidate]) -> _Candidate:
    """Of those about as short as the shortest, the one with the fewest copies."""
    shortest_ms = min(candidate.step_ms for candidate in candidates)
    near = [c for c in candidates if c.step_ms <= shortest_ms * (1 + _WORTH)]
    return min(near, key=lambda candidate: (candidate.offloads, candidate.step_ms))


def _unfit(
    plan_within: PlanWithin, free: Plan, device: Limits, programs: tuple[RankProgram, ...]
) -> Plan:
    """Raises what keeps every plan from fitting."""
    schedule = free.schedule
    memory = device.stage_memory(schedule.num_stages, schedule.num_microbatches)
    offload_step(programs, Offloading(memory))
    return plan_within(device)
