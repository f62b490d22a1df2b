"""The plan to begin with, when no link is known to be slow: ready for any of them to turn so."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.list_schedule import Rule, list_schedule
from jaxmorph.schedule.numbering import to_schedule
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.slackness import initial_warmup_forwards, tolerated_latency_ms
from jaxmorph.schedule.workload import Workload, make_workload

# F before B keeps as many forwards waiting as there were after the warm-up, so that the slackness
# lasts. B before F, as in Algorithm 3, uses up what of it is not needed at the moment.
_RULES = tuple(Rule(backward_first=False, weight_patience=patience) for patience in (0.0, 0.5, 1.0))


def initial_schedule(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> tuple[Schedule, str]:
    """A schedule whose smallest slackness is as large as memory allows: the shortest of some.

    Source: Algorithm 1, which is for one cap for all stages. Here every stage has its own, and of
    the fewest, the most and the evenly spread warm-ups with that smallest slackness those are taken
    that give the shortest step. After the warm-up F comes before B, unlike in Algorithm 3, so that
    the slackness is kept.

    Args:
        costs: Durations of the ops, milliseconds.
        links: State of the links, milliseconds.
        limits: Memory caps.
        num_microbatches: Number of microbatches, N.

    Returns:
        The schedule, and what its slackness is good for, in one line.
    """
    workload = make_workload(costs, links, limits, num_microbatches)
    caps = limits.caps(costs.num_stages, num_microbatches)
    schedules = [
        schedule
        for warmup in _candidates(list(accumulate(caps, min)))
        for schedule in _schedules(workload, warmup)
    ]
    _, best = max(schedules, key=lambda made: (smallest_slackness(made[1]), -made[0]))
    return best, _reason(costs, best)


def smallest_slackness(schedule: Schedule) -> int:
    """The least difference of warm-up forwards between neighbours; all of them for one stage."""
    warmup = schedule.warmup_forwards
    return min((here - below for here, below in pairwise(warmup)), default=warmup[0])


def _candidates(reachable: Sequence[int]) -> list[tuple[int, ...]]:
    """Warm-ups with the largest smallest slackness: the fewest, the most, and spread evenly.

    Args:
        reachable: The most forwards that can reach and fit each stage before any backward.
    """
    last = len(reachable) - 1
    if last == 0:
        return [(reachable[0],)]
    slackness = min((most - 1) // (last - stage) for stage, most in enumerate(reachable[:-1]))
    least = tuple(1 + slackness * (last - stage) for stage in range(last + 1))
    even = initial_warmup_forwards(last + 1, reachable[0])
    fits = all(warmup <= most for warmup, most in zip(even, reachable, strict=True))
    most = tuple(accumulate(reachable, lambda above, here: min(above - slackness, here)))
    return list(dict.fromkeys([least, even, most] if fits else [least, most]))


def _schedules(workload: Workload, warmup: Sequence[int]) -> list[tuple[int, Schedule]]:
    """Each rule's schedule with exactly these warm-ups, and its makespan."""
    made = (list_schedule(workload, rule, warmup, keep_warmup=True) for rule in _RULES)
    sizes = workload.num_stages, workload.num_microbatches
    return [
        (each.makespan, to_schedule("initial", *sizes, each.numbers))
        for each in made
        if each is not None
    ]


def _reason(costs: StageCosts, schedule: Schedule) -> str:
    if schedule.num_stages == 1:
        return "one stage has no links"
    tolerated_ms = min(tolerated_latency_ms(costs, schedule.warmup_forwards))
    return (
        f"smallest slackness {smallest_slackness(schedule)}, the most that memory allows: any link "
        f"may be {tolerated_ms:.1f} ms late"
    )
