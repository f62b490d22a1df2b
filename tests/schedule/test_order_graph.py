"""Op numbers of S stages and N microbatches: stage * 3 N + (0, N, 2 N for F, B, W) + microbatch."""

from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.list_schedule import Rule, Workload, list_schedule
from jaxmorph.schedule.order_graph import OrderGraph
from tests.schedule.strategies import workloads

RANDOM = st.randoms(use_true_random=False)
WORKLOADS = workloads(most_stages=4, most_microbatches=6)


def _graph(workload: Workload, draw) -> OrderGraph:
    rule = Rule(backward_first=draw.random() < 0.5, mirrored=draw.random() < 0.5)
    made = list_schedule(workload, rule)
    assert made is not None
    return OrderGraph(workload, made.numbers)


def _needs(workload: Workload, rows: list[list[int]]) -> dict[int, list[tuple[int, int]]]:
    """Each op's dependencies with their delays: data of other stages, then its own row."""
    count, last = workload.num_microbatches, workload.num_stages - 1
    needs: dict[int, list[tuple[int, int]]] = {}
    for stage, row in enumerate(rows):
        for index, op in enumerate(row):
            kind = op // count % 3
            before = needs.setdefault(op, [])
            if kind == 0 and stage > 0:
                before.append((op - 3 * count, workload.forward_latency[stage - 1]))
            if kind == 1 and stage < last:
                before.append((op + 3 * count, workload.backward_latency[stage + 1]))
            if index:
                before.append((row[index - 1], 0))
    return needs


def _durations(workload: Workload) -> list[int]:
    kinds = zip(workload.forward, workload.backward_input, workload.backward_weight, strict=True)
    return [ms for stage in kinds for ms in stage for _ in range(workload.num_microbatches)]


def _longest(duration: list[int], arcs: dict[int, list[tuple[int, int]]]) -> list[int]:
    """The longest path to each op's start, by relaxing every arc until nothing changes."""
    longest, changed = [0] * len(duration), True
    while changed:
        changed = False
        for op, before in arcs.items():
            start = max((longest[need] + duration[need] + lag for need, lag in before), default=0)
            changed = changed or start != longest[op]
            longest[op] = start
    return longest


def _heads_and_tails(workload: Workload, graph: OrderGraph) -> tuple[list[int], list[int]]:
    duration, needs = _durations(workload), _needs(workload, graph.rows)
    users: dict[int, list[tuple[int, int]]] = {op: [] for op in needs}
    for op, before in needs.items():
        for need, lag in before:
            users[need].append((op, lag))
    return _longest(duration, needs), _longest(duration, users)


def _reaches(arcs: dict[int, list[tuple[int, int]]], op: int, skip: tuple[int, int]) -> set[int]:
    """The ops that `op` depends on by any path but the one arc."""
    found, front = set(), [op]
    while front:
        here = front.pop()
        for need, _ in arcs[here]:
            if (here, need) != skip and need not in found:
                found.add(need)
                front.append(need)
    return found


def _some_move(graph: OrderGraph, draw, count: int) -> tuple[int, int, bool] | None:
    """An op, another, and whether behind it; None if that swaps a microbatch's F, B and W."""
    row = draw.choice(graph.rows)
    first = draw.randrange(len(row))
    last = min(len(row) - 1, first + draw.randint(1, 4))
    behind = draw.random() < 0.5
    op, other = (row[first], row[last]) if behind else (row[last], row[first])
    passed = row[first + 1 : last + 1] if behind else row[first:last]
    if not passed or any(each % count == op % count for each in passed):
        return None
    return op, other, behind


def _state(graph: OrderGraph):
    lists = (graph.head, graph.tail, graph.held, graph.position, graph.before, graph.after)
    return [list(values) for values in lists], [list(row) for row in graph.rows], graph.numbers


def _make(graph: OrderGraph, op: int, other: int, behind: bool) -> bool:
    return graph.move_behind(op, other) if behind else graph.move_ahead(op, other)


@given(WORKLOADS, RANDOM)
def test_moves_update_the_graph_like_a_new_one(workload, draw):
    graph = _graph(workload, draw)
    assert (graph.head, graph.tail) == _heads_and_tails(workload, graph)
    for _ in range(20):
        move = _some_move(graph, draw, workload.num_microbatches)
        if move is not None and _make(graph, *move):
            assert (graph.head, graph.tail) == _heads_and_tails(workload, graph)
            place = {op: index for index, op in enumerate(graph.numbers)}
            needs = _needs(workload, graph.rows)
            assert sorted(place) == sorted(needs)
            assert all(place[need] < place[op] for op in needs for need, _ in needs[op])
    assert _state(OrderGraph(workload, graph.numbers)) == _state(graph)


@given(WORKLOADS, RANDOM)
def test_only_moves_that_close_a_circle_are_refused(workload, draw):
    graph = _graph(workload, draw)
    for _ in range(20):
        move = _some_move(graph, draw, workload.num_microbatches)
        if move is None:
            continue
        op, other, behind = move
        first, last = (op, other) if behind else (other, op)
        needs = _needs(workload, graph.rows)
        # The later op comes after the earlier one by more than the row's own order.
        row = graph.row_of(op)
        begin, end = graph.position[first], graph.position[last]
        own = (row[begin + 1], first) if behind else (last, row[end - 1])
        circle = first in _reaches(needs, last, own)
        before = _state(graph)
        assert _make(graph, *move) is not circle
        if circle:
            assert _state(graph) == before
        else:
            assert graph.position[op] - graph.position[other] == (1 if behind else -1)


@given(WORKLOADS, RANDOM)
def test_the_predicted_path_is_that_after_the_move(workload, draw):
    """Unless the moved ops depend on each other through other stages."""
    graph = _graph(workload, draw)
    for _ in range(20):
        move = _some_move(graph, draw, workload.num_microbatches)
        if move is None:
            continue
        op, other, behind = move
        begin, end = sorted((graph.position[op], graph.position[other]))
        part = graph.row_of(op)[begin : end + 1]
        sequence = [*part[1:], op] if behind else [op, *part[:-1]]
        foreseen = graph.longest_through(sequence, graph.before[part[0]], graph.after[part[-1]])
        if not _make(graph, op, other, behind) or _is_tangled(workload, graph, sequence):
            continue
        through = [graph.head[each] + graph.duration[each] + graph.tail[each] for each in sequence]
        assert foreseen == max(through)


def _is_tangled(workload: Workload, graph: OrderGraph, sequence: list[int]) -> bool:
    """Whether one of the ops depends on another one through other stages."""
    needs = _needs(workload, graph.rows)
    return any(
        not _reaches(needs, need, (-1, -1)).isdisjoint(sequence)
        for op in sequence
        for need, _ in needs[op]
        if need // (3 * workload.num_microbatches) != op // (3 * workload.num_microbatches)
    )


@given(WORKLOADS, RANDOM)
def test_critical_blocks_cover_the_step_without_a_gap(workload, draw):
    graph = _graph(workload, draw)
    blocks = graph.critical_blocks()
    makespan = graph.end(graph.last_op())
    assert makespan == max(map(graph.end, graph.numbers))
    for block in blocks:
        begin, end = graph.position[block[0]], graph.position[block[-1]]
        assert graph.row_of(block[0])[begin : end + 1] == block
        for op in block:
            assert graph.head[op] + graph.duration[op] + graph.tail[op] == makespan
    assert graph.head[blocks[0][0]] == 0
    assert graph.end(blocks[-1][-1]) == makespan
