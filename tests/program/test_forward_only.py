"""The forwards of a step alone, as pictures, and for every schedule."""

import pytest

from jaxmorph.program.check import check
from jaxmorph.program.forward_only import forward_only
from jaxmorph.program.instructions import BufferKind, Free, Receive, Run, Send
from jaxmorph.program.lowering import lower
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.schedule.builders import FIXED_SCHEDULES, interleaved
from jaxmorph.schedule.costs import Link, Route, Routes, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

TWO_STAGES = Schedule.from_rows("hand", ["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"])
STAGES, MICROBATCHES = 4, 8
SCHEDULES = {
    **{name: make(STAGES, MICROBATCHES) for name, make in FIXED_SCHEDULES.items()},
    "interleaved": interleaved(STAGES, MICROBATCHES, 3),
    "interleaved on two": interleaved(2, MICROBATCHES, 2),
    "alone": FIXED_SCHEDULES["zb-h1"](1, MICROBATCHES),
}


def lowered(schedule, route: Route = "direct"):
    stages = range(schedule.num_stages)
    routes: Routes = {Link(lower, upper): route for upper in stages for lower in range(upper)}
    costs = StageCosts.uniform(schedule.num_stages, 10, 10, 10)
    return lower(schedule, simulate(schedule, costs), routes, num_tied=1)


def test_only_forwards_and_their_transfers_are_left_in_the_steps_order():
    first, last = map(forward_only, lowered(TWO_STAGES))
    assert [str(step) for step in first.instructions] == [
        "run F0", "free stash[0]", "send activation[0] 0>1", "free output[0]",
        "run F1", "free stash[1]", "send activation[1] 0>1", "free output[1]",
    ]  # fmt: skip
    assert [str(step) for step in last.instructions] == [
        "receive activation[0] 0>1", "run F0", "free input[0]", "free stash[0]",
        "receive activation[1] 0>1", "run F1", "free input[1]", "free stash[1]",
    ]  # fmt: skip


def test_messages_can_be_told_from_those_of_the_step():
    program, _ = lowered(TWO_STAGES)
    renumbered = forward_only(program, first_microbatch=6)
    assert list(renumbered.ops()) == [Op(OpKind.F, 6), Op(OpKind.F, 7)]
    sent = [str(s.transfer) for s in renumbered.instructions if isinstance(s, Send)]
    assert sent == ["activation[6] 0>1", "activation[7] 0>1"]


@pytest.mark.parametrize("route", ["direct", "delegated"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedules_forwards_run_to_completion_each_once(name, route):
    schedule = SCHEDULES[name]
    programs = [forward_only(program, 100) for program in lowered(schedule, route)]
    check(programs)
    everything = {
        Op(OpKind.F, 100 + microbatch, chunk)
        for microbatch in range(MICROBATCHES)
        for chunk in range(schedule.num_chunks)
    }
    for program in programs:
        ops = list(program.ops())
        assert len(ops) == len(everything)
        assert set(ops) == everything
        assert {type(step) for step in program.instructions} <= {Run, Send, Receive, Free}
    needed = slots_needed(programs)
    assert bool(needed) == (route == "delegated" and schedule.num_stages > 1)
    assert all(slots <= MICROBATCHES * schedule.num_chunks for slots in needed.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stash_outlives_its_forward(name):
    for program in lowered(SCHEDULES[name]):
        steps = forward_only(program).instructions
        for at, step in enumerate(steps):
            if isinstance(step, Run):
                freed = [s.buffer for s in steps[at + 1 : at + 3] if isinstance(s, Free)]
                stash = (BufferKind.STASH, step.op.microbatch, step.op.chunk)
                assert stash in freed
