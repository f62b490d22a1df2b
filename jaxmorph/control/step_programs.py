"""Lowers a schedule to every rank's instructions.

Also picks schedules for in-order queues and for few slots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from statistics import median

from jaxmorph.control.profiler import Profile
from jaxmorph.errors import UserError
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.check import ProgramError, check
from jaxmorph.program.instructions import Channel, RankInstructions
from jaxmorph.program.lowering import lower, lower_in_step
from jaxmorph.program.offload import offload
from jaxmorph.program.pairs import goes_in_pairs
from jaxmorph.program.slots_needed import HostRoom, scarce_slots, slots_needed
from jaxmorph.records import Routes, in_bytes
from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.planner import Offloading, Plan, alternatives
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline

_NOISE = 0.05  # a difference between stages that must not affect the order of transfers
_WORTH = 0.01  # a smaller gain may be noise of the measurements
_ROUNDING = 1e-9  # of sums of the same durations in another order
_MOST_OPS = 20_000  # more would take seconds to simulate for every candidate


def lower_step(
    schedule: Schedule,
    profile: Profile,
    routes: Routes | None = None,
    num_tied: int = 0,
    offloading: Offloading | None = None,
) -> tuple[RankInstructions, ...]:
    """Every rank's instructions for a step, checked by a replay of all ranks.

    Where the schedule splits its backwards and is not too large to simulate, direct transfers go in
    pairs if the simulated step is then clearly shorter.

    Args:
        profile: Its costs decide the order of direct transfers.
        num_tied: How many tied parameters the first and the last stage hold copies of.
        offloading: How to make the schedule fit the devices; None: it fits.

    Raises:
        UserError: The schedule can't be made to fit.
    """
    routes = routes or {}
    costs, links = _for_ordering(routes, profile)
    lowering = partial(lower_in_step, schedule, costs, links, routes, num_tied=num_tied)
    programs = _paired_if_shorter(lowering, schedule, routes, profile)
    if offloading is None:
        check(programs)
        return programs
    programs = offload_step(programs, offloading)
    check(programs, offloading.memory)
    return programs


def _paired_if_shorter(
    lowering: Callable[..., tuple[RankInstructions, ...]],
    schedule: Schedule,
    routes: Routes,
    profile: Profile,
) -> tuple[RankInstructions, ...]:
    """The instructions, with pairs if they make a step with split backwards clearly shorter.

    Args:
        lowering: Lowers the schedule; `pairs=True` asks for pairs.
    """
    programs = lowering()
    is_direct = any(routes.get(each, "direct") == "direct" for each in schedule.placement.links)
    if goes_in_pairs(schedule) or not is_direct or _is_large(schedule):
        return programs
    paired = lowering(pairs=True)
    if paired == programs:
        return programs
    own_ms, paired_ms = (
        simulate_blocking(each, profile.costs, profile.links).makespan_ms
        for each in (programs, paired)
    )
    return paired if paired_ms < own_ms * (1 - _WORTH) else programs


def offload_step(
    programs: Sequence[RankInstructions], offloading: Offloading
) -> tuple[RankInstructions, ...]:
    """The instructions with the offloads that each device needs.

    Raises:
        UserError: They can't be made to fit.
    """
    how = {"spare": offloading.spare, "ahead": offloading.ahead, "early": offloading.early}
    return tuple(
        offload(program, memory, **how)
        for program, memory in zip(programs, offloading.memory, strict=True)
    )


def shorter_on_queues(made: Plan, profile: Profile, limits: Limits) -> Plan:
    """The plan, or one with another schedule whose step is shorter on in-order queues.

    The planner assumes that transfers block no stage. On the direct route, however, a stage that is
    ahead or behind makes its neighbour wait.
    """
    own = made.schedule
    if "direct" not in made.routes.values() or _is_large(own):
        return made
    own_ms = _blocking_ms(own, made, profile)
    best, best_ms = own, own_ms * (1 - _WORTH)
    for other in alternatives(profile.costs, profile.links, limits, own.num_microbatches):
        # Blocking only makes a step longer, so most candidates need no slow simulation.
        limit_ms = best_ms * (1 + _ROUNDING)
        if other.orders == own.orders or _overlapped_ms(other, profile) >= limit_ms:
            continue
        step_ms = _blocking_ms(other, made, profile)
        if step_ms < best_ms:
            best, best_ms = other, step_ms
    if best is own:
        return made
    warmups = " ".join(map(str, best.warmup_forwards))
    return replace(
        made,
        schedule=best,
        predicted_step_s=_overlapped_ms(best, profile) / 1e3,
        reason=(
            f"warm-up forwards {warmups}: the shortest of several where direct transfers hold "
            f"queues, {best_ms:.1f} ms instead of {own_ms:.1f}"
        ),
    )


def shorter_in_slots(
    made: Plan, profile: Profile, limits: Limits, num_tied: int, room: HostRoom
) -> Plan:
    """The plan, or one with another schedule whose step is shorter with the slots that fit.

    The planner assumes that no send waits for a slot. Where host memory is short, a plan with many
    messages in flight waits, or can't run at all; one with fewer may be better.

    Raises:
        UserError: With the slots that fit, no known schedule can run on these routes.
    """
    if "delegated" not in made.routes.values() or room.rank_bytes is None:
        return made
    free_ms, own_ms, taken = _in_slots(made, profile, num_tied, room)
    if own_ms <= free_ms * (1 + _WORTH):
        return made
    best, best_ms = made, own_ms
    for schedule in _others(made.schedule, profile, limits, must=own_ms == math.inf):
        other = replace(made, schedule=schedule)
        _, step_ms, _ = _in_slots(other, profile, num_tied, room)
        if step_ms < best_ms * (1 - _WORTH):
            best, best_ms = other, step_ms
    most = in_bytes(max(room.rank_bytes))
    if best_ms == math.inf:
        raise UserError(
            f"limits.host_gib: leaves {most} for slots, expected more: the ranks would wait for "
            f"one another's slots for ever; without the limit a rank takes {in_bytes(taken)}"
        )
    warmups = " ".join(map(str, best.schedule.warmup_forwards))
    return replace(
        best,
        predicted_step_s=best_ms / 1e3,
        reason=(
            f"warm-up forwards {warmups}: with {most} a rank for slots, {best_ms:.1f} ms; "
            f"{free_ms:.1f} with {in_bytes(taken)}"
        ),
    )


def _others(own: Schedule, profile: Profile, limits: Limits, *, must: bool) -> Sequence[Schedule]:
    """Other schedules in place of an adaptive one; none if lowering them takes long, unless `must`.

    A schedule that the configuration names stays.
    """
    if own.name != "adaptive" or (_is_large(own) and not must):
        return ()
    return alternatives(profile.costs, profile.links, limits, own.num_microbatches)


def _in_slots(
    made: Plan, profile: Profile, num_tied: int, room: HostRoom
) -> tuple[float, float, int]:
    """The step in ms without a limit, and with the slots that fit; infinite if it can't run.

    Also the most bytes of slots that a rank takes without a limit.
    """
    programs = lower_step(made.schedule, profile, made.routes, num_tied)
    needed = slots_needed(programs)
    taken = max(room.taken_bytes(room.slots_wanted(needed), len(programs)))
    free_ms = simulate_blocking(programs, profile.costs, profile.links).makespan_ms
    scarce = scarce_slots(room.slots_that_fit(needed), needed)
    return free_ms, step_in_slots_ms(programs, profile, scarce), taken


def simulate_step(
    programs: Sequence[RankInstructions], profile: Profile, scarce: Mapping[Channel, int]
) -> Timeline:
    """A step under a profile; direct transfers hold queues, delegated ones don't.

    Args:
        scarce: The channels with too few slots, whose sends may wait, and how many they have.
    """
    return simulate_blocking(
        programs, profile.costs, profile.links, copies=profile.copies, slots=scarce
    )


def step_in_slots_ms(
    programs: Sequence[RankInstructions], profile: Profile, scarce: Mapping[Channel, int]
) -> float:
    """The simulated step with few slots for some channels; infinite if it can't run."""
    try:
        return simulate_step(programs, profile, scarce).makespan_ms
    except ProgramError:  # the ranks would wait for each other for ever
        return math.inf


