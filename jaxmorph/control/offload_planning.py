"""Finds plans that hold more than fits on the devices, and offload the rest to host memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, offload_step, simulate_step
from jaxmorph.errors import UserError
from jaxmorph.program.instructions import RankInstructions
from jaxmorph.program.offload import count_offloads, offload_these, waiting_longest
from jaxmorph.program.slots_needed import HostRoom, most_offloaded_bytes
from jaxmorph.records import in_bytes
from jaxmorph.schedule.costs import Limits, StageMemory, StashBytes
from jaxmorph.schedule.planner import Offloading, Plan, fits

PlanWithin = Callable[[Limits], Plan]

_WORTH = 0.005  # a smaller gain is not worth more copies
_SPARES = (0, 1, 2, 4)
_SAMPLES = 2  # stashes per stage, to time copies


@dataclass(frozen=True)
class _Candidate:
    """A plan, its simulated step, and the number of stashes that it offloads.

    Attributes:
        programs: All ranks' instructions, if they offload any.
    """

    plan: Plan
    step_ms: float
    offloads: int
    programs: tuple[RankInstructions, ...] = ()


def plan_with_offload(
    plan_within: PlanWithin,
    device: Limits,
    profile: Profile,
    num_tied: int = 0,
    room: HostRoom | None = None,
) -> Plan:
    """The plan with the shortest step, and of nearly equal ones the one with the fewest copies.

    The candidates are the plan that fits, the plan without caps, and some between, each with more
    or fewer places on the devices kept free for stashes in transit. A plan that fits offloads
    nothing.

    Args:
        device: The caps of the devices.
        room: The hosts' memory for stashes and slots; None: no limit.

    Raises:
        UserError: No plan can be made to fit.
    """
    free = plan_within(Limits(live_until=device.live_until, weight_group=device.weight_group))
    if fits(free.schedule, device):
        return free
    candidates: list[_Candidate] = []
    try:
        made = plan_within(device)
    except UserError:  # a schedule of fixed order has a fixed peak
        pass
    else:
        programs = lower_step(made.schedule, profile, made.routes, num_tied)
        candidates.append(_Candidate(made, _simulated_ms(programs, profile), 0))
    programs = lower_step(free.schedule, profile, free.routes, num_tied)
    shortest_ms = _simulated_ms(programs, profile)  # the lower bound of all candidates
    if not candidates or shortest_ms < candidates[0].step_ms * (1 - _WORTH):
        for wider in _wider(plan_within, device, free):
            most_ms = min((one.step_ms for one in candidates), default=math.inf)
            offloaded = _offloaded(wider, device, profile, num_tied, most_ms)
            candidates += (
                each
                for each in offloaded
                if room is None or room.holds(offloaded_bytes(each.programs, profile))
            )
    if not candidates:
        raise _unfit(free, device, programs, profile)
    return _best(candidates).plan


def with_sampled_copies(programs: Sequence[RankInstructions]) -> tuple[RankInstructions, ...]:
    """The instructions; a rank without offloads moves a few stashes, so that copies are timed."""
    return tuple(
        program
        if count_offloads([program])
        else offload_these(program, waiting_longest(program, _SAMPLES))
        for program in programs
    )


def _wider(plan_within: PlanWithin, device: Limits, free: Plan) -> Iterator[Plan]:
    """Plans that hold more and more, up to the one without caps."""
    schedule = free.schedule
    memory = device.stage_memory(schedule.num_stages, schedule.num_microbatches)
    keeps_for_weights = any(stage.after_backward for stage in memory)
    group = device.weight_group
    caps = _caps_of_weights(memory, group) if keeps_for_weights else _raised_caps(memory, free)
    for limits in caps:
        try:
            yield plan_within(replace(limits, weight_group=group))
        except UserError:  # a schedule of fixed order has a fixed peak
            break
    yield free


def _raised_caps(memory: Sequence[StageMemory], free: Plan) -> Iterator[Limits]:
    """Caps with room for 1, 2, 4, ... more microbatches than fit, below the peak of `free`."""
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


def _caps_of_weights(memory: Sequence[StageMemory], weight_group: int) -> Iterator[Limits]:
    """Caps for stages where B leaves a stash for W, which can't be offloaded.

    First half of each F stash counts as held, then none of it. The room is what the devices have
    besides the F stash of the running op and, in every other cap, one more F stash.
    """
    # All sizes are doubled, so that half a stash is a whole number.
    backward = tuple(2 * stage.after_backward for stage in memory)
    for halves, places in product((1, 0), (2, 1)):
        forward = tuple(halves * stage.after_forward for stage in memory)
        rooms = tuple(2 * (stage.room - places * stage.after_forward) for stage in memory)
        waiting = [(weight_group - 1) * size for size in backward]
        least = map(sum, zip(map(max, forward, backward), waiting, strict=True))
        fitting = tuple(map(max, rooms, least))
        yield Limits(max_stash_bytes=fitting, stash_bytes=StashBytes(forward, backward))


def _offloaded(
    made: Plan, device: Limits, profile: Profile, num_tied: int, most_ms: float
) -> Iterator[_Candidate]:
    """A plan with its offloads placed in several ways.

    Nothing if it can't be made to fit, or if even with free copies it would gain too little on
    `most_ms`. More places are kept free for stashes only while copies make the step longer.
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
        offloadings = (Offloading(memory, spare, *choice) for choice in choices)
        try:
            placed = [_placed(made, each, programs, profile) for each in offloadings]
        except UserError:
            return
        yield from placed
        if min(candidate.step_ms for candidate in placed) <= near_ms:
            return


