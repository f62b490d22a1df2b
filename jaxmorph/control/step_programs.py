"""From a schedule to every rank's instructions, and which schedule is best on in-order queues."""

from collections.abc import Sequence
from dataclasses import astuple, replace
from statistics import median

from jaxmorph.control.profiler import Profile
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.check import check
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.lowering import lower_in_step, lower_order
from jaxmorph.program.offload import offload
from jaxmorph.records import Routes
from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.planner import Offloading, Plan, alternatives
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

_NOISE = 0.05  # a difference between stages that is not worth an order of transfers
_WORTH = 0.01  # a shorter step than this is as likely noise in what was measured
_ROUNDING = 1e-9  # by which sums of the same durations in another order may differ
_MOST_OPS = 20_000  # beyond, lowering every candidate would take seconds


def lower_step(
    schedule: Schedule,
    profile: Profile,
    routes: Routes | None = None,
    num_tied: int = 0,
    offloading: Offloading | None = None,
) -> tuple[RankProgram, ...]:
    """Every rank's instructions for a step, checked by a replay of all ranks.

    Args:
        profile: What ops and links cost; it decides the order of direct transfers.
        routes: The route of each link; a link that is not named is direct.
        num_tied: How many tied parameters the first and the last stage hold copies of.
        offloading: How the schedule is made to fit the devices; None: it fits.

    Raises:
        UserError: If it can't be made to fit.
    """
    routes = routes or {}
    costs, links = _for_ordering(routes, profile)
    programs = lower_in_step(schedule, costs, links, routes, num_tied=num_tied)
    if offloading is None:
        check(programs)
        return programs
    programs = offload_step(programs, offloading)
    check(programs, offloading.memory)
    return programs


def offload_step(
    programs: Sequence[RankProgram], offloading: Offloading
) -> tuple[RankProgram, ...]:
    """The same programs, each with the offloads that its device needs.

    Raises:
        UserError: If they can't be made to fit.
    """
    how = {
        "spare": offloading.spare,
        "ahead": offloading.ahead,
        "early": offloading.early,
    }
    return tuple(
        offload(program, memory, **how)
        for program, memory in zip(programs, offloading.memory, strict=True)
    )


def shorter_on_queues(made: Plan, profile: Profile, limits: Limits) -> Plan:
    """The plan, with another schedule where that makes the step shorter on in-order queues.

    The planner takes transfers to hold nobody up. Where all routes are delegated, or stages run in
    step, they don't; on the direct route a stage that is ahead or behind makes its neighbour wait.
    The first that is best by the blocking link model keeps the plan's name.
    """
    own = made.schedule
    if "direct" not in made.routes.values() or sum(map(len, own.orders)) > _MOST_OPS:
        return made
    own_ms = _blocking_ms(own, made, profile)
    best, best_ms = own, own_ms * (1 - _WORTH)
    for other in alternatives(profile.costs, profile.links, limits, own.num_microbatches):
        if other.orders == own.orders or _overlapped_ms(other, profile) >= best_ms * (
            1 + _ROUNDING
        ):
            continue  # queues that are held only make it longer
        held_ms = _blocking_ms(other, made, profile)
        if held_ms < best_ms:
            best, best_ms = other, held_ms
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


def _overlapped_ms(schedule: Schedule, profile: Profile) -> float:
    return simulate(schedule, profile.costs, profile.links).makespan_ms


def _blocking_ms(schedule: Schedule, made: Plan, profile: Profile) -> float:
    """A step of one chunk as `lower_step` would order it, without its frees and its check."""
    costs, links = _for_ordering(made.routes, profile)
    programs = lower_order(schedule, simulate(schedule, costs, links), made.routes)
    return simulate_blocking(programs, profile.costs, profile.links).makespan_ms


def _for_ordering(routes: Routes, profile: Profile) -> tuple[StageCosts, Links]:
    """What decides the order of direct transfers: costs without noise, and delegated links alone.

    A direct transfer holds both ends' queues, so stages that cost the same run in step, boundary to
    boundary. A difference of a percent between measured costs, or a link's latency of a fraction
    of an op, must not push transfers into the middle of the peer's ops, where both ends would wait.
    """
    costs = StageCosts(*map(_without_noise, astuple(profile.costs)))
    delegated = {
        link: state
        for link, state in profile.links.items()
        if routes.get(link, "direct") == "delegated"
    }
    return costs, delegated


def _without_noise(durations_ms: tuple[float, ...]) -> tuple[float, ...]:
    """Stages that cost nearly the median cost exactly that; the others stay as they are."""
    middle_ms = median(durations_ms)
    near_ms = _NOISE * middle_ms
    return tuple(
        middle_ms if abs(duration_ms - middle_ms) <= near_ms else duration_ms
        for duration_ms in durations_ms
    )
