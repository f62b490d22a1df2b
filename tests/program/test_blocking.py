"""Timing of lowered programs by hand, and against the simulation of their schedule."""

import itertools
import random
from dataclasses import astuple

import numpy as np
import pytest

from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.program.blocking import Disturbance, simulate_blocking
from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    Channel,
    Move,
    Payload,
    RankInstructions,
    Receive,
    Run,
    Send,
    SendReceive,
    Transfer,
)
from jaxmorph.program.lowering import lower
from jaxmorph.program.offload import offload, offload_these, waiting_longest
from jaxmorph.records import Link, Route
from jaxmorph.schedule.costs import (
    NO_LATENCY,
    CopyCosts,
    Limits,
    LinkDelay,
    StageCosts,
    StageMemory,
    chain_links,
)
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, interleaved, zb_v
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import CopySpan

UNIFORM = StageCosts.uniform(2, 10, 10, 10)


def programs(*rows, route="direct"):
    """`F0` runs it, `>F0` and `>B0` send what it made, `<F0` and `<B0` receive its input.

    `>F1<B0` is a pair.
    """
    return [
        RankInstructions(
            rank, len(rows), 2, tuple(_step(word, rank, route) for word in row.split())
        )
        for rank, row in enumerate(rows)
    ]


def _step(word, rank, route):
    if word.startswith(">") and "<" in word:
        sent, received = (_step(part, rank, route) for part in word.replace("<", " <").split())
        return SendReceive(sent.transfer, received.transfer)
    op = Op.parse(word.lstrip("<>"))
    toward = 1 if (op.kind == "F") == word.startswith(">") else -1
    ends = (rank, rank + toward) if word.startswith(">") else (rank + toward, rank)
    payload = Payload.ACTIVATION if op.kind == "F" else Payload.GRADIENT
    transfer = Transfer(payload, *ends, op.microbatch)
    return {">": Send(transfer, route), "<": Receive(transfer, route)}.get(word[0], Run(op))


def picture(timeline):
    """Every op and transfer, rank by rank; `~` marks a transfer that holds no queue."""
    rows = []
    for rank in range(timeline.num_stages):
        spans = [(s.start_ms, s.end_ms, f"{s.op}:") for s in timeline.spans() if s.stage == rank]
        held = [
            (t.start_ms, t.end_ms, t.label.split()[0] + (":" if t.holds_queue else "~"))
            for t in timeline.transfers
            if t.stage == rank
        ]
        rows.append(" ".join(f"{n}{a:g}-{b:g}" for a, b, n in sorted(spans + held)))
    return rows


def lowered(schedule, costs, links=NO_LATENCY, route: Route = "direct", num_tied=0):
    pairs = itertools.combinations(range(schedule.num_stages), 2)
    routes: dict[Link, Route] = {Link(*pair): route for pair in pairs}
    return lower(schedule, simulate(schedule, costs, links), routes, num_tied=num_tied)


def test_a_delegated_send_waits_for_a_slot():
    """Slots at both ends: the sender's is free once the message and the word of it have crossed."""
    ranks = programs(
        "F0 >F0 F1 >F1 F2 >F2 F3 >F3",
        "<F0 F0 <F1 F1 <F2 F2 <F3 F3",
        route="delegated",
    )
    costs = StageCosts((1.0, 10.0), (1.0, 1.0), (1.0, 1.0))
    links = {Link(0, 1): LinkDelay(4, 5)}
    there = Channel(Payload.ACTIVATION, 0, 1)
    assert picture(simulate_blocking(ranks, costs, links)) == [
        "F0:0-1 F1:1-2 F2:2-3 F3:3-4",
        "activation[0]~1-5 activation[1]~2-6 activation[2]~3-7 activation[3]~4-8 "
        "F0:5-15 F1:15-25 F2:25-35 F3:35-45",
    ]
    # The host takes each message as soon as it is there, so its slot is free before the op begins.
    assert picture(simulate_blocking(ranks, costs, links, slots={there: 1})) == [
        "F0:0-1 F1:1-2 F2:10-11 F3:19-20",
        "activation[0]~1-5 F0:5-15 activation[1]~10-14 F1:15-25 activation[2]~19-23 F2:25-35 "
        "activation[3]~28-32 F3:35-45",
    ]