def _is_large(schedule: Schedule) -> bool:
    return sum(map(len, schedule.orders)) > _MOST_OPS


def _overlapped_ms(schedule: Schedule, profile: Profile) -> float:
    return simulate(schedule, profile.costs, profile.links).makespan_ms


def _blocking_ms(schedule: Schedule, made: Plan, profile: Profile) -> float:
    """A step of one chunk, ordered as `lower_step` does, without its check."""
    costs, links = _for_ordering(made.routes, profile)
    lowering = partial(lower, schedule, simulate(schedule, costs, links), made.routes)
    programs = _paired_if_shorter(lowering, schedule, made.routes, profile)
    return simulate_blocking(programs, profile.costs, profile.links).makespan_ms


def _for_ordering(routes: Routes, profile: Profile) -> tuple[StageCosts, Links]:
    """The costs that order direct transfers: without noise, and with delegated links only.

    A direct transfer holds both ends' queues, so stages of equal cost run in lockstep. A difference
    of a percent between measured costs, or a direct link's latency of a fraction of an op, must not
    move a transfer into the middle of the peer's op, where both ends would wait.
    """
    costs = StageCosts(*map(_without_noise, astuple(profile.costs)))
    delegated = {
        link: state
        for link, state in profile.links.items()
        if routes.get(link, "direct") == "delegated"
    }
    return costs, delegated


def _without_noise(durations_ms: tuple[float, ...]) -> tuple[float, ...]:
    """Set durations near the median to the median."""
    middle_ms = median(durations_ms)
    near_ms = _NOISE * middle_ms
    return tuple(
        middle_ms if abs(duration_ms - middle_ms) <= near_ms else duration_ms
        for duration_ms in durations_ms
    )
