"""The paper's own planners: Equation 1 and Algorithms 1 to 4.

The slackness between stages i and i+1 is the difference of their warm-up forwards. The larger it
is, the longer the link between them can delay data before bubbles spread from stage to stage.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

from jaxmorph.records import Link
from jaxmorph.schedule.bound import WarmupBound
from jaxmorph.schedule.costs import NO_LATENCY, Limits, LinkDelay, Links, StageCosts
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
    """The least slackness that absorbs each link's delay, one per pair of neighbours.

    Source: Equation 1, solved for the slackness and rounded up; ``2 c`` is the sum of a link's two
    directions. The condition is sufficient, not necessary: weight gradients that run in the steady
    phase absorb more.
    """
    cycle_ms = [f + b for f, b in zip(costs.forward_ms, costs.backward_input_ms, strict=True)]
    delays = (
        links.get(Link(stage, stage + 1), LinkDelay()) for stage in range(costs.num_stages - 1)
    )
    return tuple(
        _ceil_ratio(here + link.forward_latency_ms + link.backward_latency_ms, below)
        for (here, below), link in zip(pairwise(cycle_ms), delays, strict=True)
    )


def tolerated_latency_ms(costs: StageCosts, warmup_forwards: Sequence[int]) -> tuple[float, ...]:
    """The longest latency in each direction that every link's slackness absorbs, milliseconds.

    Source: Equation 1 solved for c. For equal ops of t ms this is ``(slackness - 1) t``, the
    threshold of Theorem 1. Beyond it the step grows by about ``N / (slackness + 1)`` ms for every
    ms of latency in one direction (the theorem prints a minus), if the schedule keeps its slackness
    after the warm-up.
    """
    cycle_ms = [f + b for f, b in zip(costs.forward_ms, costs.backward_input_ms, strict=True)]
    return tuple(
        max(0.0, ((x_here - x_below) * below - here) / 2)
        for (here, below), (x_here, x_below) in zip(
            pairwise(cycle_ms), pairwise(warmup_forwards), strict=True
        )
    )


def initial_warmup_forwards(num_stages: int, max_live: int) -> tuple[int, ...]:
    """Warm-up forwards that spread the slackness evenly, from ``max_live`` on stage 0 down to 1.

    Source: Algorithm 1, with ``max_live`` for the memory divided by one activation.
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

    Source: Algorithm 2, with guards that the text leaves out.
    """
    # The paper clips to N - 2S, which can be negative; warm-ups can also exceed N, or a cap.
    clip = max(1, num_microbatches - 2 * costs.num_stages)
    warmup = [1]
    for slackness in reversed(required_slackness(costs, links)):
        warmup.append(warmup[-1] + min(clip, max(slackness, 2)))  # 2 is the slackness of ZB-H2
    return reachable_warmup_forwards(warmup[::-1], num_microbatches, caps)


def reachable_warmup_forwards(
    warmup_forwards: Sequence[int], num_microbatches: int, caps: Sequence[int]
) -> tuple[int, ...]:
    """Clips warm-ups to N and to the caps; a stage can only warm up on what earlier stages send."""
    reachable, clipped = num_microbatches, []
    for wanted, cap in zip(warmup_forwards, caps, strict=True):
        reachable = min(reachable, wanted, cap)
        clipped.append(reachable)
    return tuple(clipped)


def _ceil_ratio(numerator: float, denominator: float) -> int:
    """The ratio rounded up, tolerant of floating-point error; 0 / 0 is 0."""
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
    """A valid schedule by greedy selection: warm up, then B before F before W, within the caps.

    It always completes: a warm-up is no longer than what earlier stages can send without a
    backward, and after it a stage at its cap holds a microbatch whose B will come or whose W can
    run.

    Source: Algorithms 3 and 4, with the corrections of ``list_schedule``.

    Args:
        warmup_forwards: The least forwards of each stage before any backward: non-increasing, from
            1 to N, and within the caps of all earlier stages.
    """
    workload = make_workload(costs, links, limits, num_microbatches)
    made = list_schedule(workload, PAPER, warmup_forwards)
    if made is None:
        raise ValueError(f"warmup_forwards: got {warmup_forwards}, which no stage can hold")
    return to_schedule(name, costs.num_stages, num_microbatches, made.numbers)


# F before B keeps as many forwards waiting as after the warm-up, so the slackness lasts. B before
# F, as in Algorithm 3, uses it up on healthy links: with warm-ups 10 7 4 1 and N = 30, a link that
# then turns 20 ms late costs 180 ms instead of 20 (docs/explanation/planning.md).
_RULES = tuple(Rule(backward_first=False, weight_patience=patience) for patience in (0.0, 0.5, 1.0))
_EFFORT = 200_000  # ops to schedule in search of better warm-ups: at most about 0.2 s


def initial_schedule(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> tuple[Schedule, str]:
    """The shortest schedule found whose smallest slackness is as large as memory allows.

    The search starts from the fewest, the most and the evenly spread warm-ups with that slackness.
    It changes the best ones by one forward at a time while the step gets shorter, then tries all
    others as far as the effort allows.

    Source: Algorithm 1, which has one cap for all stages; here every stage has its own.

    Returns:
        The schedule, and in one line which delays it tolerates.
    """
    workload = make_workload(costs, links, limits, num_microbatches)
    reachable = list(accumulate(limits.caps(costs.num_stages, num_microbatches), min))
    made = _shortest(workload, reachable, _largest_slackness(reachable))
    schedule = to_schedule("initial", workload.num_stages, num_microbatches, made.numbers)
    return schedule, _reason(costs, schedule)


def smallest_slackness(warmup_forwards: Sequence[int]) -> int:
    """The least difference of neighbours' warm-up forwards; of one stage, its warm-up forwards."""
    pairs = pairwise(warmup_forwards)
    return min((here - below for here, below in pairs), default=warmup_forwards[0])


