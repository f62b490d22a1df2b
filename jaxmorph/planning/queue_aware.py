"""Which schedule is shortest where direct transfers hold the queues of both their stages."""

from dataclasses import replace

from jaxmorph.control.profiler import Profile
from jaxmorph.planning.step_programs import order_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.planner import Plan, alternatives
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

_WORTH = 0.01  # a shorter step than this is as likely noise in what was measured
_ROUNDING = 1e-9  # by which sums of the same durations in another order may differ
_MOST_OPS = 20_000  # beyond, lowering every candidate would take seconds


def shorter_on_queues(made: Plan, profile: Profile, limits: Limits) -> Plan:
    """The plan, with another schedule where that makes the step shorter on in-order queues.

    The planner takes transfers to hold nobody up. Where all routes are delegated, or stages run in
    step, they don't; on the direct route a stage that is ahead or behind makes its neighbour wait.

    Args:
        profile: What ops and links cost.

    Returns:
        The plan or another one of its name, the first that is best by the blocking link model.
    """
    own = made.schedule
    if "direct" not in made.routes.values() or sum(map(len, own.orders)) > _MOST_OPS:
        return made
    own_ms = _held_ms(own, made, profile)
    best, best_ms = own, own_ms * (1 - _WORTH)
    for other in alternatives(profile.costs, profile.links, limits, own.num_microbatches):
        if other.orders == own.orders or _unheld_ms(other, profile) >= best_ms * (1 + _ROUNDING):
            continue  # queues that are held only make it longer
        held_ms = _held_ms(other, made, profile)
        if held_ms < best_ms:
            best, best_ms = other, held_ms
    if best is own:
        return made
    warmups = " ".join(map(str, best.warmup_forwards))
    return replace(
        made,
        schedule=best,
        predicted_step_s=_unheld_ms(best, profile) / 1e3,
        reason=(
            f"warm-up forwards {warmups}: the shortest of several where direct transfers hold "
            f"queues, {best_ms:.1f} ms instead of {own_ms:.1f}"
        ),
    )


def _unheld_ms(schedule: Schedule, profile: Profile) -> float:
    return simulate(schedule, profile.costs, profile.links).makespan_ms


def _held_ms(schedule: Schedule, made: Plan, profile: Profile) -> float:
    programs = order_step(schedule, profile, made.routes)
    return simulate_blocking(programs, profile.costs, profile.links).makespan_ms
