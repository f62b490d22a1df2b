"""Pictures of what goes to host memory and when, and the pass against brute force.

`>3` begins to offload stash 3, `<3` to fetch it, `<3:5` once the offload of stash 5 is over; `~3`
waits for that of stash 3.
"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.errors import UserError
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.check import ProgramError, check
from jaxmorph.program.dataflow import last_uses
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Offload,
    RankInstructions,
    Run,
)
from jaxmorph.program.lowering import lower
from jaxmorph.program.offload import (
    count_offloads,
    most_held,
    offload,
    offload_these,
    waiting_longest,
)
from jaxmorph.schedule.costs import CopyCosts, Limits, StageCosts, StageMemory, chain_links
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import peak_on_device

STASH_1 = Buffer(BufferKind.STASH, 1)
WARM_UP = "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4 W0 W1 W2 W3 W4"


def program_of(row: str) -> RankInstructions:
    schedule = Schedule.from_rows("hand", [row])
    return lower(schedule, simulate(schedule, StageCosts.uniform(1, 1, 1, 1)))[0]


def picture(program: RankInstructions) -> str:
    return " ".join(word for step in program.instructions if (word := _word(step)))


def _word(step) -> str:
    match step:
        case Run(op):
            return str(op)
        case Offload(stash):
            return f">{_name(stash)}"
        case Fetch(stash, after):
            return f"<{_name(stash)}" + (f":{_name(after)}" if after else "")
        case AwaitRoom(stash):
            return f"~{_name(stash)}"
        case _:
            return ""


def _name(stash: Buffer) -> str:
    return f"{stash.chunk}.{stash.microbatch}" if stash.chunk else str(stash.microbatch)


def offloaded(row: str, room: int, backward: int = 0, **how) -> str:
    program = program_of(row)
    memory = StageMemory(1, backward, room)
    placed = offload(program, memory, **how)
    check([placed], [memory])
    return picture(placed)


def test_what_fits_stays_as_it_is():
    program = program_of(WARM_UP)
    assert offload(program, StageMemory(1, 0, 4)) is program


@pytest.mark.parametrize(
    ("room", "how", "expected"),
    [
        (3, {}, "F0 F1 F2 >2 ~2 F3 B0 F4 B1 <2 B2 B3 B4"),
        # F4 and B1 need both places: what B1 has none of takes the one that stash 4 leaves.
        (2, {}, "F0 F1 >1 ~1 F2 >2 ~2 F3 B0 F4 >4 <1:4 B1 <2 B2 <4 B3 B4"),
        (2, {"early": True}, "F0 F1 >1 ~1 F2 >2 ~2 F3 >3 B0 <1 ~3 F4 B1 <2 B2 <3 B3 B4"),
        (1, {}, "F0 >0 ~0 F1 >1 ~1 F2 >2 ~2 F3 >3 <0:3 B0 F4 >4 <1:4 B1 <2 B2 <3 B3 <4 B4"),
    ],
)
def test_stashes_needed_last_are_offloaded(room, how, expected):
    assert offloaded(WARM_UP, room, **how) == f"{expected} W0 W1 W2 W3 W4"


def test_a_spare_place_overlaps_a_copy_with_ops():
    row = "F0 F1 F2 F3 BW0 BW1 BW2 BW3"
    assert offloaded(row, room=2) == "F0 F1 >1 ~1 F2 >2 ~2 F3 BW0 <1 BW1 <2 BW2 BW3"
    assert offloaded(row, room=2, spare=1) == (
        "F0 >0 F1 >1 ~0 F2 >2 <0:1 ~2 F3 >3 <1:3 BW0 <2 BW1 <3 BW2 BW3"
    )


def test_a_stash_returns_ahead_of_its_b():
    row = "F0 F1 F2 B0 W0 B1 W1 B2 W2"
    assert offloaded(row, room=2, ahead=0) == "F0 F1 >1 ~1 F2 B0 W0 <1 B1 W1 B2 W2"
    assert offloaded(row, room=2, ahead=1) == "F0 F1 >1 ~1 F2 B0 <1 W0 B1 W1 B2 W2"
    assert offloaded(row, room=2, ahead=9) == "F0 F1 >1 ~1 F2 B0 <1 W0 B1 W1 B2 W2"


def test_weight_stashes_stay_on_the_device():
    row = "F0 F1 F2 B0 B1 W0 B2 W1 W2"
    assert offloaded(row, room=2, backward=1) == "F0 F1 >1 ~1 F2 >2 <1:2 B0 B1 W0 <2 B2 W1 W2"


def test_a_group_of_w_frees_all_its_weight_stashes():
    row = "F0 F1 F2 B0 B1 W0-1 B2 W2"
    assert offloaded(row, room=3, backward=1) == row
    assert offloaded(row, room=2, backward=1) == "F0 F1 >1 ~1 F2 >2 <1:2 B0 B1 W0-1 <2 B2 W2"


def test_each_of_two_chunks_takes_half_a_place():
    row = "F0 1.F0 F1 1.F1 1.BW0 BW0 1.BW1 BW1"
    assert offloaded(row, room=1) == ("F0 >0 1.F0 ~0 F1 >1 ~1 1.F1 1.BW0 <0 BW0 <1 1.BW1 BW1")


def test_too_little_room_is_refused_with_the_need():
    program = program_of("F0 F1 B0 B1 W0 W1")
    with pytest.raises(UserError, match=r"^offload: stage 0: got room for 1, expected at least 2,"):
        offload(program, StageMemory(1, 1, 1))
    with pytest.raises(UserError, match=r"got room for 49, expected at least 50,"):
        offload(program, StageMemory(30, 20, 49))


def test_given_stashes_are_offloaded_in_any_case():
    program = program_of("F0 F1 B0 W0 B1 W1")
    (longest,) = waiting_longest(program, 1)
    assert picture(offload_these(program, {longest})) == "F0 F1 >1 B0 <1 W0 B1 W1"


def test_a_fetch_follows_the_op_that_frees_its_place():
    program = offload(program_of("F0 F1 F2 BW0 BW1 BW2"), StageMemory(1, 0, 2))
    steps = list(program.instructions)
    at = steps.index(Fetch(STASH_1))
    assert steps[at - 1] == Run(Op(OpKind.BW, 0))
    assert last_uses(program)[at - 1] == [Buffer(BufferKind.STASH, 0)]
    at = steps.index(Offload(STASH_1))
    assert steps[at - 1] == Run(Op(OpKind.F, 1))


def without(program: RankInstructions, *kinds) -> RankInstructions:
    kept = tuple(step for step in program.instructions if not isinstance(step, kinds))
    return replace(program, instructions=kept)


def test_a_b_without_its_stash_is_refused():
    placed = offload(program_of("F0 F1 F2 BW0 BW1 BW2"), StageMemory(1, 0, 2))
    with pytest.raises(ProgramError, match=r"run BW1 while stash\[1\] is in host memory"):
        check([without(placed, Fetch)])
    with pytest.raises(ProgramError, match=r"fetch stash\[1\] while stash\[1\] is on the device"):
        check([without(placed, Offload, AwaitRoom)])
    with pytest.raises(ProgramError, match=r"await room .* before stash\[1\] is offloaded"):
        check([without(placed, Offload, Fetch)])
    with pytest.raises(ProgramError, match=r"rank 0: it never fetches stash\[1\]"):
        check([replace(placed, instructions=(*placed.instructions, Offload(STASH_1)))])


def test_a_program_that_relies_on_fast_copies_is_refused():
    memory = StageMemory(1, 0, 2)
    placed = offload(program_of("F0 F1 F2 BW0 BW1 BW2"), memory)
    assert max(most_held(placed, memory)) == 2
    hasty = without(placed, AwaitRoom)
    check([hasty])  # without a limit of memory it is valid
    with pytest.raises(ProgramError, match=r"rank 0: run F2 may make its device hold 3, .* 2$"):
        check([hasty], [memory])


@st.composite
def rows(draw, most=5, splits=True):
    """Any order of one stage's ops, each kind in microbatch order."""
    kinds = ("F", "B", "W") if splits and draw(st.booleans()) else ("F", "BW")
    counts = dict.fromkeys(kinds, 0)
    number, row = draw(st.integers(1, most)), []
    while counts[kinds[-1]] < number:
        free = [
            kind
            for before, kind in zip((None, *kinds), kinds, strict=False)
            if counts[kind] < (number if before is None else counts[before])
        ]
        kind = draw(st.sampled_from(free))
        row.append(f"{kind}{counts[kind]}")
        counts[kind] += 1
    return " ".join(row)