def _largest_slackness(reachable: Sequence[int]) -> int:
    """The largest slackness that all neighbours can have if no stage exceeds ``reachable``."""
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
    """The warm-ups tried so far and the best of them."""

    def __init__(self, workload: Workload, start: tuple[int, ...]) -> None:
        self._workload = workload
        self._bound = WarmupBound(workload)
        self.tried = {start}
        self.warmup = start
        self.best = _schedule(workload, start, self._bound.of(start))

    def improve(self, warmup: tuple[int, ...]) -> bool:
        """Tries warm-ups unless their bound rules them out; True if they are the best so far."""
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
    """The fewest warm-ups with a given slackness, the evenly spread ones, and the most."""
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
    """Warm-ups with one forward more or fewer on all stages up to some stage."""
    for end in range(1, len(warmup) + 1):
        for change in (1, -1):
            changed = (*(forwards + change for forwards in warmup[:end]), *warmup[end:])
            fits = all(1 <= here <= most for here, most in zip(changed, reachable, strict=True))
            if fits and smallest_slackness(changed) >= slackness:
                yield changed


def _all(reachable: Sequence[int], slackness: int) -> Iterator[tuple[int, ...]]:
    """All warm-ups with at least some slackness; those with few on the last stages come first."""
    *above, here = reachable
    # At most what leaves room for all stages above, so that every branch yields warm-ups.
    apart = enumerate(reversed(above), start=1)
    here = min([here, *(most - slackness * links for links, most in apart)])
    for forwards in range(1, here + 1):
        if not above:
            yield (forwards,)
            continue
        for others in _all([most - forwards - slackness + 1 for most in above], slackness):
            yield (*(other + forwards + slackness - 1 for other in others), forwards)


def _schedule(workload: Workload, warmup: Sequence[int], bound: float) -> ListSchedule:
    """The shortest of the rules' schedules with exactly these warm-ups; stops at the bound."""
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
