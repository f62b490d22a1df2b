"""The forwards of a step alone, in the order of the step: what evaluating a loss runs."""

from dataclasses import replace

from jaxmorph.program.instructions import (
    Instruction,
    Payload,
    RankProgram,
    Receive,
    Run,
    Send,
)
from jaxmorph.program.lowering import insert_frees
from jaxmorph.schedule.ops import OpKind


def forward_only(program: RankProgram, first_microbatch: int = 0) -> RankProgram:
    """A rank's program with nothing but its forwards and their transfers.

    What is left on all ranks stands in the order that the whole step had, so it runs to completion
    as that does. Nothing reads a stash, which is therefore freed as soon as its forward has run.

    Args:
        first_microbatch: The number of its first microbatch, where those of the step itself, whose
            messages have these names, are to be told apart.

    Returns:
        The forwards' program, on the same routes.
    """
    kept = tuple(
        _renumbered(step, first_microbatch)
        for step in program.instructions
        if _belongs_to_a_forward(step)
    )
    return insert_frees(replace(program, instructions=kept))


def _belongs_to_a_forward(step: Instruction) -> bool:
    match step:
        case Run(op):
            return op.kind is OpKind.F
        case Send(transfer) | Receive(transfer):
            return transfer.payload is Payload.ACTIVATION
        case _:
            return False


def _renumbered(step: Instruction, by: int) -> Instruction:
    match step:
        case Run(op):
            return Run(op._replace(microbatch=op.microbatch + by))
        case Send(transfer) | Receive(transfer):
            return replace(step, transfer=transfer._replace(microbatch=transfer.microbatch + by))
        case _:
            return step