def test_a_message_waits_in_the_senders_slot_while_the_receivers_are_taken():
    ranks = programs(
        "F0 >F0 F1 >F1 <B0 B0 <B1 B1",
        "<F0 F0 B0 >B0 <F1 F1 B1 >B1",
        route="delegated",
    )
    there = Channel(Payload.ACTIVATION, 0, 1)
    free, limited = (simulate_blocking(ranks, UNIFORM, slots=each) for each in (None, {there: 1}))
    assert picture(limited) == picture(free)
    both = programs("F0 >F0 F1 >F1 F2 >F2 <B0", "<F1 F0 >B0", route="delegated")
    with pytest.raises(ProgramError, match="rank 0 waits for a slot of activation 0>1"):
        simulate_blocking(both, UNIFORM, slots={there: 1})


def test_a_delegated_send_may_take_compute_from_its_sender_alone():
    ranks = programs("F0 >F0 F1 >F1 <B0 B0", "<F0 F0 B0 >B0 <F1 F1", route="delegated")
    takes = {Link(0, 1): LinkDelay(3, 5, 1, 0)}
    timeline = simulate_blocking(ranks, UNIFORM, {Link(0, 1): LinkDelay(2, 2)}, send_takes=takes)
    assert picture(timeline) == [
        "F0:0-10 F1:14-24 gradient[0]~32-34 B0:34-44",
        "activation[0]~10-12 F0:12-22 B0:22-32 activation[1]~24-26 F1:37-47",
    ]


def test_a_sender_waits_for_a_late_receiver():
    ranks = programs(
        "F0 >F0 F1 >F1 <B0 B0 <B1 B1",
        "<F0 F0 B0 <F1 >B0 F1 B1 >B1",
    )
    timeline = simulate_blocking(ranks, UNIFORM, {Link(0, 1): LinkDelay(3, 5)})
    assert picture(timeline) == [
        "F0:0-10 activation[0]:10-13 F1:13-23 activation[1]:23-36 "
        "gradient[0]:36-41 B0:41-51 gradient[1]:51-66 B1:66-76",
        "activation[0]:0-13 F0:13-23 B0:23-33 activation[1]:33-36 "
        "gradient[0]:36-41 F1:41-51 B1:51-61 gradient[1]:61-66",
    ]


def test_a_pair_holds_both_ends_once():
    ranks = programs("F0 >F0 F1 >F1<B0 B0", "<F0 F0 B0 >B0<F1 F1")
    timeline = simulate_blocking(ranks, UNIFORM, {Link(0, 1): LinkDelay(3, 5)})
    assert picture(timeline) == [
        "F0:0-10 activation[0]:10-13 F1:13-23 activation[1]:23-36 gradient[0]:23-38 B0:38-48",
        "activation[0]:0-13 F0:13-23 B0:23-33 activation[1]:33-36 gradient[0]:33-38 F1:38-48",
    ]


HEAD_OF_LINE = ("F0 >F0 F1 >F1", "<F0 F0 >F0 <F1 F1", "<F0 F0")


def test_a_slow_direct_transfer_blocks_ready_ops():
    slow = chain_links([0, 30])
    timeline = simulate_blocking(programs(*HEAD_OF_LINE), StageCosts.uniform(3, 10, 10, 10), slow)
    assert picture(timeline) == [
        "F0:0-10 activation[0]:10-10 F1:10-20 activation[1]:20-50",
        "activation[0]:0-10 F0:10-20 activation[0]:20-50 activation[1]:50-50 F1:50-60",
        "activation[0]:0-50 F0:50-60",
    ]


