"""Which ranks of a step may choose their order while it runs, and by which plan."""

from collections.abc import Sequence
from dataclasses import replace

from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.units import units_of
from jaxmorph.schedule.memory import StageMemory
from jaxmorph.schedule.online import Leeway, Preference
from jaxmorph.schedule.timeline import Timeline

TOLERATED = 0.4
"""The part of a rank's longest op by which one may be behind its time.

What runs in place of a late op makes it later by more than that, if it comes at once after all. It
is also beyond what hosts add to a message on its way, a few milliseconds on busy processors. On
paper half an op gave the median gaps of a tenth (`benchmarks.intra_step_gap --seeds 6`: all delays
of the 7B model, A and B of the 14B one).
"""


def with_leeway(
    programs: Sequence[RankProgram],
    expected: Timeline,
    memory: Sequence[StageMemory],
    tolerated: float = TOLERATED,
) -> tuple[RankProgram, ...]:
    """The same programs, with the leeway that their ranks have.

    Args:
        programs: One program per rank, in rank order.
        expected: When their ops run if no message is slower than it should be.
        memory: What each rank's microbatches hold, and how much fits.
        tolerated: The part of a rank's longest op that doesn't count as late.

    Returns:
        A rank with a delegated link gets leeway, others none: what a direct transfer waits for its
        host can't know.
    """
    return tuple(
        replace(program, leeway=_leeway(program, expected, memory[program.rank], tolerated))
        for program in programs
    )


def _leeway(
    program: RankProgram, expected: Timeline, memory: StageMemory, tolerated: float
) -> Leeway | None:
    units = units_of(program)
    if not units.movable or not any(unit.receives for unit in units.planned):
        return None
    start_ms, end_ms = expected.start_ms[program.rank], expected.end_ms[program.rank]
    room = max(memory.room, memory.peak(expected.orders[program.rank]))  # the plan itself must run
    memory = memory._replace(room=room)
    tolerance_ms = tolerated * float((end_ms - start_ms).max(initial=0.0))
    preference = Preference.within(memory, program.num_microbatches)
    times_ms = tuple(start_ms.tolist()), tuple(end_ms.tolist())
    return Leeway(*times_ms, memory, tolerance_ms, preference)
