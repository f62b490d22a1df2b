"""The checker finds every kind of mismatch between ranks' programs."""

from dataclasses import replace

import pytest

from jaxmorph.program.check import ProgramError, check
from jaxmorph.program.instructions import (
    Payload,
    RankInstructions,
    Receive,
    Run,
    Send,
    SendReceive,
    Transfer,
)
from jaxmorph.program.lowering import lower
from jaxmorph.records import Link, Route
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import interleaved
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

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
    assert {one, other} <= set(program.instructions)
    names = {one: other, other: one}
    return replace(
        program, instructions=tuple(names.get(step, step) for step in program.instructions)
    )


def replaced(program, one, other):
    assert one in program.instructions
    steps = (other if step == one else step for step in program.instructions)
    return replace(program, instructions=tuple(steps))


def moved_to_end(program, instruction):
    return replace(program, instructions=(*without(program, instruction).instructions, instruction))


def run(text):
    return Run(Op.parse(text))


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("W0-1", None),
        ("W0", r"update before the weight gradients of \[1\]"),
        ("W1", r"update before the weight gradients of \[0\]"),
        ("W0-2", r"run W0-2 runs before its weight-stash\[2\] is there"),
    ],
)
def test_a_group_of_w_is_finished_with_all_its_microbatches(group, says):
    schedule = Schedule.from_rows("hand", ["F0 F1 B0 B1 W0 W1", "F0 B0 W0 F1 B1 W1"])
    planned = simulate(schedule, StageCosts.uniform(2, 1, 1, 1))
    first, second = lower(schedule, planned)
    changed = replaced(without(first, run("W1")), run("W0"), run(group))
    if says is None:
        check([changed, second])
        again = replace(changed, instructions=(*changed.instructions, run("W1")))
        with pytest.raises(ProgramError, match="run W1 a second time"):
            check([again, second])
    else:
        with pytest.raises(ProgramError, match=says):
            check([changed, second])


def with_chunks(num_ranks=2):
    schedule = interleaved(num_ranks, 2, 2)
    return list(lower(schedule, simulate(schedule, StageCosts.uniform(num_ranks, 2, 1, 1))))


def test_sound_programs_pass():
    check(programs())
    check(in_pairs())
    check(programs("delegated"))
    check(with_chunks())
    check(with_chunks(num_ranks=1))


def in_pairs():
    planned = simulate(SCHEDULE, StageCosts.uniform(2, 1, 1, 1))
    return list(lower(SCHEDULE, planned, pairs=True))


PAIR = SendReceive(ACTIVATION_1, Transfer(Payload.GRADIENT, 1, 0, 0))


def pair_at_one_end():
    """The other end first receives and then sends."""
    first, last = in_pairs()
    steps = last.instructions
    at = steps.index(PAIR.other_end)
    apart = (Receive(ACTIVATION_1), Send(PAIR.received))
    return [first, replace(last, instructions=(*steps[:at], *apart, *steps[at + 1 :]))]


def pair_whose_gradient_needs_its_activation():
    first, last = in_pairs()
    early = SendReceive(ACTIVATION_0, PAIR.received)
    first = replaced(first, PAIR, early)
    last = without(last, Receive(ACTIVATION_0))
    last = replaced(last, PAIR.other_end, early.other_end)
    return [without(first, Send(ACTIVATION_0)), last]


def pairs_in_a_ring():
    """Each rank waits at a pair with the next one, which waits at a pair with the one after."""
    there = [Transfer(Payload.ACTIVATION, rank, (rank + 1) % 3, 0) for rank in range(3)]
    back = [Transfer(Payload.GRADIENT, (rank + 1) % 3, rank, 0) for rank in range(3)]
    pairs = [*map(SendReceive, there, back)]
    return [
        RankInstructions(rank, 3, 1, (pairs[rank], pairs[rank - 1].other_end)) for rank in range(3)
    ]


