"""Pairs: an activation and a gradient of one link that go in one program, side by side.

On a slow link one message each way then costs its delay once; one after the other, twice.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jaxmorph.program.dataflow import received_buffer, uses
from jaxmorph.program.instructions import (
    Buffer,
    Instruction,
    Payload,
    RankInstructions,
    Receive,
    Run,
    Send,
    SendReceive,
    Transfer,
)
from jaxmorph.records import Link
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.schedule import Schedule


def goes_in_pairs(schedule: Schedule) -> bool:
    """Whether a schedule's transfers always go in pairs: if its backwards are whole ops.

    These are 1F1B, its eager form and interleaving, whose authors exchange messages in pairs, and
    GPipe, which has few pairs.
    """
    return any(op.kind is OpKind.BW for order in schedule.orders for op in order)


def join_pairs(programs: Sequence[RankInstructions]) -> list[RankInstructions]:
    """Joins an activation and a gradient that follow each other on a direct link to a pair.

    The first transfer then runs with the second. They stay apart if an op needs the first before
    that. An op after the second in its queue loses nothing by the wait, and one rendezvous is
    saved. So where a link delays both directions alike, pairs never make a step longer.
    """
    ends = [*map(_direct_ends, programs)]
    before: dict[Link, Transfer] = {}  # by link: the transfer that the next one may be joined with
    taken: dict[Transfer, Transfer] = {}
    for rank, own in enumerate(ends):
        for transfer in own:
            if rank != transfer.link.lower:
                continue  # both ends have the same transfers in the same order
            first = before.pop(transfer.link, None)
            if first is not None and _may_join(first, transfer, ends[first.destination]):
                taken[transfer] = first
            else:
                before[transfer.link] = transfer
    gone = set(taken.values())
    return [_with_pairs(program, taken, gone) for program in programs]


def _direct_ends(program: RankInstructions) -> dict[Transfer, tuple[int, float]]:
    """The positions of a rank's direct transfers of ops' results, and of the ops that need them.

    The op's position has a meaning only for a transfer that the rank receives.
    """
    read_at: dict[Buffer, int] = {}
    found: dict[Transfer, int] = {}
    for at, (step, (read, _)) in enumerate(zip(program.instructions, uses(program), strict=True)):
        if isinstance(step, Run):
            read_at |= dict.fromkeys(read, at)
        elif isinstance(step, Send | Receive) and _may_be_paired(step):
            found[step.transfer] = at
    return {
        transfer: (at, read_at.get(received_buffer(transfer, program.placement), math.inf))
        for transfer, at in found.items()
    }


def _may_be_paired(step: Send | Receive) -> bool:
    return step.route == "direct" and step.transfer.payload is not Payload.TIED


def _may_join(
    first: Transfer, second: Transfer, at_receiver: Mapping[Transfer, tuple[int, float]]
) -> bool:
    """Whether a link's transfer can wait for the next one, by what the receiver of the first runs.

    They must go in opposite directions, one an activation and one a gradient.
    """
    goes_back = first.source == second.destination and first.payload is not second.payload
    return goes_back and at_receiver[first][1] > at_receiver[second][0]


def _with_pairs(
    program: RankInstructions, taken: Mapping[Transfer, Transfer], gone: Collection[Transfer]
) -> RankInstructions:
    steps: list[Instruction] = []
    for step in program.instructions:
        if not isinstance(step, Send | Receive):
            steps.append(step)
        elif (first := taken.get(step.transfer)) is not None:
            second, is_sent = step.transfer, isinstance(step, Send)
            steps.append(SendReceive(second, first) if is_sent else SendReceive(first, second))
        elif step.transfer not in gone:
            steps.append(step)
    return replace(program, instructions=tuple(steps))