def _placed(
    made: Plan, offloading: Offloading, programs: tuple[RankInstructions, ...], profile: Profile
) -> _Candidate:
    """A plan with one placement of its offloads.

    Raises:
        UserError: It can't be made to fit.
    """
    moving = offload_step(programs, offloading)
    step_ms, offloads = _simulated_ms(moving, profile), count_offloads(moving)
    reason = f"{made.reason}; {offloads} stashes of a step go to host memory and back"
    plan = replace(made, predicted_step_s=step_ms / 1e3, offloading=offloading, reason=reason)
    return _Candidate(plan, step_ms, offloads, moving)


def offloaded_bytes(programs: Sequence[RankInstructions], profile: Profile) -> tuple[int, ...]:
    """The most bytes of stashes that each rank has in host memory at once; 0 if not known."""
    sizes = profile.stash_bytes
    stashes = [0] * len(programs) if sizes is None else sizes.after_forward
    return tuple(map(most_offloaded_bytes, programs, stashes))


def _ops_beside_a_copy(profile: Profile, num_chunks: int) -> int:
    """The number of ops that run while a stash is fetched, rounded up, plus one as a margin."""
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


def _simulated_ms(programs: tuple[RankInstructions, ...], profile: Profile) -> float:
    return simulate_step(programs, profile, {}).makespan_ms


def _best(candidates: list[_Candidate]) -> _Candidate:
    """The candidate with the fewest copies of those that are nearly the shortest."""
    shortest_ms = min(candidate.step_ms for candidate in candidates)
    near = [c for c in candidates if c.step_ms <= shortest_ms * (1 + _WORTH)]
    return min(near, key=lambda candidate: (candidate.offloads, candidate.step_ms))


def _unfit(
    free: Plan, device: Limits, programs: tuple[RankInstructions, ...], profile: Profile
) -> UserError:
    """The error if no plan fits the hosts' memory; raises one if none fits the devices'."""
    schedule = free.schedule
    memory = device.stage_memory(schedule.num_stages, schedule.num_microbatches)
    moving = offload_step(programs, Offloading(memory))
    away = in_bytes(max(offloaded_bytes(moving, profile)))
    return UserError(
        f"offload: {schedule.name} keeps {away} of stashes in a rank's host memory, more than "
        "limits.host_gib or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB leaves; paper and adaptive fit any "
        "cap without it"
    )