def test_a_delegated_transfer_blocks_nothing():
    ranks = programs(*HEAD_OF_LINE, route="delegated")
    timeline = simulate_blocking(ranks, StageCosts.uniform(3, 10, 10, 10), chain_links([0, 30]))
    assert picture(timeline) == [
        "F0:0-10 F1:10-20",
        "activation[0]~10-10 F0:10-20 activation[1]~20-20 F1:20-30",
        "activation[0]~20-50 F0:50-60",
    ]


@pytest.mark.parametrize(
    ("route", "first", "last"),
    [
        (
            "direct",
            "F0:0-10 activation[0]:10-40 F1:40-50 activation[1]:50-80",
            "activation[0]:0-40 F0:40-50 activation[1]:50-80 F1:80-90",
        ),
        (
            "delegated",
            "F0:0-10 F1:10-20",
            "activation[0]~10-40 activation[1]~20-65 F0:40-50 F1:65-75",
        ),
    ],
)
def test_messages_occupy_their_link(route, first, last):
    ranks = programs("F0 >F0 F1 >F1", "<F0 F0 <F1 F1", route=route)
    link = LinkDelay(5, 0, forward_occupancy_ms=25, backward_occupancy_ms=99)
    assert picture(simulate_blocking(ranks, UNIFORM, {Link(0, 1): link})) == [first, last]


class LateFirst(Disturbance):
    """Microbatch 0's messages take 7 ms more from the 15th on, ops of rank 1 twice as long."""

    def op_ms(self, rank, op, planned_ms):
        return planned_ms * (1 + rank)

    def message_ms(self, transfer, begins_ms, planned_ms):
        late = transfer.microbatch == 0 and begins_ms >= 15
        return planned_ms + (7 if late else 0)


@pytest.mark.parametrize(
    ("route", "first", "last"),
    [
        (
            "direct",
            "F0:0-10 activation[0]:10-13 F1:13-23 activation[1]:23-36 gradient[0]:36-66 B0:66-76",
            "activation[0]:0-13 F0:13-33 activation[1]:33-36 B0:36-56 gradient[0]:56-66",
        ),
        (
            "delegated",
            "F0:0-10 F1:10-20 gradient[0]~53-63 B0:63-73",
            "activation[0]~10-13 F0:13-33 activation[1]~20-23 B0:33-53",
        ),
    ],
)
def test_single_ops_and_messages_can_take_other_times(route, first, last):
    ranks = programs("F0 >F0 F1 >F1 <B0 B0", "<F0 F0 <F1 B0 >B0", route=route)
    timeline = simulate_blocking(ranks, UNIFORM, chain_links([3]), LateFirst())
    assert picture(timeline) == [first, last]


def test_the_makespan_excludes_tied_gradients():
    schedule = Schedule.from_rows("hand", ["F0 B0 W0", "F0 B0 W0"])
    links = chain_links([4])
    timeline = simulate_blocking(lowered(schedule, UNIFORM, links, num_tied=1), UNIFORM, links)
    tied = [span[2:4] for span in timeline.transfers if span.label.startswith("tied")]
    assert timeline.makespan_ms == 58.0
    assert tied == [(58.0, 62.0), (62.0, 66.0), (48.0, 62.0), (62.0, 66.0)]


def _problem(seed):
    draw = random.Random(seed)
    stages = draw.randint(2, 6)
    costs = StageCosts(*(tuple(draw.uniform(1, 9) for _ in range(stages)) for _ in range(3)))
    links = {
        Link(at, at + 1): LinkDelay(*(draw.choice((0, draw.uniform(0, 20))) for _ in range(4)))
        for at in range(stages - 1)
    }
    links[Link(0, stages - 1)] = LinkDelay(*(draw.uniform(0, 20) for _ in range(4)))
    return costs, links, draw.randint(1, 12)


def _schedules(costs, links, num_microbatches):
    for build in (*FIXED_SCHEDULES.values(), zb_v):
        yield build(costs.num_stages, num_microbatches)
    for num_chunks in (2, 3):
        yield interleaved(costs.num_stages, num_microbatches * costs.num_stages, num_chunks)
    for name in PLANNED_SCHEDULES:
        yield plan(costs, links, Limits(), num_microbatches, name).schedule


