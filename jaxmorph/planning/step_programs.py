"""From a schedule to every rank's instructions, as training runs them."""

from collections.abc import Sequence
from dataclasses import astuple
from statistics import median

from jaxmorph.control.profiler import Profile
from jaxmorph.program.check import check
from jaxmorph.program.in_step import lower_in_step
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.lowering import lower_order
from jaxmorph.program.offload import offload
from jaxmorph.schedule.costs import Links, Routes, StageCosts
from jaxmorph.schedule.offloading import Offloading
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

_NOISE = 0.05  # a difference between stages that is not worth an order of transfers


def lower_step(
    schedule: Schedule,
    profile: Profile,
    routes: Routes | None = None,
    num_tied: int = 0,
    offloading: Offloading | None = None,
) -> tuple[RankProgram, ...]:
    """Every rank's instructions for a step, checked by a replay of all ranks.

    Args:
        schedule: What every stage runs, in which order.
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


def order_step(schedule: Schedule, profile: Profile, routes: Routes) -> tuple[RankProgram, ...]:
    """What `lower_step` makes of a schedule with one chunk, only to be simulated.

    Nothing is freed, and nothing checked.
    """
    costs, links = _for_ordering(routes, profile)
    return lower_order(schedule, simulate(schedule, costs, links), routes)


def offload_step(
    programs: Sequence[RankProgram], offloading: Offloading
) -> tuple[RankProgram, ...]:
    """The same programs, each with the offloads that its device needs.

    Args:
        programs: One per rank, in rank order, without offloads.
        offloading: How they are made to fit.

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
