"""What a rank's program holds on its device at most, however long its copies take.

A stash on its way out counts as held until something waits for its offload, or for a later one:
those of a rank are over in the order of its program. So a program that keeps its room here keeps it
whatever anything takes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    Fetch,
    Instruction,
    Offload,
    RankProgram,
    Run,
)
from jaxmorph.schedule.memory import StageMemory
from jaxmorph.schedule.ops import OpKind


@dataclass
class _Device:
    """What is on a rank's device, step by step."""

    memory: StageMemory
    held: int = 0
    leaving: deque[Buffer] = field(default_factory=deque)

    @property
    def most(self) -> int:
        """What is held if nothing that is on its way out has left yet."""
        return self.held + len(self.leaving) * self.memory.forward_holds

    def over(self, stash: Buffer) -> None:
        """A stash has left, and with it those before it."""
        while stash in self.leaving:
            self.leaving.popleft()

    def last_to_leave(self, growth: int) -> Buffer | None:
        """The stash that must have left before there is room for something more."""
        last = None
        for stash in self.leaving:
            if self.most + growth <= self.memory.room:
                break
            growth -= self.memory.forward_holds
            last = stash
        return last

    def needs(self, step: Instruction) -> int:
        """What a step needs beyond what is held before it, while it runs."""
        match step:
            case Fetch() | Run((OpKind.F, _, _)):
                return self.memory.forward_holds
            case Run((OpKind.B, _, _)):
                return self.memory.needed - self.memory.forward_holds
            case _:
                return 0

    def step(self, step: Instruction) -> None:
        """Account for a step."""
        forward, backward = self.memory.forward_holds, self.memory.backward_holds
        match step:
            case Run(op):
                gains = {OpKind.F: forward, OpKind.B: backward - forward, OpKind.W: -backward}
                self.held += gains.get(op.kind, -forward)
            case Offload(buffer):
                self.held -= forward
                self.leaving.append(buffer)
            case Fetch(buffer, after):
                self.over(buffer)
                if after is not None:
                    self.over(after)
                self.held += forward
            case AwaitRoom(buffer):
                self.over(buffer)
            case _:
                pass


def await_room(program: RankProgram, memory: StageMemory) -> RankProgram:
    """The same program, in which whatever needs the place of a stash on its way out waits for it.

    Args:
        program: A rank's instructions that keep their room if offloads take no time.
        memory: What a microbatch of a chunk holds, and what there is room for.

    Returns:
        The program that keeps it whatever they take; nothing waits for more than it needs.
    """
    device = _Device(memory)
    return replace(program, instructions=tuple(_awaiting(program, device)))


def _awaiting(program: RankProgram, device: _Device) -> Iterator[Instruction]:
    for step in program.instructions:
        if isinstance(step, Fetch):
            device.over(step.buffer)  # it can't come back before it is there
        last = device.last_to_leave(device.needs(step))
        if last is not None and isinstance(step, Fetch):
            step = replace(step, after=last)
        elif last is not None:
            yield AwaitRoom(last)
            device.over(last)
        device.step(step)
        yield step


def most_held(program: RankProgram, memory: StageMemory) -> Iterator[int]:
    """What the device may hold while each instruction runs, whatever anything takes.

    Args:
        program: A rank's instructions, in which a step makes no stash twice.
        memory: What a microbatch of a chunk holds; the room doesn't matter.
    """
    device = _Device(memory)
    for step in program.instructions:
        if isinstance(step, Fetch):
            device.over(step.buffer)
            device.over(step.after or step.buffer)
        needs = device.needs(step)
        during = device.most + needs
        device.step(step)
        yield max(during, device.most)
