"""Programs come back from their text as they were."""

import pytest

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Offload,
    RankInstructions,
    Transfer,
    instructions_text,
    parse_instructions,
)
from jaxmorph.records import Link
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import interleaved, one_forward_one_backward, zb_h2, zb_v


@pytest.mark.parametrize(
    "text", ["activation[3] 0>1", "gradient[12] 5>4", "tied[0] 7>0", "1.activation[3] 3>0"]
)
def test_a_transfer_is_read_back_from_its_text(text):
    assert str(Transfer.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "activation 0>1", "weights[0] 0>1", "activation[x] 0>1", "x.tied[0] 0>1"]
)
def test_a_bad_transfer_text_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a transfer such as 'activation\[3\] 0>1'"):
        Transfer.parse(text)


@pytest.mark.parametrize(
    ("schedule", "routes"),
    [
        (zb_h2(3, 5), {Link(1, 2): "delegated"}),
        (interleaved(3, 6, 2), {Link(0, 2): "delegated"}),
        (one_forward_one_backward(3, 5), {}),
        (zb_h2(1, 2), {}),
        (zb_v(3, 2), {}),
    ],
)
def test_every_ranks_program_comes_back(schedule, routes):
    stages = schedule.num_stages
    profile = Profile(StageCosts.uniform(stages, 1.0, 1.0, 1.0), {})
    for program in lower_step(schedule, profile, routes, num_tied=2):
        assert parse_instructions(instructions_text(program)) == program


def test_a_text_is_read_line_by_line():
    schedule, costs = zb_h2(2, 1), StageCosts.uniform(2, 1.0, 1.0, 1.0)
    first, _ = lower_step(schedule, Profile(costs, {}), {Link(0, 1): "delegated"})
    assert instructions_text(first).split("\n") == [
        "rank 0 of 2, 1 microbatches, 1 chunks",
        "run F0",
        "send activation[0] 0>1 delegated",
        "receive gradient[0] 1>0 delegated",
        "run B0",
        "run W0",
        "update",
    ]


def test_a_pair_is_one_line():
    schedule, costs = one_forward_one_backward(2, 2), StageCosts.uniform(2, 1.0, 1.0, 1.0)
    _, last = lower_step(schedule, Profile(costs, {}))
    assert "send gradient[0] 1>0 and receive activation[1] 0>1" in instructions_text(last)


def test_copies_of_stashes_come_back():
    stash, other = (Buffer(BufferKind.STASH, microbatch, 1) for microbatch in (3, 4))
    steps = (Offload(stash), AwaitRoom(stash), Fetch(stash), Fetch(other, after=stash))
    program = RankInstructions(1, 2, 5, steps, num_chunks=2)
    assert parse_instructions(instructions_text(program)) == program


@pytest.mark.parametrize("line", ["walk F0", "send activation[0] 0>1 by-air", "offload stash", ""])
def test_what_is_no_instruction_is_refused(line):
    with pytest.raises(ValueError, match="expected a"):
        parse_instructions(f"rank 0 of 2, 1 microbatches, 1 chunks\n{line}")
