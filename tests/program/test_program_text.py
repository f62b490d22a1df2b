"""Programs come back from their text as they were."""

import pytest

from jaxmorph.control.profiler import Profile
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Offload,
    RankProgram,
)
from jaxmorph.program.program_text import parse_program, program_text
from jaxmorph.schedule.builders import interleaved, zb_h2
from jaxmorph.schedule.costs import Link, StageCosts


@pytest.mark.parametrize(
    ("schedule", "routes"),
    [
        (zb_h2(3, 5), {Link(1, 2): "delegated"}),
        (interleaved(3, 6, 2), {Link(0, 2): "delegated"}),
        (zb_h2(1, 2), {}),
    ],
)
def test_every_ranks_program_comes_back(schedule, routes):
    stages = schedule.num_stages
    profile = Profile(StageCosts.uniform(stages, 1.0, 1.0, 1.0), {})
    for program in lower_step(schedule, profile, routes, num_tied=2):
        assert parse_program(program_text(program)) == program


def test_a_text_is_read_line_by_line():
    schedule, costs = zb_h2(2, 1), StageCosts.uniform(2, 1.0, 1.0, 1.0)
    first, _ = lower_step(schedule, Profile(costs, {}), {Link(0, 1): "delegated"})
    assert program_text(first).split("\n") == [
        "rank 0 of 2, 1 microbatches, 1 chunks",
        "run F0",
        "send activation[0] 0>1 delegated",
        "free output[0]",
        "receive gradient[0] 1>0 delegated",
        "run B0",
        "free stash[0]",
        "free output-gradient[0]",
        "run W0",
        "free weight-stash[0]",
        "update",
    ]


def test_copies_of_stashes_come_back():
    stash, other = (Buffer(BufferKind.STASH, microbatch, 1) for microbatch in (3, 4))
    steps = (Offload(stash), AwaitRoom(stash), Fetch(stash), Fetch(other, after=stash))
    program = RankProgram(1, 2, 5, steps, num_chunks=2)
    assert parse_program(program_text(program)) == program


@pytest.mark.parametrize("line", ["walk F0", "send activation[0] 0>1 by-air", "free stash", ""])
def test_what_is_no_instruction_is_refused(line):
    with pytest.raises(ValueError, match="expected a"):
        parse_program(f"rank 0 of 2, 1 microbatches, 1 chunks\n{line}")
