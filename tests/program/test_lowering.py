"""Lowered programs, as pictures: what each rank does, line by line."""

from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.placement import Placement
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.check import check
from jaxmorph.program.dataflow import flows, last_uses, sent_buffer, uses
from jaxmorph.program.instructions import (
    BufferKind,
    Payload,
    Receive,
    Run,
    Send,
    SendReceive,
    Transfer,
)
from jaxmorph.program.lowering import forward_only, global_order, lower, lower_in_step
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link, Route, Routes
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, chain_links
from jaxmorph.schedule.fixed import (
    FIXED_SCHEDULES,
    dualpipe_v,
    interleaved,
    one_forward_one_backward,
    zb_v,
)
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

UNIFORM = StageCosts.uniform(2, 10, 10, 10)
TWO_STAGES = Schedule.from_rows("hand", ["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"])


def picture(program):
    """The instructions, shortened: `F0`, `>F0` sends it, `<F0` receives it.

    `>1.F0` sends what `1.F0` made; on the last rank that is for chunk 2 of the first. `>F1<B0` is a
    pair.
    """
    words = []
    for step in program.instructions:
        match step:
            case Run(op):
                words.append(str(op))
            case Send(transfer):
                words.append(f">{message(transfer)}")
            case Receive(transfer):
                words.append(f"<{message(transfer)}")
            case SendReceive(sent, received):
                words.append(f">{message(sent)}<{message(received)}")
            case _:
                words.append(str(step).replace(" ", "-"))
    return " ".join(words)


def message(transfer):
    letters = {"activation": "F", "gradient": "B", "tied": "tied"}
    chunk = f"{transfer.chunk}." if transfer.chunk else ""
    return f"{chunk}{letters[transfer.payload]}{transfer.microbatch}"


def lowered(schedule, costs=UNIFORM, links=None, routes=None, num_tied=0, pairs=None):
    planned = simulate(schedule, costs, links or {})
    return lower(schedule, planned, routes, num_tied=num_tied, pairs=pairs)


def test_both_ends_order_direct_transfers_alike():
    first, last = lowered(TWO_STAGES)
    assert picture(first) == "F0 >F0 F1 >F1 <B0 B0 W0 <B1 B1 W1 update"
    assert picture(last) == "<F0 F0 <F1 B0 >B0 W0 F1 B1 >B1 W1 update"


def test_a_delegated_receive_precedes_its_op():
    first, last = lowered(TWO_STAGES, routes={Link(0, 1): "delegated"})
    assert picture(first) == "F0 >F0 F1 >F1 <B0 B0 W0 <B1 B1 W1 update"
    assert picture(last) == "<F0 F0 B0 >B0 W0 <F1 F1 B1 >B1 W1 update"


def test_one_forward_one_backward_pairs_what_is_due():
    first, middle, last = lowered(one_forward_one_backward(3, 4), equal(3))
    assert picture(first) == ("F0 >F0 F1 >F1 F2 >F2<B0 BW0 F3 >F3<B1 BW1 <B2 BW2 <B3 BW3 update")
    assert picture(middle) == (
        "<F0 F0 <F1 >F0 F1 >F1<B0 BW0 >B0<F2 F2 >F2<B1 BW1 >B1<F3 F3 >F3<B2 BW2 "
        ">B2 <B3 BW3 >B3 update"
    )
    assert picture(last) == ("<F0 F0 BW0 >B0<F1 F1 BW1 >B1<F2 F2 BW2 >B2<F3 F3 BW3 >B3 update")


def test_delegated_links_have_no_pairs():
    first, middle, last = lowered(
        one_forward_one_backward(3, 3), equal(3), routes={Link(0, 1): "delegated"}
    )
    assert picture(first) == "F0 >F0 F1 >F1 F2 >F2 <B0 BW0 <B1 BW1 <B2 BW2 update"
    assert picture(middle) == (
        "<F0 F0 >F0 <F1 F1 >F1<B0 BW0 >B0 <F2 F2 >F2<B1 BW1 >B1 <B2 BW2 >B2 update"
    )
    assert picture(last) == "<F0 F0 BW0 >B0<F1 F1 BW1 >B1<F2 F2 BW2 >B2 update"


def test_schedules_that_split_pair_only_if_asked():
    first, last = lowered(TWO_STAGES, pairs=True)
    assert picture(first) == "F0 >F0 F1 >F1<B0 B0 W0 <B1 B1 W1 update"
    assert picture(last) == "<F0 F0 B0 >B0<F1 W0 F1 B1 >B1 W1 update"


