"""The best planner: several rules, forwards and backwards in time, then a search from the best."""

from collections.abc import Sequence

from jaxmorph.schedule.improvement import Search
from jaxmorph.schedule.list_schedule import PAPER, ListSchedule, Rule, list_schedule
from jaxmorph.schedule.order_graph import Arcs
from jaxmorph.schedule.workload import Workload

# Together they make the shortest schedules of what was tried on random problems like those of
# benchmarks.planner_gap, the first ones most of it.
_RULES = (
    Rule(backward_first=False, weight_patience=1.0, spare_share=0.5, mirrored=True),
    Rule(patience=0.5, weight_patience=0.5, spare_share=0.5),
    Rule(backward_first=False, patience=0.5, weight_patience=0.5, spare_share=0.25, mirrored=True),
    Rule(weight_patience=1.0, spare_share=1.0),
    Rule(patience=1.0, spare_share=0.5),
    Rule(backward_first=False, patience=1.0, weight_patience=1.0, spare_share=0.5, mirrored=True),
    Rule(backward_first=False, weight_patience=0.75, mirrored=True),
)

_EFFORT = 60_000  # ops that rules and searches may visit together: some 6 ms of a processor
_SEARCH_SHARE = 1 / 2  # of it is left to the searches, unless few rules are enough to use it up
_RULE_EFFORT = 6  # visits that running an op under a rule takes as long as
_FIXED_EFFORT = 25  # less of it for each op: the rest of planning takes longer for a longer step
_ROUNDS = ((3, 0.5), (1, 0.5))
"""How many of the best searches go on in each round, and their share of the effort together."""

_LEAST_RULES = 3  # tried even where a step is so long that they take more than the effort
_LEAST_MOVES = 20  # visits per op below which a search gets nowhere
_SLACK = 1_000  # picoseconds by which sums of rounded durations may be off


def adaptive_schedule(
    workload: Workload, warmup_forwards: Sequence[int], bound: int
) -> ListSchedule:
    """The shortest schedule found, never longer than the paper's.

    The paper's rule and others each make a schedule; from the best ones a search goes on, in rounds
    of fewer and fewer. All of it ends at once when a schedule meets the bound. The effort is
    counted in ops, not in time, so that the same problem has the same answer on every machine.

    Args:
        warmup_forwards: The paper's warm-up forwards of each stage.
        bound: A makespan that no schedule can beat, picoseconds.

    Returns:
        The schedule.

    Raises:
        ValueError: The warm-ups are more than the stages can hold.
    """
    paper = list_schedule(workload, PAPER, warmup_forwards)
    if paper is None:
        raise ValueError(f"warmup_forwards: got {warmup_forwards}, more than the stages can hold")
    made = {paper.makespan: paper}
    effort = _EFFORT - _FIXED_EFFORT * len(paper.numbers)
    for tried, rule in enumerate(_RULES):
        is_costly = effort < _EFFORT * _SEARCH_SHARE
        if min(made) <= bound + _SLACK or (is_costly and tried >= _LEAST_RULES):
            break
        effort -= _RULE_EFFORT * len(paper.numbers)
        schedule = list_schedule(workload, rule, spare=_spare(workload, bound))
        if schedule is not None:
            made.setdefault(schedule.makespan, schedule)
    best = made[min(made)]
    if best.makespan <= bound + _SLACK or effort < _LEAST_MOVES * len(best.numbers):
        return best
    starts = [made[makespan] for makespan in sorted(made)]
    return _search(workload, starts, bound + _SLACK, effort)


def _spare(workload: Workload, bound: int) -> list[float]:
    """How long each stage may idle for every microbatch if the step is to meet the bound."""
    rows = zip(workload.forward, workload.backward_input, workload.backward_weight, strict=True)
    return [max(0.0, bound / workload.num_microbatches - sum(row)) for row in rows]


def _search(
    workload: Workload, starts: Sequence[ListSchedule], bound: int, effort: int
) -> ListSchedule:
    arcs = Arcs.of(workload)
    searches = [Search(workload, arcs, start, bound) for start in starts[: _ROUNDS[0][0]]]
    for count, share in _ROUNDS:
        searches.sort(key=lambda search: search.best.makespan)
        del searches[count:]
        for search in searches:
            search.run(int(effort * share / len(searches)))
            if search.best.makespan <= bound:
                return search.best
    return min((search.best for search in searches), key=lambda best: best.makespan)