def fits_with(ops: list[Op], memory: StageMemory, away: tuple[int, ...]) -> bool:
    """Whether there is room at every op with some stashes away whenever they can be."""
    at = {op: i for i, op in enumerate(ops)}
    uses = {
        op.microbatch: (at[Op(OpKind.F, op.microbatch)], i)
        for op, i in at.items()
        if op.kind in (OpKind.B, OpKind.BW)
    }
    ends = {op.microbatch: i for op, i in at.items() if op.kind is OpKind.W}
    for i in range(len(ops)):
        held = sum(
            memory.after_forward
            for m, (made, used) in uses.items()
            if i in (made, used) or (made < i < used and m not in away)
        )
        held += sum(memory.after_backward for m, (_, b) in uses.items() if b < i <= ends.get(m, b))
        if ops[i].kind is OpKind.B:
            held += memory.needed - memory.after_forward
        if held > memory.room:
            return False
    return True


def fewest_by_brute_force(ops: list[Op], memory: StageMemory) -> int | None:
    microbatches = range(1 + max(op.microbatch for op in ops))
    for count in range(len(microbatches) + 1):
        if any(fits_with(ops, memory, a) for a in itertools.combinations(microbatches, count)):
            return count
    return None


@given(rows(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_offload_moves_the_fewest_stashes(row, room, forward, backward, early):
    program = program_of(row)
    memory = StageMemory(forward, backward, room * max(forward, backward))
    fewest = fewest_by_brute_force(list(program.ops()), memory)
    if fewest is None:
        with pytest.raises(UserError, match="got room for"):
            offload(program, memory)
        return
    placed = offload(program, memory, ahead=2, early=early)
    check([placed], [memory])
    assert count_offloads([placed]) == fewest
    assert list(placed.ops()) == list(program.ops())


@given(
    st.sampled_from([*FIXED_SCHEDULES, "adaptive"]),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 5),
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()),
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 30)),
)
def test_no_device_overflows_however_slow_copies_are(name, stages, n, room, how, times):
    out_ms, in_ms, link_ms = map(float, times)
    costs, links = StageCosts.uniform(stages, 10, 9, 6), chain_links([link_ms] * (stages - 1))
    schedule = plan(costs, links, Limits(), n, name).schedule
    programs = lower(schedule, simulate(schedule, costs, links))
    memory = [StageMemory(1, 0, room)] * stages
    spare, ahead, early = how
    placed = [
        offload(program, own, spare=spare, ahead=ahead, early=early)
        for program, own in zip(programs, memory, strict=True)
    ]
    check(placed, memory)
    copies = CopyCosts((out_ms,) * stages, (in_ms,) * stages)
    timeline = simulate_blocking(placed, costs, links, copies=copies)
    assert max(peak_on_device(timeline)) <= room
    assert timeline.peak_live() == schedule.peak_live()
    starts = {(s.stage, s.op.microbatch): s.start_ms for s in timeline.spans() if "B" in s.op.kind}
    fetched = [copy for copy in timeline.copies if copy.kind == "fetch"]
    assert len(fetched) == count_offloads(placed)
    assert all(copy.end_ms <= starts[copy.stage, copy.microbatch] for copy in fetched)
    assert timeline.makespan_ms >= simulate_blocking(programs, costs, links).makespan_ms