def test_an_activation_that_an_op_needs_at_once_goes_alone():
    """All Fs run before the first B, so none waits for a gradient."""
    schedule = Schedule.from_rows("hand", ["F0 F1 BW0 BW1", "F0 F1 BW0 BW1"])
    first, _ = lowered(schedule)
    assert picture(first) == "F0 >F0 F1 >F1 <B0 BW0 <B1 BW1 update"


def test_tied_gradients_are_exchanged_before_the_update():
    three = plan(StageCosts.uniform(3, 1, 1, 1), {}, Limits(), 1, "zb-h1").schedule
    first, middle, last = lowered(three, StageCosts.uniform(3, 1, 1, 1), num_tied=2)
    assert picture(first).endswith(
        "W0 >tied0 <tied0 reduce-tied-0 >tied1 <tied1 reduce-tied-1 update"
    )
    assert "tied" not in picture(middle)
    assert picture(last).endswith(
        "W0 <tied0 >tied0 reduce-tied-0 <tied1 >tied1 reduce-tied-1 update"
    )


def test_one_rank_alone_sums_its_own_tied_copies():
    alone = Schedule.from_rows("hand", ["F0 BW0"])
    (only,) = lowered(alone, StageCosts.uniform(1, 1, 1, 1), num_tied=1)
    assert picture(only) == "F0 BW0 reduce-tied-0 update"


def test_chunks_on_two_ranks_go_around_them():
    first, last = lowered(interleaved(2, 2, 2), num_tied=1)
    assert picture(first) == (
        "F0 >F0 F1 >F1 <F0 1.F0 >1.F0 <F1 1.F1 >1.F1<1.B0 "
        "1.BW0 >1.B0 <1.B1 1.BW1 <B0 >1.B1 BW0 <B1 BW1 >tied0 <tied0 reduce-tied-0 update"
    )
    assert picture(last) == (
        "<F0 F0 <F1 >F0 F1 <1.F0 >F1 1.F0 1.BW0 "
        ">1.B0<1.F1 1.F1 1.BW1 <1.B0 >1.B1 BW0 >B0 <1.B1 BW1 >B1 <tied0 >tied0 reduce-tied-0 update"
    )


def test_delegated_receives_of_chunks_precede_their_ops():
    routes = {Link(0, 1): "delegated"}
    first, last = lowered(interleaved(2, 2, 2), routes=routes)
    assert picture(first) == (
        "F0 >F0 F1 >F1 <F0 1.F0 >1.F0 <F1 1.F1 >1.F1 "
        "<1.B0 1.BW0 >1.B0 <1.B1 1.BW1 >1.B1 <B0 BW0 <B1 BW1 update"
    )
    assert picture(last) == (
        "<F0 F0 >F0 <F1 F1 >F1 <1.F0 1.F0 1.BW0 >1.B0 "
        "<1.F1 1.F1 1.BW1 >1.B1 <1.B0 BW0 >B0 <1.B1 BW1 >B1 update"
    )


def test_one_rank_with_chunks_has_no_transfers():
    (only,) = lowered(interleaved(1, 2, 2), StageCosts.uniform(1, 1, 1, 1), num_tied=1)
    assert picture(only) == "F0 1.F0 1.BW0 F1 BW0 1.F1 1.BW1 BW1 reduce-tied-0 update"


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7])
def test_links_that_share_a_rank_take_turns(num_ranks):
    schedule = interleaved(num_ranks, 2 * num_ranks, 3)
    planned = simulate(schedule, StageCosts.uniform(num_ranks, 3, 3, 0))
    busy = Counter(
        (time_us, turn, rank)
        for flow, keys in global_order(schedule, planned, {}).transfers
        for time_us, turn in zip(keys.time_us.tolist(), keys.turn.tolist(), strict=True)
        for rank in flow.link
    )
    assert len(busy) > 8 * num_ranks
    assert set(busy.values()) == {1}