@pytest.mark.parametrize("seed", range(8))
def test_delegated_links_give_the_schedules_own_simulation(seed):
    costs, links, num_microbatches = _problem(seed)
    for schedule in _schedules(costs, links, num_microbatches):
        expected = simulate(schedule, costs, links)
        timeline = simulate_blocking(lowered(schedule, costs, links, "delegated"), costs, links)
        assert timeline.orders == expected.orders
        for stage in range(costs.num_stages):
            np.testing.assert_array_equal(timeline.start_ms[stage], expected.start_ms[stage])
            np.testing.assert_array_equal(timeline.end_ms[stage], expected.end_ms[stage])


@pytest.mark.parametrize("seed", range(8))
def test_direct_links_start_no_op_earlier(seed):
    costs, links, num_microbatches = _problem(seed)
    for schedule in _schedules(costs, links, num_microbatches):
        overlapping = simulate(schedule, costs, links)
        timeline = simulate_blocking(lowered(schedule, costs, links), costs, links)
        assert timeline.orders == schedule.orders
        for blocked, free in zip(timeline.start_ms, overlapping.start_ms, strict=True):
            assert (blocked >= free - 1e-9).all()


def longest_paths(ranks, costs, links):
    """Each instruction's end if all is direct: raised until all that has to be before it is."""
    times_ms = [
        {OpKind.F: f, OpKind.B: b, OpKind.W: w, OpKind.BW: b + w}
        for f, b, w in zip(*astuple(costs), strict=True)
    ]
    places = [{step: at for at, step in enumerate(rank.instructions)} for rank in ranks]
    ends_ms, changes = [[0.0] * len(rank.instructions) for rank in ranks], True

    def end_ms(rank, at, step):
        begins_ms = ends_ms[rank][at - 1] if at else 0.0
        if isinstance(step, Run):
            return begins_ms + times_ms[rank][step.op.kind] / ranks[rank].num_chunks
        if not isinstance(step, Move):
            return begins_ms
        there = places[step.peer][step.other_end]
        met_ms = max(begins_ms, ends_ms[step.peer][there - 1] if there else 0.0)
        moved = [step.sent, step.received] if isinstance(step, SendReceive) else [step.transfer]
        return met_ms + max(link_ms(each, links) for each in moved)

    while changes:
        changes = False
        for rank, at, step in (
            (r, at, step) for r in range(len(ranks)) for step, at in places[r].items()
        ):
            found_ms = end_ms(rank, at, step)
            changes |= found_ms != ends_ms[rank][at]
            ends_ms[rank][at] = found_ms
    return ends_ms


def link_ms(transfer, links):
    forward_ms, backward_ms, *occupied_ms = astuple(links.get(transfer.link, LinkDelay()))
    is_upward = transfer.source < transfer.destination
    return (forward_ms, backward_ms)[not is_upward] + occupied_ms[not is_upward]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_direct_links_take_the_longest_path(seed, pairs):
    costs, links, num_microbatches = _problem(seed)
    for schedule in _schedules(costs, links, min(num_microbatches, 4)):
        ranks = lower(schedule, simulate(schedule, costs, links), pairs=pairs)
        timeline = simulate_blocking(ranks, costs, links)
        found_ms = longest_paths(ranks, costs, links)
        for rank, ends_ms, simulated_ms in zip(ranks, found_ms, timeline.end_ms, strict=True):
            steps = zip(rank.instructions, ends_ms, strict=True)
            expected_ms = [end for step, end in steps if isinstance(step, Run)]
            np.testing.assert_allclose(simulated_ms, expected_ms)


