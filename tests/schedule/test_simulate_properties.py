"""The simulator against the longest path of a graph built here, for every link model and chunks."""

from graphlib import TopologicalSorter
from itertools import pairwise, product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, Links, StageCosts
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, interleaved, zb_v
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import LinkModel
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import jittered_makespans_ms, simulate

_MS = st.sampled_from([0.0, 1.0, 10.0]) | st.floats(0.0, 50.0, allow_subnormal=False)


class _Case(NamedTuple):
    schedule: Schedule
    costs: StageCosts
    links: Links
    link_model: LinkModel


@st.composite
def _schedules(draw) -> Schedule:
    stages = draw(st.integers(1, 5))
    group = draw(st.integers(1, 4))
    if draw(st.booleans()):
        build = draw(st.sampled_from([*FIXED_SCHEDULES.values(), zb_v]))
        return build(stages, draw(st.integers(1, 12))).with_weight_groups(group)
    sizes = [size for size in range(1, 13) if size % max(1, size // stages) == 0]
    schedule = interleaved(stages, draw(st.sampled_from(sizes)), draw(st.integers(1, 3)))
    split = _split(schedule, draw(st.integers(0, 4))).with_weight_groups(group)
    return draw(st.sampled_from([schedule, split]))


def _split(schedule: Schedule, delay: int) -> Schedule:
    """Each BW in two: B where it was, W ``delay`` backwards later."""
    orders = []
    for order in schedule.orders:
        row, waiting = [], []
        for op in order:
            row.append(op._replace(kind=OpKind.B) if op.kind is OpKind.BW else op)
            if op.kind is OpKind.BW:
                waiting.append(op._replace(kind=OpKind.W))
                row += [waiting.pop(0)] if len(waiting) > delay else []
        orders.append((*row, *waiting))
    return Schedule("split", schedule.num_microbatches, tuple(orders))


@st.composite
def _cases(draw) -> _Case:
    schedule = draw(_schedules())
    stages = schedule.num_stages
    per_stage = st.tuples(*[_MS] * stages)
    ring = {Link(stage, stage + 1) for stage in range(stages - 1)}
    ring |= {Link(0, stages - 1)} if stages > 1 else set()
    occupies = draw(st.booleans())
    occupancy = _MS if occupies else st.just(0.0)
    links = {
        link: LinkDelay(draw(_MS), draw(_MS), draw(occupancy), draw(occupancy))
        for link in sorted(ring)
        if draw(st.booleans())
    }
    costs = StageCosts(draw(per_stage), draw(per_stage), draw(per_stage))
    return _Case(schedule, costs, links, draw(st.sampled_from(["latency", "serialized"])))


class _Node(NamedTuple):
    """An op, or what becomes of its output: "on" its link direction, then "under way"."""

    what: str
    stage: int
    op: Op


class _Graph(NamedTuple):
    weight: dict[_Node, float]
    needs: dict[_Node, list[_Node]]

    def add(self, node: _Node, weight: float, *needs: _Node) -> None:
        self.weight[node] = weight
        self.needs[node] = [*needs]


def _longest_path_ends(case: _Case) -> dict[_Node, float]:
    """End of every op and message, with nothing but what must come before it."""
    graph = _Graph({}, {})
    for stage, order in enumerate(case.schedule.orders):
        nodes = [_Node("op", stage, op) for op in order]
        for node, before in zip(nodes, [[], *([node] for node in nodes)], strict=False):
            graph.add(node, _duration_ms(case, stage, node.op), *before)
    _add_messages(graph, case)
    ends: dict[_Node, float] = {}
    for node in TopologicalSorter(graph.needs).static_order():
        ready = max((ends[need] for need in graph.needs[node]), default=0.0)
        ends[node] = ready + graph.weight[node]
    return ends


def _duration_ms(case: _Case, stage: int, op: Op) -> float:
    """A group of microbatches takes as long as all of them one by one."""
    one_ms = case.costs.duration_ms(stage, op.kind) / case.schedule.num_chunks
    return sum(one_ms for _ in op.microbatches)


def _add_messages(graph: _Graph, case: _Case) -> None:
    schedule = case.schedule
    sent: dict[tuple[int, int], list[_Node]] = {}
    for made, used in _data(schedule):
        if made.stage == used.stage:
            graph.needs[used].append(made)
            continue
        on, under_way = made._replace(what="on"), made._replace(what="under way")
        occupied, rest = _delay(case.links, made.stage, used.stage, case.link_model)
        graph.add(on, occupied, made)
        graph.add(under_way, rest, on)
        graph.needs[used].append(under_way)
        sent.setdefault((made.stage, used.stage), []).append(on)
    for messages in sent.values():
        messages.sort(key=lambda node: schedule.orders[node.stage].index(node.op))
        for before, after in pairwise(messages):
            graph.needs[after].append(before)


def _data(schedule: Schedule) -> list[tuple[_Node, _Node]]:
    """Each op whose output another virtual stage needs, and that one's op."""
    backward = OpKind.B if schedule.splits_backward else OpKind.BW
    pipeline = list(product(range(schedule.num_chunks), range(schedule.num_stages)))
    if schedule.placement_kind == "v":
        down = range(schedule.num_stages)
        pipeline = [*((0, stage) for stage in down), *((1, stage) for stage in reversed(down))]
    hops = [(OpKind.F, *hop) for hop in pairwise(pipeline)]
    hops += [(backward, *hop) for hop in pairwise(pipeline[::-1])]
    return [
        (
            _Node("op", stage, Op(kind, microbatch, chunk)),
            _Node("op", to_stage, Op(kind, microbatch, to_chunk)),
        )
        for kind, (chunk, stage), (to_chunk, to_stage) in hops
        for microbatch in range(schedule.num_microbatches)
    ]


def _delay(links: Links, sender: int, receiver: int, link_model: LinkModel) -> tuple[float, float]:
    """How long a message occupies its link direction, and how long it travels after that."""
    state = links.get(Link.of(sender, receiver), LinkDelay())
    if sender < receiver:
        latency, occupancy = state.forward_latency_ms, state.forward_occupancy_ms
    else:
        latency, occupancy = state.backward_latency_ms, state.backward_occupancy_ms
    return (occupancy + latency, 0.0) if link_model == "serialized" else (occupancy, latency)


@given(_cases())
def test_the_simulator_finds_the_longest_path(case):
    timeline = simulate(*case)
    ends = _longest_path_ends(case)
    for stage, op, start_ms, end_ms in timeline.spans():
        assert end_ms == pytest.approx(ends[_Node("op", stage, op)], rel=1e-12, abs=1e-9)
        assert end_ms - start_ms == pytest.approx(_duration_ms(case, stage, op), abs=1e-9)


@given(_cases())
def test_a_serialized_link_is_never_faster(case):
    overlapping = simulate(case.schedule, case.costs, case.links, "latency")
    serialized = simulate(case.schedule, case.costs, case.links, "serialized")
    for free, queued in zip(overlapping.end_ms, serialized.end_ms, strict=True):
        assert (free <= queued).all()


@given(_cases(), st.sampled_from([0.1, 0.25, 1.0, 7.0]))
def test_on_a_discrete_clock_no_op_ends_earlier(case, time_step_ms):
    exact, stepped = simulate(*case), simulate(*case, time_step_ms=time_step_ms)
    for end, later in zip(exact.end_ms, stepped.end_ms, strict=True):
        assert (end <= later).all()


@given(_cases(), st.sampled_from([0.1, 0.25, 3.0]))
def test_a_discrete_clock_is_exact_for_whole_steps(case, time_step_ms):
    # Of a chunk's op too: 6 has all the numbers of chunks as divisors.
    def whole(value_ms: float) -> float:
        return 6 * round(value_ms) * time_step_ms

    costs = StageCosts(
        tuple(map(whole, case.costs.forward_ms)),
        tuple(map(whole, case.costs.backward_input_ms)),
        tuple(map(whole, case.costs.backward_weight_ms)),
    )
    links = {
        link: LinkDelay(
            whole(state.forward_latency_ms),
            whole(state.backward_latency_ms),
            whole(state.forward_occupancy_ms),
            whole(state.backward_occupancy_ms),
        )
        for link, state in case.links.items()
    }
    exact = simulate(case.schedule, costs, links, case.link_model)
    stepped = simulate(case.schedule, costs, links, case.link_model, time_step_ms=time_step_ms)
    for end, same in zip(exact.end_ms, stepped.end_ms, strict=True):
        assert end.tolist() == same.tolist()


@given(_cases())
def test_steps_without_jitter_are_the_simulated_one(case):
    still = [0.0] * (case.schedule.num_stages - 1)
    makespans = jittered_makespans_ms(case.schedule, case.costs, case.links, still, 2, seed=0)
    assert makespans.tolist() == [simulate(*case[:3]).makespan_ms] * 2
