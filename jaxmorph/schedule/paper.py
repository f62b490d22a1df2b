"""The paper's own planners: Equation 1 and Algorithms 1 to 4.

The slackness between stages i and i+1 is the difference of their warm-up forwards. The more of
it, the longer a link between them can delay data before bubbles spread from stage to stage.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

from jaxmorph.schedule.bound import WarmupBound
from jaxmorph.schedule.costs import NO_LATENCY, Limits, Links, StageCosts, neighbour_links
from jaxmorph.schedule.list_schedule import (
    PAPER,
    ListSchedule,
    Rule,
    Workload,
    list_schedule,
    make_workload,
    to_schedule,
)
from jaxmorph.schedule.schedule import Schedule


def required_slackness(costs: StageCosts, links: Links = NO_LATENCY) -> tuple[int, ...]:
    """The least slackness that absorbs each link's delay.

    Source: Equation 1, solved for the slackness and rounded up. The two directions of a link may
    differ, so ``2 c`` is the sum of both. The condition is sufficient, not necessary: weight
    gradients that run in the steady phase absorb more.

    Returns:
        One slackness per pair of neighbours, at least 0.
    """
    cycle_ms = [f + b for f, b in zip(costs.forward_ms, costs.backward_input_ms, strict=True)]
    chain = neighbour_links(links, costs.num_stages)
    return tuple(
        _ceil_ratio(here + link.forward_latency_ms + link.backward_latency_ms, below)
        for (here, below), link in zip(pairwise(cycle_ms), chain, strict=True)
    )


def tolerated_latency_ms(costs: StageCosts, warmup_forwards: Sequence[int]) -> tuple[float, ...]:
    """The longest latency (in each direction) that every link's slackness absorbs.

    Source: Equation 1 solved for c. For equal ops of t ms this is ``(slackness - 1) t``, the
    threshold of Theorem 1; beyond it the step grows by about ``N / (slackness + 1)`` ms for every
    ms of latency in one direction (printed with a minus in the theorem), by twice that for every
    ms in both. That holds for a schedule that keeps its slackness after the warm-up.

    Returns:
        One latency per pair of neighbours, milliseconds; 0 where not even a healthy link fits.
    """
    cycle_ms = [f + b for f, b in zip(costs.forward_ms, costs.backward_input_ms, strict=True)]
    return tuple(
        max(0.0, ((x_here - x_below) * below - here) / 2)
        for (here, below), (x_here, x_below) in zip(
            pairwise(cycle_ms), pairwise(warmup_forwards), strict=True
        )
    )


def initial_warmup_forwards(num_stages: int, max_live: int) -> tuple[int, ...]:
    """Warm-up forwards that spread the slackness evenly when no link is known to be slow.

    Source: Algorithm 1, with ``max_live`` for the memory divided by one activation. With fewer
    slots than stages the later stages share one warm-up forward each.

    Returns:
        Warm-up forwards of each stage, from ``max_live`` (at least 1) down to 1.
    """
    if num_stages == 1:
        return (max_live,)
    average, rest = divmod(max_live - 1, num_stages - 1)
    warmup = [max_live]
    for stage in range(1, num_stages):
        warmup.append(warmup[-1] - average - (stage <= rest))
    return tuple(warmup)


def adapted_warmup_forwards(
    costs: StageCosts, links: Links, num_microbatches: int, caps: Sequence[int]
) -> tuple[int, ...]:
    """Warm-up forwards whose slackness absorbs the known delays, as far as memory allows.

    Source: Algorithm 2, with three guards the text leaves out: the slackness is clipped to
    max(1, N - 2S) (N - 2S can be negative), warm-ups to N, and, for stages with a memory cap, to
    the smallest cap from the first stage on, because a stage can only warm up on what reaches it.

    Returns:
        Warm-up forwards of each stage, non-increasing, at least 1.
    """
    clip = max(1, num_microbatches - 2 * costs.num_stages)
    warmup = [1]
    for slackness in reversed(required_slackness(costs, links)):
        warmup.append(warmup[-1] + min(clip, max(slackness, 2)))
    return reachable_warmup_forwards(warmup[::-1], num_microbatches, caps)


def reachable_warmup_forwards(
    warmup_forwards: Sequence[int], num_microbatches: int, caps: Sequence[int]
) -> tuple[int, ...]:
    """Clips warm-ups to the microbatches there are and to what every earlier stage can hold."""
    reachable, clipped = num_microbatches, []
    for wanted, cap in zip(warmup_forwards, caps, strict=True):
        reachable = min(reachable, wanted, cap)
        clipped.append(reachable)
    return tuple(clipped)


def _ceil_ratio(numerator: float, denominator: float) -> int:
    """The ratio rounded up, forgiving the last bits of floating point; 0/0 is no delay at all."""
    if numerator == 0:
        return 0
    if denominator == 0:
        return 10**9
    return math.ceil(min(numerator / denominator * (1 - 1e-12), 1e9))


def select_ops(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    warmup_forwards: Sequence[int],
    name: str = "paper",
) -> Schedule:
    """The schedule that greedy selection makes: warm up, then B before F before W.

    It always completes: a warm-up is no longer than what earlier stages can send without a
    backward, and after it a stage at its cap holds either a microbatch whose B will come or one
    whose W can run.

    Source: Algorithms 3 and 4, corrected as ``list_schedule`` says.

    Args:
        warmup_forwards: Forwards each stage runs before any backward: non-increasing, from 1 to N,
            and within the caps of all earlier stages. A stage may run more before its first B.

    Returns:
        A valid schedule whose stages hold no more than their caps.
    """
    workload = make_workload(costs, links, limits, num_microbatches)
    made = list_schedule(workload, PAPER, warmup_forwards)
    if made is None:
        raise ValueError(f"warmup_forwards: got {warmup_forwards}, which no stage can hold")
    return to_schedule(name, costs.num_stages, num_microbatches, made.numbers)


# F before B keeps as many forwards waiting as there were after the warm-up, so that the slackness
# lasts. B before F, as in Algorithm 3, uses up what of it is not needed at the moment.
_RULES = tuple(Rule(backward_first=False, weight_patience=patience) for patience in (0.0, 0.5, 1.0))
_EFFORT = 200_000  # ops that may be scheduled in search of better warm-ups: at most some 0.2 s


def initial_schedule(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> tuple[Schedule, str]:
    """A schedule whose smallest slackness is as large as memory allows: the shortest one found.

    Source: Algorithm 1, which is for one cap for all stages. Here every stage has its own. Of the
    fewest, the most and the evenly spread warm-ups with that smallest slackness the best are taken,
    and changed by one forward at a time for as long as that makes the step shorter; then all others
    are tried, as far as the effort allows. After the warm-up F comes before B, unlike in Algorithm
    3, so that the slackness is kept.

    Returns:
        The schedule, and what its slackness is good for, in one line.
    """
    workload = make_workload(costs, links, limits, num_microbatches)
    reachable = list(accumulate(limits.caps(costs.num_stages, num_microbatches), min))
    made = _shortest(workload, reachable, _largest_slackness(reachable))
    schedule = to_schedule("initial", workload.num_stages, num_microbatches, made.numbers)
    return schedule, _reason(costs, schedule)


def smallest_slackness(warmup_forwards: Sequence[int]) -> int:
    """The least difference of warm-up forwards between neighbours; all of them for one stage."""
    pairs = pairwise(warmup_forwards)
    return min((here - below for here, below in pairs), default=warmup_forwards[0])


def _largest_slackness(reachable: Sequence[int]) -> int:
    """How far apart neighbours' warm-ups can be, if no stage has more than can reach and fit it."""
    last = len(reachable) - 1
    apart = ((most - 1) // (last - stage) for stage, most in enumerate(reachable[:-1]))
    return min(apart, default=reachable[0])


def _shortest(workload: Workload, reachable: Sequence[int], slackness: int) -> ListSchedule:
    start, *starts = _starts(reachable, slackness)
    trials = _Trials(workload, start)
    for warmup in starts:
        trials.improve(warmup)
    others = _all(reachable, slackness)
    untried = chain(_neighbours(trials.warmup, reachable, slackness), others)
    effort = _EFFORT
    while effort > 0 and (warmup := next(untried, None)) is not None:
        if warmup in trials.tried:
            continue
        effort -= len(_RULES) * len(trials.best.numbers)
        if trials.improve(warmup):
            untried = chain(_neighbours(warmup, reachable, slackness), others)
    return trials.best


class _Trials:
    """The warm-ups that were tried, and the best of them."""

    def __init__(self, workload: Workload, start: tuple[int, ...]) -> None:
        self._workload = workload
        self._bound = WarmupBound(workload)
        self.tried = {start}
        self.warmup = start
        self.best = _schedule(workload, start, self._bound.of(start))

    def improve(self, warmup: tuple[int, ...]) -> bool:
        """Try others, if their bound doesn't say that they are no better; whether they are."""
        self.tried.add(warmup)
        bound = self._bound.of(warmup)
        if bound >= self.best.makespan:
            return False
        made = _schedule(self._workload, warmup, bound)
        if made.makespan >= self.best.makespan:
            return False
        self.warmup, self.best = warmup, made
        return True


def _starts(reachable: Sequence[int], slackness: int) -> list[tuple[int, ...]]:
    """The fewest warm-ups with a smallest slackness, evenly spread ones, and the most."""
    last = len(reachable) - 1
    if last == 0:
        return [(reachable[0],)]
    least = tuple(1 + slackness * (last - stage) for stage in range(last + 1))
    even = initial_warmup_forwards(last + 1, reachable[0])
    fits = all(warmup <= most for warmup, most in zip(even, reachable, strict=True))
    most = tuple(accumulate(reachable, lambda above, here: min(above - slackness, here)))
    return [least, even, most] if fits else [least, most]


def _neighbours(
    warmup: Sequence[int], reachable: Sequence[int], slackness: int
) -> Iterator[tuple[int, ...]]:
    """Warm-ups with one forward more or less on all stages up to some stage."""
    for end in range(1, len(warmup) + 1):
        for change in (1, -1):
            changed = (*(forwards + change for forwards in warmup[:end]), *warmup[end:])
            fits = all(1 <= here <= most for here, most in zip(changed, reachable, strict=True))
            if fits and smallest_slackness(changed) >= slackness:
                yield changed


def _all(reachable: Sequence[int], slackness: int) -> Iterator[tuple[int, ...]]:
    """All warm-ups with a smallest slackness, those with few on the last stages first."""
    *above, here = reachable
    for forwards in range(1, here + 1):
        if not above:
            yield (forwards,)
            continue
        for others in _all([most - forwards - slackness + 1 for most in above], slackness):
            yield (*(other + forwards + slackness - 1 for other in others), forwards)


def _schedule(workload: Workload, warmup: Sequence[int], bound: float) -> ListSchedule:
    """The shortest of the rules' schedules with exactly these warm-ups, which have a bound."""
    best = None
    for rule in _RULES:
        made = list_schedule(workload, rule, warmup, keep_warmup=True)
        if made is not None and (best is None or made.makespan < best.makespan):
            best = made
        if best is not None and best.makespan <= bound:
            break
    if best is None:
        raise ValueError(f"warmup: got {warmup}, with which stages wait for each other")
    return best


def _reason(costs: StageCosts, schedule: Schedule) -> str:
    if schedule.num_stages == 1:
        return "one stage has no links"
    slackness = smallest_slackness(schedule.warmup_forwards)
    tolerated_ms = min(tolerated_latency_ms(costs, schedule.warmup_forwards))
    return (
        f"smallest slackness {slackness}, the most that memory allows: any link may be "
        f"{tolerated_ms:.1f} ms late"
    )