def silent_peer():
    first, last = programs()
    return [first, without(last, Send(Transfer(Payload.GRADIENT, 1, 0, 1), "direct"))]


def early_tied_gradient():
    planned = simulate(SCHEDULE, StageCosts.uniform(2, 1, 1, 1))
    first, last = lower(SCHEDULE, planned, num_tied=1)
    return [swapped(first, Send(Transfer(Payload.TIED, 0, 1, 0)), run("W1")), last]


def late_weight_gradient():
    first, last = programs()
    return [moved_to_end(first, run("W1")), last]


def late_weight_gradient_of_a_chunk():
    (only,) = with_chunks(num_ranks=1)
    return [moved_to_end(only, run("BW1"))]


def lost_message():
    steps = (run("F0"), Send(ACTIVATION_0, "delegated"))
    return [RankInstructions(0, 2, 0, steps), RankInstructions(1, 2, 0, ())]


def unsent_message():
    first, last = programs("delegated")
    return [without(first, Send(ACTIVATION_1, "delegated")), last]


def on_first(made, one, other):
    first, *rest = made
    return [swapped(first, one, other), *rest]


def on_last(made, one, other):
    *rest, last = made
    return [*rest, swapped(last, one, other)]


AROUND_0 = Transfer(Payload.ACTIVATION, 1, 0, 0)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (silent_peer, r"deadlock: rank 0 waits at receive gradient\[1\] 1>0"),
        (
            pair_at_one_end,
            r"rank 0 is at send activation\[1\] 0>1 and receive gradient\[0\] 1>0 "
            r"while its peer is at receive activation\[1\] 0>1",
        ),
        (
            pair_whose_gradient_needs_its_activation,
            r"rank 1: run F0 runs before its input\[0\] is there",
        ),
        (pairs_in_a_ring, r"deadlock: rank 0 waits at send activation\[0\] 0>1 and receive grad"),
        (
            lambda: on_last(programs(), Receive(ACTIVATION_0), Receive(ACTIVATION_1)),
            "while its peer is at receive activation",
        ),
        (
            lambda: on_last(programs(), Receive(ACTIVATION_0), run("F0")),
            r"(?s)rank 1: run F0 runs before its input\[0\] is there.*>run F0<",
        ),
        (late_weight_gradient, r"update before the weight gradients of \[1\]"),
        (early_tied_gradient, r"send tied\[0\] 0>1 before the weight gradients of"),
        (
            lambda: on_first(programs(), run("F1"), Send(ACTIVATION_1)),
            r"send activation\[1\] 0>1 runs before its output\[1\] is there",
        ),
        (
            lambda: [replaced(programs()[0], run("W1"), run("W0")), programs()[1]],
            r"rank 0: run W0 a second time",
        ),
        (lost_message, r"no rank receives activation\[0\] 0>1"),
        (unsent_message, r"deadlock: .*rank 1 waits at receive activation"),
        (
            lambda: on_last(
                programs("delegated"),
                Receive(ACTIVATION_1, "delegated"),
                Receive(ACTIVATION_0, "delegated"),
            ),
            r"activation\[1\] 0>1 is received while activation\[0\]",
        ),
        (
            lambda: on_first(with_chunks(), Receive(AROUND_0), run("1.F0")),
            r"run 1\.F0 runs before its 1\.input\[0\] is there",
        ),
        (
            lambda: on_first(with_chunks(num_ranks=1), run("F0"), run("1.F0")),
            r"run 1\.F0 runs before its 1\.input\[0\] is there",
        ),
        (
            late_weight_gradient_of_a_chunk,
            r"update before the weight gradients of \[1\] of chunk 0",
        ),
        (
            lambda: on_first(
                with_chunks(), Send(Transfer(Payload.ACTIVATION, 0, 1, 1)), Receive(AROUND_0)
            ),
            "while its peer is at",
        ),
    ],
)
def test_programs_that_do_not_fit_together_are_refused(broken, message):
    with pytest.raises(ProgramError, match=message):
        check(broken())
