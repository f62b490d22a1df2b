"""The best planner: several rules, forwards and backwards in time, then a tabu search.

The search moves ops of the schedule's longest path. On that path, blocks of ops run back to back on
one stage. Only a move of an op behind its block's last op, or ahead of its first, can shorten the
path (Grabowski's block property for job shops). The search makes the best such move even if the
step gets longer, and does not undo it for a while, so that it leaves local optima.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmorph.schedule.list_schedule import PAPER, ListSchedule, Rule, Workload, list_schedule
from jaxmorph.schedule.order_graph import OrderGraph

# The best of the sets tried on random problems like those of benchmarks.planner_gap; the first
# rules contribute most.
_RULES = (
    Rule(backward_first=False, weight_patience=1.0, spare_share=0.5, mirrored=True),
    Rule(patience=0.5, weight_patience=0.5, spare_share=0.5),
    Rule(backward_first=False, patience=0.5, weight_patience=0.5, spare_share=0.25, mirrored=True),
    Rule(weight_patience=1.0, spare_share=1.0),
    Rule(patience=1.0, spare_share=0.5),
    Rule(backward_first=False, patience=1.0, weight_patience=1.0, spare_share=0.5, mirrored=True),
    Rule(backward_first=False, weight_patience=0.75, mirrored=True),
)
_EFFORT = 60_000  # visits of ops by rules and searches together: about 6 ms of processor time
_SEARCH_SHARE = 1 / 2  # of the effort is left to searches, unless the first _LEAST_RULES use it up
_RULE_EFFORT = 6  # visits that scheduling one op by a rule costs
_FIXED_EFFORT = 25  # visits per op that the rest of planning costs
_ROUNDS = ((3, 0.5), (1, 0.5))
"""How many of the best searches continue in each round, and their joint share of the effort."""

_LEAST_RULES = 3  # tried even if a long step makes them cost more than the effort
_LEAST_MOVES = 20  # visits per op below which a search finds nothing
_SLACK = 1_000  # picoseconds by which sums of rounded durations may be off
_TENURE = 8  # moves until a move may be undone


def adaptive_schedule(
    workload: Workload, warmup_forwards: Sequence[int], bound: int
) -> ListSchedule:
    """The shortest schedule found, never longer than the paper's.

    The paper's rule and others each make a schedule, and searches continue from the best ones.
    Planning stops as soon as a schedule meets ``bound``, a makespan that no schedule can beat. The
    effort counts ops, not time, so that a problem has the same answer on every machine.

    Raises:
        ValueError: The paper's warm-ups are more than the stages can hold.
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
    """How long each stage may idle per microbatch in a step that meets the bound."""
    rows = zip(workload.forward, workload.backward_input, workload.backward_weight, strict=True)
    return [max(0.0, bound / workload.num_microbatches - sum(row)) for row in rows]


def _search(
    workload: Workload, starts: Sequence[ListSchedule], bound: int, effort: int
) -> ListSchedule:
    searches = [Search(workload, start, bound) for start in starts[: _ROUNDS[0][0]]]
    for count, share in _ROUNDS:
        searches.sort(key=lambda search: search.best.makespan)
        del searches[count:]
        for search in searches:
            search.run(int(effort * share / len(searches)))
            if search.best.makespan <= bound:
                return search.best
    return min((search.best for search in searches), key=lambda best: best.makespan)


class _Move(NamedTuple):
    """Move `op` right behind `other` (or ahead of it); `length` is the path's length afterwards."""

    length: int
    op: int
    other: int
    behind: bool

    def order(self) -> tuple[int, int]:
        """Which of the two runs first after the move."""
        return (self.other, self.op) if self.behind else (self.op, self.other)

    def undone(self) -> tuple[int, int]:
        """Which of the two runs first before the move."""
        return (self.op, self.other) if self.behind else (self.other, self.op)


