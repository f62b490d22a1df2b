"""A pass that moves some of a rank's stashes to host memory and back.

Every use of a stash is known beforehand. So the pass offloads the stash that is needed farthest in
the future (Belady's optimal caching), and only if there is no room otherwise.

A stash counts as held until an instruction waits for its offload or for a later one (a rank's
offloads end in program order). So a program that fits here also fits however slow copies are.
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
    Instruction,
    Offload,
    RankInstructions,
    Run,
)
from jaxmorph.schedule.costs import StageMemory
from jaxmorph.schedule.ops import Op, OpKind


def offload(
    program: RankInstructions,
    memory: StageMemory,
    *,
    spare: int = 0,
    ahead: int = 1,
    early: bool = False,
) -> RankInstructions:
    """The instructions with the fewest offloads that fit the device; unchanged if they already fit.

    An offload starts right after its F, so that the copy has the most time. The stash comes back
    as soon as there is room, at most ``ahead`` ops before its B. An instruction that needs
    the place of a leaving stash waits for its offload: see `await_room`.

    Args:
        program: A rank's instructions, without offloads.
        memory: In microbatches or bytes; each of V chunks holds 1/V.
        spare: Places kept free for stashes that are being copied: fewer waits, more offloads.
        early: Whether to prefer the stashes made first, among equally good choices. Places are then
            free earlier, and stashes come back earlier.

    Raises:
        UserError: The room is too small even with all other stashes in host memory.
    """
    memory = memory._replace(room=memory.room * program.num_chunks)  # in stashes of one chunk
    ops = tuple(program.ops())
    if memory.peak(ops) <= memory.room:
        return program
    chosen = _farthest(program, ops, memory, spare)
    if early:
        chosen = _made_first(ops, chosen, memory, spare)
    return _with_copies(program, ops, chosen, memory, ahead)


def offload_these(
    program: RankInstructions, stashes: Collection[Buffer], *, ahead: int = 1
) -> RankInstructions:
    """The instructions with the given stashes offloaded, whether they would fit or not."""
    ops = tuple(program.ops())
    return _with_copies(program, ops, stashes, StageMemory(1, 0, len(ops)), ahead)


def count_offloads(programs: Collection[RankInstructions]) -> int:
    """How many stashes all ranks' instructions offload together."""
    return sum(isinstance(step, Offload) for program in programs for step in program.instructions)


def waiting_longest(program: RankInstructions, count: int) -> tuple[Buffer, ...]:
    """The stashes of a rank with the most ops between their F and their B."""
    uses = _uses(tuple(program.ops()))
    return tuple(sorted(uses, key=lambda stash: uses[stash].made - uses[stash].used)[:count])


class _Use(NamedTuple):
    """The positions, among a rank's ops, of a stash's F and of its B or BW."""

    made: int
    used: int


def _uses(ops: Sequence[Op]) -> dict[Buffer, _Use]:
    """When each stash is needed on the device, in the order of the B's."""
    made = {_stash(op): at for at, op in enumerate(ops) if op.kind is OpKind.F}
    used = {_stash(op): at for at, op in enumerate(ops) if op.kind in (OpKind.B, OpKind.BW)}
    return {stash: _Use(made[stash], at) for stash, at in used.items()}


def _stash(op: Op) -> Buffer:
    return Buffer(BufferKind.STASH, op.microbatch, op.chunk)


def _farthest(
    program: RankInstructions, ops: Sequence[Op], memory: StageMemory, spare: int
) -> set[Buffer]:
    """The fewest stashes whose offload makes room for the others at every op."""
    uses = _uses(ops)
    present: dict[Buffer, int] = {}
    chosen: set[Buffer] = set()
    for op, needed in zip(ops, _held_besides(ops, memory), strict=True):
        stash = _stash(op)
        present.pop(stash, None)  # it is counted with its op
        if needed > memory.room:
            raise _no_room(program, memory, max(_held_besides(ops, memory)))
        room = max(0, memory.room - needed - spare * memory.after_forward)
        while len(present) * memory.after_forward > room:
            farthest = max(present, key=lambda other: present[other])
            del present[farthest]
            chosen.add(farthest)
        if op.kind is OpKind.F:
            present[stash] = uses[stash].used
    return chosen


def _made_first(
    ops: Sequence[Op], chosen: Collection[Buffer], memory: StageMemory, spare: int
) -> set[Buffer]:
    """The chosen stashes, each replaced by the one made first that leaves room at every op."""
    uses, held = _uses(ops), _held_at(ops, chosen, memory)
    room = memory.room - (1 + spare) * memory.after_forward
    replaced = set(chosen)
    for stash in sorted(chosen, key=lambda one: uses[one].made):
        made, used = uses[stash]
        full = (at for at in range(used - 1, made, -1) if held[at] > room)
        since = next(full, made) + 1  # from here on it fits
        first = next(
            other
            for other, use in uses.items()
            if other == stash or (other not in replaced and since <= use.used < used)
        )
        replaced ^= {stash, first} if first != stash else set()
        held.subtract(_between(uses[first], memory))
        held.update(_between(uses[stash], memory))
    return replaced


def _between(use: _Use, memory: StageMemory) -> Counter[int]:
    """What a stash holds at each op between its F and its B."""
    return Counter(dict.fromkeys(range(use.made + 1, use.used), memory.after_forward))


