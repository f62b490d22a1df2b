"""Which schedule is shortest where direct transfers hold the queues of both their stages."""

from dataclasses import replace

from jaxmorph.control.profiler import Profile
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.planner import Plan, alternatives
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

_WORTH = 0.01  # a shorter step than this is as likely noise in what was measured
_MOST_OPS = 20_000  # beyond, lowering every candidate would take seconds


def shorter_on_queues(made: Plan, profile: Profile, limits: Limits) -> Plan:
    """The plan, with another schedule where that makes the step shorter on in-order queues.

    The planner takes transfers to hold nobody up. Where all routes are delegated, or stages run in
    step, they don't; on the direct route a stage that is ahead or behind makes its neighbour wait.

    Args:
        made: What was planned.
        profile: What ops and links cost.
        limits: Memory caps.

    Returns:
        The plan or another one of its name, the first that is best by the blocking link model.
    """
    own = made.schedule
    if "direct" not in made.routes.values() or sum(map(len, own.orders)) > _MOST_OPS:
        return made
    costs, links = profile.costs, profile.links
    others = alternatives(costs, links, limits, own.num_microbatches)
    held_ms = {id(other): _held_ms(other, made, profile) for other in (own, *others)}
    best = min(others, key=lambda other: held_ms[id(other)], default=own)
    if held_ms[id(best)] >= held_ms[id(own)] * (1 - _WORTH):
        return made
    warmups = " ".join(map(str, best.warmup_forwards))
    return replace(
        made,
        schedule=best,
        predicted_step_s=simulate(best, costs, links).makespan_ms / 1e3,
        reason=(
            f"warm-up forwards {warmups}: the shortest of several where direct transfers hold "
            f"queues, {held_ms[id(best)]:.1f} ms instead of {held_ms[id(own)]:.1f}"
        ),
    )


def _held_ms(schedule: Schedule, made: Plan, profile: Profile) -> float:
    programs = lower_step(schedule, profile, made.routes)
    return simulate_blocking(programs, profile.costs, profile.links).makespan_ms
