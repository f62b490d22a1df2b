"""The checker finds each way in which ranks' programs can fail to fit together."""

from dataclasses import replace

import pytest

from jaxmorph.program.check import ProgramError, check
from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Free,
    Payload,
    RankProgram,
    Receive,
    Run,
    Send,
    Transfer,
)
from jaxmorph.program.lowering import lower
from jaxmorph.schedule.builders import interleaved
from jaxmorph.schedule.costs import Link, Route, StageCosts
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate

SCHEDULE = Schedule.from_rows("hand", ["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"])
ACTIVATION_0 = Transfer(Payload.ACTIVATION, 0, 1, 0)
ACTIVATION_1 = Transfer(Payload.ACTIVATION, 0, 1, 1)


def programs(route: Route = "direct"):
    planned = simulate(SCHEDULE, StageCosts.uniform(2, 1, 1, 1))
    return list(lower(SCHEDULE, planned, {Link(0, 1): route}))


def without(program, instruction):
    assert instruction in program.instructions
    kept = tuple(step for step in program.instructions if step != instruction)
    return replace(program, instructions=kept)


def swapped(program, one, other):
    names = {one: other, other: one}
    return replace(
        program, instructions=tuple(names.get(step, step) for step in program.instructions)
    )


def moved_to_end(program, instruction):
    return replace(program, instructions=(*without(program, instruction).instructions, instruction))


def run(text):
    return Run(Op.parse(text))


def free(kind, microbatch, chunk=0):
    return Free(Buffer(BufferKind(kind), microbatch, chunk))


def with_chunks(num_ranks=2):
    schedule = interleaved(num_ranks, 2, 2)
    return list(lower(schedule, simulate(schedule, StageCosts.uniform(num_ranks, 2, 1, 1))))


def test_sound_programs_pass():
    check(programs())
    check(programs("delegated"))


def test_a_transfer_that_only_one_end_makes_is_a_deadlock():
    first, last = programs()
    silent = without(last, Send(Transfer(Payload.GRADIENT, 1, 0, 1), "direct"))
    with pytest.raises(ProgramError, match=r"deadlock: rank 0 waits at receive gradient\[1\] 1>0"):
        check([first, silent])


def test_ends_that_meet_in_different_transfers_are_a_mismatch():
    first, last = programs()
    crossed = swapped(last, Receive(ACTIVATION_0), Receive(ACTIVATION_1))
    with pytest.raises(ProgramError, match="while its peer is at receive activation"):
        check([first, crossed])


def test_an_op_before_its_data_is_an_error_that_marks_the_op():
    first, last = programs()
    early = swapped(last, Receive(ACTIVATION_0), run("F0"))
    with pytest.raises(
        ProgramError, match=r"rank 1: run F0 runs before its input\[0\] is there"
    ) as e:
        check([first, early])
    assert ">run F0<" in str(e.value)


def test_a_weight_gradient_after_the_update_is_an_error():
    first, last = programs()
    with pytest.raises(ProgramError, match=r"update before the weight gradients of \[1\]"):
        check([moved_to_end(moved_to_end(first, run("W1")), free("weight-stash", 1)), last])


def test_a_tied_gradient_sent_before_it_is_complete_is_an_error():
    planned = simulate(SCHEDULE, StageCosts.uniform(2, 1, 1, 1))
    first, last = lower(SCHEDULE, planned, num_tied=1)
    tied = Send(Transfer(Payload.TIED, 0, 1, 0))
    early = swapped(first, tied, run("W1"))
    with pytest.raises(ProgramError, match=r"send tied\[0\] 0>1 before the weight gradients of"):
        check([early, last])


def test_a_buffer_used_after_it_is_freed_is_an_error():
    first, last = programs()
    early = swapped(first, free("stash", 0), run("B0"))
    with pytest.raises(ProgramError, match=r"run B0 uses stash\[0\] after it was freed"):
        check([early, last])


def test_a_buffer_that_is_never_freed_is_an_error():
    first, last = programs()
    with pytest.raises(ProgramError, match=r"rank 0 never frees output\[1\]"):
        check([without(first, free("output", 1)), last])


def test_a_delegated_message_that_nobody_takes_is_an_error():
    steps = (run("F0"), Send(ACTIVATION_0, "delegated"), free("output", 0), free("stash", 0))
    with pytest.raises(ProgramError, match=r"nobody receives activation\[0\] 0>1"):
        check([RankProgram(0, 2, 0, steps), RankProgram(1, 2, 0, ())])


def test_a_delegated_receive_of_what_was_never_sent_is_a_deadlock():
    first, last = programs("delegated")
    with pytest.raises(ProgramError, match=r"deadlock: .*rank 1 waits at receive activation"):
        check([without(first, Send(ACTIVATION_1, "delegated")), last])


def test_delegated_messages_taken_in_another_order_than_sent_are_an_error():
    first, last = programs("delegated")
    later, earlier = Receive(ACTIVATION_1, "delegated"), Receive(ACTIVATION_0, "delegated")
    with pytest.raises(
        ProgramError, match=r"activation\[1\] 0>1 is received while activation\[0\]"
    ):
        check([first, swapped(last, later, earlier)])


def test_sound_programs_with_chunks_pass():
    check(with_chunks())
    check(with_chunks(num_ranks=1))


def test_a_chunks_op_before_the_last_ranks_activation_is_an_error():
    first, last = with_chunks()
    around = Receive(Transfer(Payload.ACTIVATION, 1, 0, 0))
    assert around in first.instructions
    early = swapped(first, around, run("1.F0"))
    with pytest.raises(ProgramError, match=r"run 1\.F0 runs before its 1\.input\[0\] is there"):
        check([early, last])


def test_on_one_rank_a_chunk_before_the_one_that_feeds_it_is_an_error():
    (only,) = with_chunks(num_ranks=1)
    with pytest.raises(ProgramError, match=r"run 1\.F0 runs before its 1\.input\[0\] is there"):
        check([swapped(only, run("F0"), run("1.F0"))])


def test_a_chunks_weight_gradient_after_the_update_is_an_error_that_names_the_chunk():
    (only,) = with_chunks(num_ranks=1)
    late = run("BW1")
    for step in (late, free("stash", 1), free("output-gradient", 1)):
        only = moved_to_end(only, step)
    with pytest.raises(
        ProgramError, match=r"update before the weight gradients of \[1\] of chunk 0"
    ):
        check([only])


def test_a_chunks_buffer_used_after_it_is_freed_is_an_error():
    first, last = with_chunks()
    early = swapped(first, free("stash", 0, 1), run("1.BW0"))
    with pytest.raises(ProgramError, match=r"run 1\.BW0 uses 1\.stash\[0\] after it was freed"):
        check([early, last])


def test_ends_that_meet_in_the_messages_of_different_chunks_are_a_mismatch():
    first, last = with_chunks()
    own, around = Send(Transfer(Payload.ACTIVATION, 0, 1, 1)), Transfer(Payload.ACTIVATION, 1, 0, 0)
    crossed = swapped(first, own, Receive(around))
    with pytest.raises(ProgramError, match="while its peer is at"):
        check([crossed, last])