@pytest.mark.parametrize(
    ("name", "healthy_ms", "slow_ms"),
    [("gpipe", 450, 1170), ("1f1b", 450, 840), ("zb-h1", 390, 1100), ("zb-h2", 390, 1100)],
)
def test_healthy_direct_links_cost_nothing(name, healthy_ms, slow_ms):
    # 24 messages of 30 ms cross the slow link, one after another: 720 ms, part of them in bubbles.
    # Under 1f1b ten times two of them go at once, so it is 14 times 30 ms.
    costs = StageCosts.uniform(4, 10, 10, 10)
    schedule = FIXED_SCHEDULES[name](4, 12)
    ranks = lowered(schedule, costs)
    assert simulate(schedule, costs).makespan_ms == healthy_ms
    assert simulate_blocking(ranks, costs).makespan_ms == healthy_ms
    assert simulate_blocking(ranks, costs, chain_links([0, 30, 0])).makespan_ms == slow_ms


def test_transfers_in_another_order_deadlock():
    ranks = programs("F0 >F0 F1 >F1", "<F1 F1 <F0 F0")
    with pytest.raises(ProgramError) as caught:
        simulate_blocking(ranks, UNIFORM)
    assert str(caught.value) == (
        "deadlock: rank 0 waits for the peer's receive activation[0] 0>1, "
        "rank 1 waits for the peer's send activation[1] 0>1"
    )


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="got costs of 3 stages, expected 2"):
        simulate_blocking(programs("F0", "F0"), StageCosts.uniform(3, 1, 1, 1))


def test_copies_overlap_ops_until_one_needs_them():
    schedule = Schedule.from_rows("hand", ["F0 F1 F2 BW0 BW1 BW2"])
    costs = StageCosts.uniform(1, 10, 5, 5)
    (program,) = lower(schedule, simulate(schedule, costs))
    placed = offload(program, StageMemory(1, 0, 2))  # F0 F1 >1 ~1 F2 BW0 <1 BW1 BW2
    timeline = simulate_blocking([placed], costs, copies=CopyCosts((4.0,), (25.0,)))
    assert picture(timeline) == ["F0:0-10 F1:10-20 F2:24-34 BW0:34-44 BW1:69-79 BW2:79-89"]
    assert timeline.copies == (
        CopySpan(0, "offload", 1, 0, 20.0, 24.0),
        CopySpan(0, "fetch", 1, 0, 44.0, 69.0),
    )


def test_a_fetch_waits_for_a_place():
    row = "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4 W0 W1 W2 W3 W4"
    schedule, costs = Schedule.from_rows("hand", [row]), StageCosts.uniform(1, 10, 10, 10)
    (program,) = lower(schedule, simulate(schedule, costs))
    placed = offload(program, StageMemory(1, 0, 2))  # F3 B0 F4 >4 <1:4 B1 <2 B2 <4 B3 B4
    timeline = simulate_blocking([placed], costs, copies=CopyCosts((30.0,), (1.0,)))
    spans = {span.label: (span.start_ms, span.end_ms) for span in timeline.copies}
    ends = {str(span.op): span.end_ms for span in timeline.spans()}
    assert spans["offload 1"] == (20.0, 50.0)
    assert spans["offload 2"] == (60.0, 90.0)  # F2 waited for the place until 50
    assert spans["fetch 1"] == (spans["offload 4"][1], spans["offload 4"][1] + 1.0)
    assert ends["B1"] == spans["fetch 1"][1] + 10.0


def test_copies_of_one_direction_follow_one_another():
    schedule = Schedule.from_rows("hand", ["F0 F1 F2 BW0 BW1 BW2"])
    costs = StageCosts.uniform(1, 10, 5, 5)
    (program,) = lower(schedule, simulate(schedule, costs))
    placed = offload_these(program, waiting_longest(program, 3), ahead=1)
    timeline = simulate_blocking([placed], costs, copies=CopyCosts((15.0,), (20.0,)))
    spans = [(span.start_ms, span.end_ms) for span in sorted(timeline.copies)]
    assert spans[:3] == [(25.0, 45.0), (45.0, 65.0), (65.0, 85.0)]  # back
    assert spans[3:] == [(10.0, 25.0), (25.0, 40.0), (40.0, 55.0)]  # out
    assert picture(timeline) == ["F0:0-10 F1:10-20 F2:20-30 BW0:45-55 BW1:65-75 BW2:85-95"]
