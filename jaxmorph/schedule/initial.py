"""The plan to begin with, when no link is known to be slow: ready for any of them to turn so."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.list_schedule import ListSchedule, Rule, list_schedule
from jaxmorph.schedule.numbering import to_schedule
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.slackness import initial_warmup_forwards, tolerated_latency_ms
from jaxmorph.schedule.warmup_bound import WarmupBound
from jaxmorph.schedule.workload import Workload, make_workload

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

    Args:
        costs: Durations of the ops, milliseconds.
        links: State of the links, milliseconds.

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