@pytest.mark.parametrize(("late_ms", "before_the_op"), [(2.0, True), (8.0, False)])
def test_a_transfer_moves_to_the_nearer_op_boundary(late_ms, before_the_op):
    """The receiver starts an op shortly before the sender is ready."""
    schedule = Schedule.from_rows("hand", ["F0 F1 BW0 BW1", "F0 BW0 F1 BW1"])
    planned = simulate(schedule, UNIFORM)
    shifted = replace(  # the sender's F1 ends `late_ms` after the receiver's BW0 began, at 20
        planned,
        start_ms=(np.array([0.0, 10.0, 50.0, 70.0]), np.array([10.0, 20.0, 40.0, 50.0])),
        end_ms=(np.array([10.0, 20.0 + late_ms, 70.0, 90.0]), np.array([20.0, 40.0, 50.0, 70.0])),
    )
    if not before_the_op:  # nearer to the op's end
        shifted = replace(shifted, end_ms=(np.array([10.0, 32.0, 70.0, 90.0]), *shifted.end_ms[1:]))
    _, receiver = lower(schedule, shifted, pairs=False)
    words = picture(receiver).split()
    assert (words.index("<F1") < words.index("BW0")) == before_the_op


durations = st.floats(0.0, 20.0, allow_nan=False)
latencies = st.sampled_from([0.0, 0.3, 35.0])


@st.composite
def problems(draw, num_stages):
    """Costs, and the links between neighbours and around all stages, with their routes."""
    row = st.tuples(*[durations] * num_stages)
    costs = StageCosts(draw(row), draw(row), draw(row))
    links = chain_links([draw(latencies) for _ in range(num_stages - 1)])
    if num_stages > 2:
        links[Link(0, num_stages - 1)] = LinkDelay(draw(latencies), draw(latencies))
    routes = {link: draw(st.sampled_from(["direct", "delegated"])) for link in links}
    return costs, links, routes


def assert_runs_to_completion(schedule, costs, links, routes, pairs=None):
    planned = simulate(schedule, costs, links)
    programs = lower(schedule, planned, routes, num_tied=1, pairs=pairs)
    check(programs)
    assert tuple(tuple(program.ops()) for program in programs) == schedule.orders
    return programs


@given(st.data())
def test_every_lowered_schedule_completes(data):
    num_stages = data.draw(st.integers(1, 6))
    costs, links, routes = data.draw(problems(num_stages))
    name = data.draw(st.sampled_from([*FIXED_SCHEDULES, *PLANNED_SCHEDULES, "interleaved", "zb-v"]))
    limits = Limits()
    if name in PLANNED_SCHEDULES:
        caps = data.draw(st.none() | st.tuples(*[st.integers(1, 9)] * num_stages))
        limits = Limits(caps, data.draw(st.sampled_from(["B", "W"])))
    if name == "interleaved":
        num_microbatches = num_stages * data.draw(st.integers(1, 3))
        schedule = interleaved(num_stages, num_microbatches, data.draw(st.integers(2, 4)))
    else:
        schedule = plan(costs, links, limits, data.draw(st.integers(1, 9)), name).schedule
    assert_runs_to_completion(schedule, costs, links, routes)


@st.composite
def any_schedules(draw):
    """Rows in random order: any op that can run next."""
    num_ranks, num_chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 4))
    random = draw(st.randoms(use_true_random=False))
    kind = draw(st.sampled_from(["wrap", "v"])) if num_chunks == 2 else "wrap"
    pipeline = Placement(num_ranks, num_chunks, kind)
    waiting = {
        (rank, chunk, kind): deque(Op(kind, microbatch, chunk) for microbatch in microbatches)
        for rank in range(num_ranks)
        for chunk in range(num_chunks)
        for kind in (OpKind.F, OpKind.B, OpKind.W)
        for microbatches in [range(num_microbatches)]
    }
    rows, ran = [[] for _ in range(num_ranks)], set()
    kinds = {Payload.ACTIVATION: OpKind.F, Payload.GRADIENT: OpKind.B}
    feeds = {(kinds[flow.payload], *flow.target): flow.source for flow in flows(pipeline)}

    def is_ready(op, rank):
        own = {OpKind.F: None, OpKind.B: OpKind.F, OpKind.W: OpKind.B}[op.kind]
        needs = [(rank, op._replace(kind=own))] if own else []
        if (source := feeds.get((op.kind, rank, op.chunk))) is not None:
            needs.append((source.rank, op._replace(chunk=source.chunk)))
        return ran.issuperset(needs)

    while any(waiting.values()):
        ready = [at for at, ops in waiting.items() if ops and is_ready(ops[0], at[0])]
        chosen = random.choice(ready)
        op = waiting[chosen].popleft()
        rows[chosen[0]].append(op)
        ran.add((chosen[0], op))
    return Schedule("random", num_microbatches, tuple(map(tuple, rows)), kind)


