"""Which stashes a rank keeps in host memory, from when to when: a pass, a program in, one out.

Every use of a stash is known beforehand, so what goes out is, as in Belady's optimal caching, what
is needed farthest in the future, and nothing goes before there is no room otherwise.

A stash on its way out counts as held until something waits for its offload, or for a later one:
those of a rank are over in the order of its program. So a program that keeps its room here keeps it
whatever anything takes.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxmorph.errors import UserError
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Free,
    Instruction,
    Offload,
    RankProgram,
    Run,
)
from jaxmorph.schedule.costs import StageMemory
from jaxmorph.schedule.ops import Op, OpKind


def offload(
    program: RankProgram,
    memory: StageMemory,
    *,
    spare: int = 0,
    ahead: int = 1,
    early: bool = False,
) -> RankProgram:
    """The same program, never with more on the device than fits, by the fewest offloads.

    A stash goes out right after its F, so that its copy has the longest time, and comes back before
    its B as soon as there is room, but at most ``ahead`` ops before. What needs the place of one on
    its way out waits for that: see `await_room`.

    Args:
        program: A rank's instructions, without offloads.
        memory: What a microbatch holds, in microbatches or bytes, and what there is room for; of V
            chunks each holds 1/V of it. A stash stays until B, what B leaves until W.
        spare: Places that are kept free for stashes on their way, so that others wait less, for
            more offloads.
        ahead: How many ops before its B a stash begins to come back, at most.
        early: Whether, of as many stashes that do as well, those go that were made first: then
            places are free earlier, and stashes needed back earlier.

    Returns:
        The program; the same one if all fits as it is.

    Raises:
        UserError: If the room doesn't do with every stash in host memory that can be there.
    """
    memory = _of_chunks(memory, program.num_chunks)
    ops = tuple(program.ops())
    if memory.peak(ops) <= memory.room:
        return program
    chosen = _farthest(program, ops, memory, spare)
    if early:
        chosen = _made_first(ops, chosen, memory, spare)
    return _with_copies(program, ops, chosen, memory, ahead)


def offload_these(
    program: RankProgram, stashes: Collection[Buffer], *, ahead: int = 1
) -> RankProgram:
    """The same program with some stashes offloaded, whether there is room for them or not."""
    ops = tuple(program.ops())
    return _with_copies(program, ops, stashes, StageMemory(1, 0, len(ops)), ahead)


def count_offloads(programs: Collection[RankProgram]) -> int:
    """How many stashes some programs offload, all together."""
    return sum(isinstance(step, Offload) for program in programs for step in program.instructions)


def waiting_longest(program: RankProgram, count: int) -> tuple[Buffer, ...]:
    """The stashes of a rank that wait for their B for most ops."""
    lives = _lives(tuple(program.ops()))
    return tuple(sorted(lives, key=lambda stash: lives[stash].made - lives[stash].used)[:count])


class _Life(NamedTuple):
    """The positions, among a rank's ops, of a stash's F and of its B or BW."""

    made: int
    used: int


def _of_chunks(memory: StageMemory, num_chunks: int) -> StageMemory:
    """The memory of a rank as its chunks' stashes fill it, in units of a V-th microbatch."""
    return memory._replace(room=memory.room * num_chunks)


def _lives(ops: Sequence[Op]) -> dict[Buffer, _Life]:
    """When each stash is needed on the device, in the order of the B's."""
    made = {_stash(op): at for at, op in enumerate(ops) if op.kind is OpKind.F}
    used = {_stash(op): at for at, op in enumerate(ops) if op.kind in (OpKind.B, OpKind.BW)}
    return {stash: _Life(made[stash], at) for stash, at in used.items()}


def _stash(op: Op) -> Buffer:
    return Buffer(BufferKind.STASH, op.microbatch, op.chunk)


def _farthest(
    program: RankProgram, ops: Sequence[Op], memory: StageMemory, spare: int
) -> set[Buffer]:
    """The fewest stashes without which the others, between their ops, have room at every op."""
    lives = _lives(ops)
    present: dict[Buffer, int] = {}
    chosen: set[Buffer] = set()
    for op, needed in zip(ops, _held_besides(ops, memory), strict=True):
        stash = _stash(op)
        present.pop(stash, None)  # it is counted with its op
        if needed > memory.room:
            raise _no_room(program, memory, max(_held_besides(ops, memory)))
        room = max(0, memory.room - needed - spare * memory.forward_holds)
        while len(present) * memory.forward_holds > room:
            farthest = max(present, key=lambda other: present[other])
            del present[farthest]
            chosen.add(farthest)
        if op.kind is OpKind.F:
            present[stash] = lives[stash].used
    return chosen


