"""A rank's instructions grouped into units, of which a step may take another one than the planned.

A unit is an op with the delegated messages that it waits for in front and, behind it, what it sends
and frees. What belongs to no op keeps its place: direct transfers, which both ends must reach in
the same order, and whatever ends the step.
"""

from dataclasses import dataclass, field

from jaxmorph.program.instructions import (
    Free,
    Instruction,
    Payload,
    RankProgram,
    Receive,
    Run,
    Send,
)
from jaxmorph.schedule.ops import Op, OpKind


@dataclass
class Unit:
    """Instructions that run together.

    Attributes:
        op: The op they run; None for what keeps its place between ops.
        receives: The delegated messages to have before the rest.
        steps: The rest, in order: the op, what it sends, what it frees.
    """

    op: Op | None
    receives: list[Receive]
    steps: list[Instruction] = field(default_factory=list)

    @property
    def sends(self) -> list[Send]:
        """The delegated messages that need a slot."""
        return [step for step in self.steps if isinstance(step, Send) and _is_of_op(step)]

    @property
    def instructions(self) -> list[Instruction]:
        """All of it, in order."""
        return [*self.receives, *self.steps]


@dataclass(frozen=True)
class Units:
    """A rank's program as units.

    Attributes:
        planned: Those up to the last op's, in the program's order.
        ending: What follows them: tied gradients and the update.
        movable: The kinds of op whose units may run out of the planned order.
    """

    planned: tuple[Unit, ...]
    ending: tuple[Instruction, ...]
    movable: frozenset[OpKind]


def units_of(program: RankProgram) -> Units:
    """The units of a program.

    Args:
        program: As `lowering.lower` makes it: a delegated receive stands right before the op that
            reads it, a delegated send behind the op that made it, and a buffer is freed after its
            last reader.

    Returns:
        The units, which together are the program. Ops of all kinds are movable where nothing
        between the first op and the last keeps its place. Where something does, W alone is: it
        needs nothing of other ranks and gives them nothing. With several chunks none is.
    """
    units, left = _grouped(program.instructions)
    count = max((at + 1 for at, unit in enumerate(units) if unit.op is not None), default=0)
    planned, after = tuple(units[:count]), units[count:]
    ending = [step for unit in after for step in unit.instructions]
    return Units(planned, (*ending, *left), _movable(planned, program.num_chunks))


def _grouped(steps: tuple[Instruction, ...]) -> tuple[list[Unit], list[Receive]]:
    """Units in the order of their first instructions, and receives that nothing follows."""
    units: list[Unit] = []
    receives: list[Receive] = []
    for step in steps:
        if isinstance(step, Receive) and _is_of_op(step):
            receives.append(step)
            continue
        if _belongs_to_unit_before(step) and units and not receives:
            units[-1].steps.append(step)
            continue
        op = step.op if isinstance(step, Run) else None
        units.append(Unit(op, receives, [step]))
        receives = []
    return units, receives


def _belongs_to_unit_before(step: Instruction) -> bool:
    return isinstance(step, Free) or (isinstance(step, Send) and _is_of_op(step))


def _is_of_op(step: Send | Receive) -> bool:
    """Whether it is delegated, and one op's: a tied gradient needs all of a rank's ops."""
    return step.route == "delegated" and step.transfer.payload is not Payload.TIED


def _movable(planned: tuple[Unit, ...], num_chunks: int) -> frozenset[OpKind]:
    if num_chunks > 1:
        return frozenset()
    if any(unit.op is None for unit in planned):
        return frozenset({OpKind.W})
    return frozenset(OpKind)