def _held_besides(ops: Sequence[Op], memory: StageMemory) -> Iterator[int]:
    """What each op needs besides other microbatches' stashes: its own, and what waits for a W."""
    weights = 0
    for op in ops:
        match op.kind:
            case OpKind.F | OpKind.BW:
                yield weights + memory.after_forward
            case OpKind.B:
                yield weights + memory.needed
                weights += memory.after_backward
            case OpKind.W:
                yield weights
                weights -= op.group * memory.after_backward


def _no_room(program: RankInstructions, memory: StageMemory, least: int) -> UserError:
    chunks = program.num_chunks
    return UserError(
        f"offload: stage {program.rank}: got room for {memory.room // chunks:,}, expected at least "
        f"{-(-least // chunks):,}, which the order of its ops needs with every other stash in host "
        "memory"
    )


def _with_copies(
    program: RankInstructions,
    ops: Sequence[Op],
    chosen: Collection[Buffer],
    memory: StageMemory,
    ahead: int,
) -> RankInstructions:
    fetched_before = _fetches(ops, chosen, memory, ahead)
    instructions: list[Instruction] = []
    at = -1  # the position of the last op
    for step in program.instructions:
        instructions.append(step)
        if isinstance(step, Run):
            at += 1
            if step.op.kind is OpKind.F and _stash(step.op) in chosen:
                instructions.append(Offload(_stash(step.op)))
            instructions += [Fetch(stash) for stash in fetched_before.get(at + 1, ())]
    return await_room(replace(program, instructions=tuple(instructions)), memory)


def _fetches(
    ops: Sequence[Op], chosen: Collection[Buffer], memory: StageMemory, ahead: int
) -> dict[int, list[Buffer]]:
    """The stashes that begin to come back before each op, by its position."""
    held = _held_at(ops, chosen, memory)
    starts: dict[int, list[Buffer]] = {}
    for stash, use in _uses(ops).items():
        if stash not in chosen:
            continue
        start = use.used
        earliest = max(use.made + 1, use.used - ahead)
        while start > earliest and held[start - 1] + memory.after_forward <= memory.room:
            start -= 1
            held[start] += memory.after_forward
        starts.setdefault(start, []).append(stash)
    return starts


def _held_at(ops: Sequence[Op], chosen: Collection[Buffer], memory: StageMemory) -> Counter[int]:
    """What is held while each op runs, with chosen stashes there for their own ops alone."""
    held = Counter(dict(enumerate(_held_besides(ops, memory))))
    for stash, use in _uses(ops).items():
        if stash not in chosen:
            held.update(_between(use, memory))
    return held


def await_room(program: RankInstructions, memory: StageMemory) -> RankInstructions:
    """Adds the fewest waits with which instructions fit the device, however slow its copies are.

    Without waits, the program must fit if copies take no time.
    """
    return replace(program, instructions=tuple(_awaiting(program, _Device(memory))))


@dataclass
class _Device:
    """What a rank's device holds, instruction by instruction."""

    memory: StageMemory
    held: int = 0
    leaving: deque[Buffer] = field(default_factory=deque)

    @property
    def most(self) -> int:
        """What is held if no leaving stash has left yet."""
        return self.held + len(self.leaving) * self.memory.after_forward

    def remove(self, stash: Buffer) -> None:
        """Records that a stash and all offloaded before it have left the device."""
        while stash in self.leaving:
            self.leaving.popleft()

    def last_to_leave(self, growth: int) -> Buffer | None:
        """The last stash that must leave to make room for ``growth`` more, if any."""
        last = None
        for stash in self.leaving:
            if self.most + growth <= self.memory.room:
                break
            growth -= self.memory.after_forward
            last = stash
        return last

    def needs(self, step: Instruction) -> int:
        """What an instruction needs while it runs, beyond what is held before it."""
        match step:
            case Fetch() | Run(Op(OpKind.F)):
                return self.memory.after_forward
            case Run(Op(OpKind.B)):
                return self.memory.needed - self.memory.after_forward
            case _:
                return 0

    def step(self, step: Instruction) -> None:
        """Applies an instruction."""
        forward, backward = self.memory.after_forward, self.memory.after_backward
        match step:
            case Run(op):
                gains = {OpKind.F: forward, OpKind.B: backward - forward, OpKind.W: -backward}
                self.held += op.group * gains.get(op.kind, -forward)
            case Offload(buffer):
                self.held -= forward
                self.leaving.append(buffer)
            case Fetch(buffer, after):
                self.remove(buffer)
                if after is not None:
                    self.remove(after)
                self.held += forward
            case AwaitRoom(buffer):
                self.remove(buffer)
            case _:
                pass


def _awaiting(program: RankInstructions, device: _Device) -> Iterator[Instruction]:
    for step in program.instructions:
        if isinstance(step, Fetch):
            device.remove(step.buffer)  # it can't come back before it has left
        last = device.last_to_leave(device.needs(step))
        if last is not None and isinstance(step, Fetch):
            step = replace(step, after=last)
        elif last is not None:
            yield AwaitRoom(last)
            device.remove(last)
        device.step(step)
        yield step


def most_held(program: RankInstructions, memory: StageMemory) -> Iterator[int]:
    """What the device may hold while each instruction runs, however slow copies are."""
    device = _Device(memory)
    for step in program.instructions:
        if isinstance(step, Fetch):
            device.remove(step.buffer)
            device.remove(step.after or step.buffer)
        needs = device.needs(step)
        during = device.most + needs
        device.step(step)
        yield max(during, device.most)