def _made_first(
    ops: Sequence[Op], chosen: Collection[Buffer], memory: StageMemory, spare: int
) -> set[Buffer]:
    """As many stashes, each replaced by the first made that leaves room at every op."""
    lives, held = _lives(ops), _held_at(ops, chosen, memory)
    room = memory.room - (1 + spare) * memory.forward_holds
    replaced = set(chosen)
    for stash in sorted(chosen, key=lambda one: lives[one].made):
        life = lives[stash]
        full = (at for at in range(life.used - 1, life.made, -1) if held[at] > room)
        since = next(full, life.made) + 1  # it can stay from then on
        first = next(
            other
            for other, of_other in lives.items()
            if other == stash or (other not in replaced and since <= of_other.used < life.used)
        )
        replaced ^= {stash, first} if first != stash else set()
        held.subtract(_between(lives[first], memory))
        held.update(_between(life, memory))
    return replaced


def _between(life: _Life, memory: StageMemory) -> Counter[int]:
    """What a stash holds at each op between its own two."""
    return Counter(dict.fromkeys(range(life.made + 1, life.used), memory.forward_holds))


def _held_besides(ops: Sequence[Op], memory: StageMemory) -> Iterator[int]:
    """What each op needs beside other microbatches' stashes: its own, and what waits for a W."""
    weights = 0
    for op in ops:
        match op.kind:
            case OpKind.F | OpKind.BW:
                yield weights + memory.forward_holds
            case OpKind.B:
                yield weights + memory.needed
                weights += memory.backward_holds
            case OpKind.W:
                yield weights
                weights -= memory.backward_holds


def _no_room(program: RankProgram, memory: StageMemory, least: int) -> UserError:
    chunks = program.num_chunks
    return UserError(
        f"offload: stage {program.rank}: got room for {memory.room // chunks:,}, expected at least "
        f"{-(-least // chunks):,}, which the order of its ops needs with every other stash in host "
        "memory"
    )


def _with_copies(
    program: RankProgram,
    ops: Sequence[Op],
    chosen: Collection[Buffer],
    memory: StageMemory,
    ahead: int,
) -> RankProgram:
    """The program with copies of the chosen stashes, and what waits for room."""
    fetched_before = _fetches(ops, chosen, memory, ahead)
    instructions: list[Instruction] = []
    at = -1  # among the ops: the last one that has run
    fetches: list[Fetch] = []
    for step in program.instructions:
        if not isinstance(step, Free):
            instructions += fetches
            fetches = []
        instructions.append(step)
        if isinstance(step, Run):
            at += 1
            if step.op.kind is OpKind.F and _stash(step.op) in chosen:
                instructions.append(Offload(_stash(step.op)))
            fetches = [Fetch(stash) for stash in fetched_before.get(at + 1, ())]
    return await_room(replace(program, instructions=tuple(instructions)), memory)


def _fetches(
    ops: Sequence[Op], chosen: Collection[Buffer], memory: StageMemory, ahead: int
) -> dict[int, list[Buffer]]:
    """The stashes that begin to come back before each op, by its position.

    What is needed first takes the room first.
    """
    held = _held_at(ops, chosen, memory)
    starts: dict[int, list[Buffer]] = {}
    for stash, life in _lives(ops).items():
        if stash not in chosen:
            continue
        start = life.used
        earliest = max(life.made + 1, life.used - ahead)
        while start > earliest and held[start - 1] + memory.forward_holds <= memory.room:
            start -= 1
            held[start] += memory.forward_holds
        starts.setdefault(start, []).append(stash)
    return starts


def _held_at(ops: Sequence[Op], chosen: Collection[Buffer], memory: StageMemory) -> Counter[int]:
    """What is held while each op runs, the chosen stashes there for their own ops alone."""
    held = Counter(dict(enumerate(_held_besides(ops, memory))))
    for stash, life in _lives(ops).items():
        if stash not in chosen:
            held.update(_between(life, memory))
    return held


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

    A step makes no stash twice; the memory's room doesn't matter.
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
