"""Lowered programs, as pictures: what each rank does, line by line, without the frees."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.program.check import check
from jaxmorph.program.instructions import Free, Receive, Run, Send, reads
from jaxmorph.program.lowering import insert_frees, lower
from jaxmorph.schedule.costs import Limits, Link, StageCosts, chain_links
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

UNIFORM = StageCosts.uniform(2, 10, 10, 10)
TWO_STAGES = Schedule.from_rows("hand", ["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"])


def picture(program):
    """The instructions without frees, shortened: `F0`, `>F0` sends it, `<F0` receives it."""
    letters = {"activation": "F", "gradient": "B", "tied": "tied"}
    words = []
    for step in program.instructions:
        match step:
            case Free():
                continue
            case Run(op):
                words.append(str(op))
            case Send(transfer) | Receive(transfer):
                arrow = ">" if isinstance(step, Send) else "<"
                words.append(f"{arrow}{letters[transfer.payload]}{transfer.microbatch}")
            case _:
                words.append(str(step).replace(" ", "-"))
    return " ".join(words)


def lowered(schedule, costs=UNIFORM, links=None, routes=None, num_tied=0):
    planned = simulate(schedule, costs, links or {})
    return lower(schedule, planned, routes, num_tied=num_tied)


def test_direct_transfers_stand_in_one_order_on_both_ends():
    first, last = lowered(TWO_STAGES)
    assert picture(first) == "F0 >F0 F1 >F1 <B0 B0 W0 <B1 B1 W1 update"
    assert picture(last) == "<F0 F0 <F1 B0 >B0 W0 F1 B1 >B1 W1 update"


def test_a_delegated_receive_waits_until_right_before_its_op():
    first, last = lowered(TWO_STAGES, routes={Link(0, 1): "delegated"})
    assert picture(first) == "F0 >F0 F1 >F1 <B0 B0 W0 <B1 B1 W1 update"
    assert picture(last) == "<F0 F0 B0 >B0 W0 <F1 F1 B1 >B1 W1 update"


def test_the_first_and_last_stage_exchange_tied_gradients_before_the_update():
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


@pytest.mark.parametrize(("late_ms", "before_the_op"), [(2.0, True), (8.0, False)])
def test_a_transfer_goes_to_the_receivers_nearer_boundary(late_ms, before_the_op):
    """The receiver starts an op shortly before the sender is ready: which of them waits?"""
    schedule = Schedule.from_rows("hand", ["F0 F1 BW0 BW1", "F0 BW0 F1 BW1"])
    planned = simulate(schedule, UNIFORM)
    shifted = replace(  # the sender's F1 ends `late_ms` after the receiver's BW0 began, at 20
        planned,
        start_ms=(np.array([0.0, 10.0, 50.0, 70.0]), np.array([10.0, 20.0, 40.0, 50.0])),
        end_ms=(np.array([10.0, 20.0 + late_ms, 70.0, 90.0]), np.array([20.0, 40.0, 50.0, 70.0])),
    )
    if not before_the_op:  # nearer to the op's end
        shifted = replace(shifted, end_ms=(np.array([10.0, 32.0, 70.0, 90.0]), *shifted.end_ms[1:]))
    _, receiver = lower(schedule, shifted)
    words = picture(receiver).split()
    assert (words.index("<F1") < words.index("BW0")) == before_the_op


def test_a_buffer_is_freed_right_after_its_last_reader():
    for program in lowered(TWO_STAGES):
        steps = program.instructions
        for position, step in enumerate(steps):
            if isinstance(step, Free):
                earlier = steps[:position]
                reader = max(
                    i
                    for i, other in enumerate(earlier)
                    if step.buffer in reads(other, program.rank, program.num_ranks)
                )
                assert all(isinstance(other, Free) for other in steps[reader + 1 : position])


def test_frees_are_put_in_once():
    first, _ = lowered(TWO_STAGES)
    bare = replace(
        first, instructions=tuple(s for s in first.instructions if not isinstance(s, Free))
    )
    assert insert_frees(bare) == first


durations = st.floats(0.0, 20.0, allow_nan=False)


@given(st.data())
def test_every_planned_schedule_lowers_to_programs_that_run_to_completion(data):
    num_stages = data.draw(st.integers(1, 6))
    num_microbatches = data.draw(st.integers(1, 9))
    row = st.tuples(*[durations] * num_stages)
    costs = StageCosts(data.draw(row), data.draw(row), data.draw(row))
    latencies = [data.draw(st.sampled_from([0.0, 0.3, 35.0])) for _ in range(num_stages - 1)]
    links = chain_links(latencies)
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "paper"]))
    schedule = plan(costs, links, Limits(), num_microbatches, name).schedule
    routes = {link: data.draw(st.sampled_from(["direct", "delegated"])) for link in links}
    programs = lower(schedule, simulate(schedule, costs, links), routes, num_tied=1)
    check(programs)
    assert tuple(tuple(program.ops()) for program in programs) == schedule.orders