@given(any_schedules(), st.data())
def test_any_mix_of_routes_completes(schedule, data):
    costs, links, routes = data.draw(problems(schedule.num_stages))
    pairs = data.draw(st.booleans())
    programs = assert_runs_to_completion(schedule, costs, links, routes, pairs)
    timeline = simulate_blocking(programs, costs, links)
    free = simulate(schedule, costs, links)
    for blocked, unblocked in zip(timeline.start_ms, free.start_ms, strict=True):
        assert (blocked >= unblocked - 1e-9).all()
    for span in timeline.transfers:
        route = routes.get(Transfer.parse(span.label).link, "direct")
        assert span.holds_queue == (route == "direct")


@given(any_schedules(), st.data())
def test_pairs_start_no_op_later_where_delays_are_alike(schedule, data):
    costs, links, routes = data.draw(problems(schedule.num_stages))
    planned = simulate(schedule, costs, links)
    alike = {
        link: LinkDelay(of.forward_latency_ms, of.forward_latency_ms) for link, of in links.items()
    }
    single, paired = (
        simulate_blocking(lower(schedule, planned, routes, pairs=pairs), costs, alike)
        for pairs in (False, True)
    )
    for with_pairs, without in zip(paired.start_ms, single.start_ms, strict=True):
        assert (with_pairs <= without + 1e-9).all()


@given(any_schedules(), st.data())
def test_a_delegated_send_follows_its_op_directly(schedule, data):
    costs, links, routes = data.draw(problems(schedule.num_stages))
    for program in lower(schedule, simulate(schedule, costs, links), routes):
        steps = zip(program.instructions, uses(program), strict=True)
        for (before, (_, made)), (step, _) in pairwise(steps):
            if isinstance(step, Send) and step.route == "delegated":
                assert isinstance(before, Run)
                assert sent_buffer(step.transfer) in made


def test_a_channel_is_received_in_sending_order():
    schedule = Schedule.from_rows(
        "hand",
        [
            "F0 1.F0 F1 1.F1 1.BW0 BW0 1.BW1 BW1",
            "F0 F1 1.F0 1.BW0 1.F1 1.BW1 BW0 BW1",
        ],
    )
    first, last = lowered(schedule, routes={Link(0, 1): "delegated"})
    assert picture(first) == (
        "F0 >F0 <F0 1.F0 >1.F0 F1 >F1 <F1 1.F1 >1.F1 <1.B0 1.BW0 >1.B0 <1.B1 <B0 BW0 1.BW1 >1.B1 "
        "<B1 BW1 update"
    )
    assert picture(last) == (
        "<F0 F0 >F0 <1.F0 <F1 F1 >F1 1.F0 1.BW0 >1.B0 <1.F1 1.F1 1.BW1 >1.B1 <1.B0 BW0 >B0 "
        "<1.B1 BW1 >B1 update"
    )
    check([first, last])


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 8])
def test_ranks_in_step_lose_no_time(num_stages, num_chunks):
    """F and BW take as long as each other, so that ops end together; else one end has to wait."""
    costs = StageCosts.uniform(num_stages, 12, 6, 6)
    schedule = interleaved(num_stages, 2 * num_stages, num_chunks)
    planned = simulate(schedule, costs)
    programs = lower(schedule, planned)
    check(programs)
    assert simulate_blocking(programs, costs).makespan_ms == pytest.approx(planned.makespan_ms)


STAGES, MICROBATCHES = 4, 8
SCHEDULES = {
    **{name: make(STAGES, MICROBATCHES) for name, make in FIXED_SCHEDULES.items()},
    "interleaved": interleaved(STAGES, MICROBATCHES, 3),
    "interleaved on two": interleaved(2, MICROBATCHES, 2),
    "alone": FIXED_SCHEDULES["zb-h1"](1, MICROBATCHES),
    "zb-v": zb_v(STAGES, MICROBATCHES),
    "dualpipe-v": dualpipe_v(STAGES, 2 * STAGES),
}


def forwards(schedule, route: Route = "direct", first_microbatch=0):
    stages = range(schedule.num_stages)
    routes: Routes = {Link(lower, upper): route for upper in stages for lower in range(upper)}
    costs = StageCosts.uniform(schedule.num_stages, 10, 10, 10)
    programs = lower(schedule, simulate(schedule, costs), routes, num_tied=1)
    return [forward_only(program, first_microbatch) for program in programs]