class Search:
    """A search from one schedule, which can be continued; it ends when it meets the bound."""

    def __init__(self, workload: Workload, start: ListSchedule, bound: int) -> None:
        self._workload = workload
        self._bound = bound
        self._graph = OrderGraph(workload, start.numbers)
        self.best = ListSchedule(start.numbers, self._graph.end(self._graph.last_op()))
        self._tabu: dict[tuple[int, int], int] = {}
        self._step = 0
        self._allowance = 0
        self._exhausted = False

    def run(self, effort: int) -> None:
        """Continues for ``effort`` visits of ops, which include those of the search's set-up."""
        self._allowance += effort
        graph = self._graph
        while not self._is_over and graph.visits < self._allowance:
            self._step += 1
            move = self._best_move()
            if move is not None:
                self._make(move)
            elif self._tabu:
                self._tabu.clear()
            else:
                self._exhausted = True

    @property
    def _is_over(self) -> bool:
        return self._exhausted or self.best.makespan <= self._bound

    def _make(self, move: _Move) -> None:
        graph = self._graph
        self._tabu[move.undone()] = self._step + _TENURE
        make = graph.move_behind if move.behind else graph.move_ahead
        if not make(move.op, move.other):
            self._tabu[move.order()] = self._step + _TENURE  # impossible now: don't retry at once
            return
        makespan = graph.end(graph.last_op())
        if makespan < self.best.makespan:
            self.best = ListSchedule(graph.numbers, makespan)

    def _best_move(self) -> _Move | None:
        """The move with the shortest path afterwards; a tabu one only if it beats the best."""
        best = None
        for move in _moves(self._graph, self._workload):
            is_tabu = self._tabu.get(move.order(), 0) > self._step
            if is_tabu and move.length >= self.best.makespan:
                continue
            if best is None or move.length < best.length:
                best = move
        return best


def _moves(graph: OrderGraph, workload: Workload) -> Iterator[_Move]:
    """Every move of a critical block's op to the block's end or start.

    The first block's start and the last block's end are excluded: no other stage waits there.
    """
    blocks = graph.critical_blocks()
    graph.visits += sum(map(len, blocks))
    for index, block in enumerate(blocks):
        if len(block) > 1:
            if index < len(blocks) - 1:
                yield from _moves_behind(graph, workload, block)
            if index > 0:
                yield from _moves_ahead(graph, workload, block)


def _moves_behind(graph: OrderGraph, workload: Workload, block: list[int]) -> Iterator[_Move]:
    count, other = workload.num_microbatches, block[-1]
    end, room = graph.position[other], workload.room[other // (3 * count)]
    for op in _first_of_each_kind(block[-2::-1], other, count):
        kind = op % (3 * count) // count
        if kind < 2 and graph.position[op + count] <= end:
            continue  # its microbatch's next op would come before it
        passed = graph.row_of(op)[graph.position[op] + 1 : end + 1]
        if graph.change[op] < 0 and _most(graph, passed) - graph.change[op] > room:
            continue
        length = graph.longest_through([*passed, op], graph.before[op], graph.after[other])
        yield _Move(length, op, other, True)


def _moves_ahead(graph: OrderGraph, workload: Workload, block: list[int]) -> Iterator[_Move]:
    count, other = workload.num_microbatches, block[0]
    begin, room = graph.position[other], workload.room[other // (3 * count)]
    for op in _first_of_each_kind(block[1:], other, count):
        kind = op % (3 * count) // count
        if kind and graph.position[op - count] >= begin:
            continue
        passed = graph.row_of(op)[begin : graph.position[op]]
        previous = graph.before[other]
        if graph.change[op] > 0:
            most = max(_most(graph, passed), graph.held[previous] if previous >= 0 else 0)
            if most + graph.change[op] > room:
                continue
        length = graph.longest_through([op, *passed], previous, graph.after[op])
        yield _Move(length, op, other, False)


def _first_of_each_kind(ops: list[int], other: int, count: int) -> Iterator[int]:
    """The first op of each kind except `other`'s, as ops of one kind must not pass each other."""
    seen = {other // count}
    for op in ops:
        if op // count not in seen:
            seen.add(op // count)
            yield op
            if len(seen) == 3:
                return


def _most(graph: OrderGraph, ops: list[int]) -> int:
    return max(graph.held[op] for op in ops)