def test_forward_only_keeps_forwards_and_transfers():
    first, last = forwards(TWO_STAGES)
    assert [str(step) for step in first.instructions] == [
        "run F0", "send activation[0] 0>1", "run F1", "send activation[1] 0>1",
    ]  # fmt: skip
    assert [str(step) for step in last.instructions] == [
        "receive activation[0] 0>1", "run F0", "receive activation[1] 0>1", "run F1",
    ]  # fmt: skip


def test_forward_only_can_renumber_microbatches():
    renumbered, _ = forwards(TWO_STAGES, first_microbatch=6)
    assert list(renumbered.ops()) == [Op(OpKind.F, 6), Op(OpKind.F, 7)]
    sent = [str(s.transfer) for s in renumbered.instructions if isinstance(s, Send)]
    assert sent == ["activation[6] 0>1", "activation[7] 0>1"]


@pytest.mark.parametrize("route", ["direct", "delegated"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_only_programs_complete(name, route):
    schedule = SCHEDULES[name]
    programs = forwards(schedule, route, 100)
    check(programs)
    everything = {
        Op(OpKind.F, 100 + microbatch, chunk)
        for microbatch in range(MICROBATCHES)
        for chunk in range(schedule.num_chunks)
    }
    for program in programs:
        assert Counter(program.ops()) == Counter(everything)
        assert {type(step) for step in program.instructions} <= {Run, Send, Receive}
        for step, freed in zip(program.instructions, last_uses(program), strict=True):
            if isinstance(step, Run):  # no stash outlives its forward
                assert (BufferKind.STASH, step.op.microbatch, step.op.chunk) in freed
    needed = slots_needed(programs)
    assert bool(needed) == (route == "delegated" and schedule.num_stages > 1)
    assert all(slots <= MICROBATCHES * schedule.num_chunks for slots in needed.values())


def test_a_v_turns_on_the_last_rank_and_reduces_tied_gradients_on_the_first():
    schedule = zb_v(2, 1)
    planned = simulate(schedule, StageCosts.uniform(2, 2, 2, 2))
    first, last = lower(schedule, planned, num_tied=1)
    assert [*map(str, last.instructions)] == [
        "receive activation[0] 0>1", "run F0", "run 1.F0", "send 1.activation[0] 1>0",
        "receive 1.gradient[0] 0>1", "run 1.B0", "run 1.W0",
        "run B0", "send gradient[0] 1>0", "run W0", "update",
    ]  # fmt: skip
    assert [str(step) for step in first.instructions[-2:]] == ["reduce tied 0", "update"]


def equal(num_stages):
    return StageCosts.uniform(num_stages, 10, 10, 10)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_chunks", "pairs", "early_ms", "in_step_ms"),
    [
        (2, 8, 2, False, 315, 270),
        (4, 8, 2, False, 290, 290),
        (5, 20, 2, False, 915, 705),
        (8, 32, 2, False, 1475, 1140),
        (8, 32, 4, False, 1457.5, 1090),
        (2, 8, 2, True, 300, 270),
        (4, 8, 2, True, 285, 285),
        (5, 20, 2, True, 700, 700),
        (8, 32, 2, True, 1105, 1105),
        (8, 32, 4, True, 1057.5, 1057.5),
    ],
)
def test_lower_in_step_shortens_a_ring(
    num_stages, num_microbatches, num_chunks, pairs, early_ms, in_step_ms
):
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    costs = equal(num_stages)
    early = lower(schedule, simulate(schedule, costs), pairs=pairs)
    chosen = lower_in_step(schedule, costs, {}, {}, pairs=pairs)
    check(chosen)
    assert simulate_blocking(early, costs).makespan_ms == pytest.approx(early_ms)
    assert simulate_blocking(chosen, costs).makespan_ms == pytest.approx(in_step_ms)
    assert tuple(tuple(program.ops()) for program in chosen) == schedule.orders


def test_lower_in_step_keeps_single_chunks():
    for schedule in (one_forward_one_backward(4, 8), interleaved(1, 4, 3)):
        own = equal(schedule.num_stages)
        early = lower(schedule, simulate(schedule, own), num_tied=1)
        assert lower_in_step(schedule, own, {}, {}, num_tied=1) == early


def test_delegated_links_keep_their_own_delays():
    schedule = interleaved(2, 4, 2)
    links = {Link(0, 1): LinkDelay(30, 30)}
    chosen = lower_in_step(schedule, equal(2), links, {Link(0, 1): "delegated"})
    check(chosen)
    expected = simulate(schedule, equal(2), links).makespan_ms
    assert simulate_blocking(chosen, equal(2), links).makespan_ms == pytest.approx(expected)
