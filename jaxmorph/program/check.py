"""Proves by replay that ranks' instructions run to completion and use only data they have.

Ranks wait for each other only at transfers. So one replay runs the transfers of all ranks under
the rules of the real queues: in order; a direct transfer, or pair of them, only when both ends have
reached it; a delegated send at once, and its receive after the send and all earlier receives of its
channel. What a rank holds at an instruction follows from its own earlier instructions, so a second
replay runs each rank alone.

A program that completes here also completes if a link's direct path fails at any of its transfers.
Each pair is then a send through a slot, followed by a receive (`docs/explanation/failures.md`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxmorph.program.dataflow import uses
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    Channel,
    Fetch,
    Instruction,
    Move,
    Offload,
    Payload,
    RankInstructions,
    Receive,
    Run,
    Send,
    SendReceive,
    Transfer,
    channel_of,
)
from jaxmorph.program.offload import most_held
from jaxmorph.schedule.costs import StageMemory
from jaxmorph.schedule.ops import Op, OpKind

InFlight = dict[Channel, deque[Transfer]]
"""Delegated messages that were sent and not received yet, in the order of sending."""

_LINES_BEFORE, _LINES_AFTER = 3, 2
_MOVES = (Send, Receive, SendReceive)
_WEIGHT_GRADIENTS = (OpKind.W, OpKind.BW)
_TIED = Payload.TIED


class ProgramError(ValueError):
    """The ranks' instructions don't fit together; the message shows where the ranks are."""


def check(programs: Sequence[RankInstructions], memory: Sequence[StageMemory] = ()) -> None:
    """Replays all ranks, in rank order, to completion.

    Args:
        memory: What a microbatch holds on each rank's device, and the room there; empty for no
            limit.

    Raises:
        ProgramError: The ranks deadlock or reach different transfers; an op runs before its data
            has arrived or while it is in host memory; a weight gradient is unfinished at the
            update; a message is never received; or a device may have to hold more than fits.
    """
    _replay_transfers([_Transfers(program) for program in programs])
    for program in programs:
        _replay_alone(program)
    if memory:
        for program, of_rank in zip(programs, memory, strict=True):
            _check_room(program, of_rank)


class _Transfers:
    """One rank's transfers, in order: how many of them have run, and the next; None at the end."""

    def __init__(self, program: RankInstructions) -> None:
        self.program, self.ran = program, 0
        self._coming = (step for step in program.instructions if isinstance(step, _MOVES))
        self.head: Move | None = next(self._coming, None)

    def advance(self) -> None:
        """Goes on to the next transfer."""
        self.ran += 1
        self.head = next(self._coming, None)

    def around_head(self) -> str:
        """A few instructions around the next transfer."""
        steps = self.program.instructions
        positions = [at for at, step in enumerate(steps) if isinstance(step, _MOVES)]
        return _around(self.program, [*positions, len(steps)][self.ran])


def _replay_transfers(ranks: list[_Transfers]) -> None:
    """Runs the transfers of all ranks; the order of turns does not change where they end."""
    in_flight: InFlight = {}
    awake = deque(ranks)
    while awake:
        rank = awake.popleft()
        while (head := rank.head) is not None:
            peer = ranks[head.peer]
            if not _move(head, rank, peer, ranks, in_flight):
                break
            rank.advance()
            awake.append(peer)
    if any(rank.head for rank in ranks):
        raise _stuck(ranks)
    left = sorted(transfer for waiting in in_flight.values() for transfer in waiting)
    if left:
        raise _error(f"no rank receives {', '.join(map(str, left))}", ranks)


def _move(
    head: Move, rank: _Transfers, peer: _Transfers, ranks: list[_Transfers], in_flight: InFlight
) -> bool:
    """Moves a transfer's other end, or the messages in flight, if the transfer can run now."""
    if head.route == "direct":
        if not _peer_is_there(head, rank, peer, ranks):
            return False
        peer.advance()
        return True
    transfer = head.transfer
    if isinstance(head, Send):
        in_flight.setdefault(channel_of(transfer), deque()).append(transfer)
    elif not _is_next(transfer, in_flight, ranks):
        return False
    else:
        in_flight[channel_of(transfer)].popleft()
    return True


def _is_next(transfer: Transfer, in_flight: InFlight, ranks: list[_Transfers]) -> bool:
    """Whether a message has been sent; an earlier one still waiting on its channel is an error."""
    waiting = in_flight.get(channel_of(transfer))
    if waiting and waiting[0] != transfer:
        raise _error(f"{transfer} is received while {waiting[0]} is before it", ranks)
    return bool(waiting)


def _peer_is_there(head: Move, rank: _Transfers, peer: _Transfers, ranks: list[_Transfers]) -> bool:
    """Whether the peer has reached the same transfer; another one on this link is an error."""
    other, number = peer.head, rank.program.rank
    if other is None or other.route != "direct" or other.peer != number:
        return False
    if not _are_two_ends(head, other):
        raise _error(f"rank {number} is at {head} while its peer is at {other}", ranks)
    return True


def _are_two_ends(head: Move, other: Move) -> bool:
    """Whether one is the other's `other_end`, which is slow to make for every transfer."""
    if isinstance(head, SendReceive) or isinstance(other, SendReceive):
        return other == head.other_end
    return type(other) is not type(head) and other.transfer == head.transfer


def _stuck(ranks: list[_Transfers]) -> ProgramError:
    waiting = ", ".join(
        f"rank {rank.program.rank} waits at {rank.head}" for rank in ranks if rank.head is not None
    )
    return _error(f"deadlock: {waiting}", ranks)


def _error(reason: str, ranks: list[_Transfers]) -> ProgramError:
    return ProgramError("\n".join([reason, *(rank.around_head() for rank in ranks)]))


def _around(program: RankInstructions, position: int) -> str:
    """A few of a rank's instructions around a position, which is marked."""
    steps = program.instructions
    window = range(max(0, position - _LINES_BEFORE), min(len(steps), position + _LINES_AFTER + 1))
    shown = [f">{steps[i]}<" if i == position else str(steps[i]) for i in window]
    end = [">end<"] if position == len(steps) else []
    return f"rank {program.rank}: {' | '.join([*shown, *end])}"


@dataclass
class _Alone:
    """What one rank has done and holds, on its device and in host memory.

    A buffer counts as held once it is made: it is freed after its last use, so no use comes later.
    """

    program: RankInstructions
    position: int = 0
    done: set[Op] = field(default_factory=set)
    held: set[Buffer] = field(default_factory=set)
    away: set[Buffer] = field(default_factory=set)
    offloaded: set[Buffer] = field(default_factory=set)

    def replay(self) -> str | None:
        """Runs all instructions; returns why one can't run or a stash is never fetched, or None."""
        done, held = self.done, self.held  # large steps have a million instructions
        steps = zip(self.program.instructions, uses(self.program), strict=True)
        for self.position, (step, (read, made)) in enumerate(steps):
            if not held.issuperset(read) and not isinstance(step, Fetch):
                return self._why_missing(step, next(each for each in read if each not in held))
            if isinstance(step, Run):
                for op in _single_ops(step.op):
                    if op in done:
                        return f"{step} a second time"
                    done.add(op)
                held.update(made)
            elif made:  # by a received message; a fetch fills no new buffer
                held.update(made)
            elif (reason := self._take(step)) is not None:
                return reason
        self.position += 1
        if self.away:
            return f"it never fetches {', '.join(map(str, sorted(self.away)))}"
        return None

    def _take(self, step: Instruction) -> str | None:
        """Runs an instruction of a rare kind, or a send; returns why it can't, or None."""
        if isinstance(step, Send):
            return self._unfinished(step) if step.transfer.payload is _TIED else None
        if isinstance(step, Offload | Fetch | AwaitRoom):
            return self._copy(step)
        return self._unfinished(step)

    def _why_missing(self, step: Instruction, buffer: Buffer) -> str:
        """Why an instruction can't use a buffer that isn't on the device."""
        if buffer in self.away:
            return f"{step} while {buffer} is in host memory"
        return f"{step} runs before its {buffer} is there"

    def _copy(self, step: Offload | Fetch | AwaitRoom) -> str | None:
        """Moves a stash; returns why it can't or that an awaited offload hasn't begun, or None."""
        awaited = None
        match step:
            case AwaitRoom(awaited):
                pass
            case Offload(buffer):
                self.held.remove(buffer)
                self.away.add(buffer)
                self.offloaded.add(buffer)
            case Fetch(buffer, awaited):
                if buffer in self.held:
                    return f"{step} while {buffer} is on the device"
                if buffer not in self.away:
                    return self._why_missing(step, buffer)
                self.away.remove(buffer)
                self.held.add(buffer)
        if awaited is not None and awaited not in self.offloaded:
            return f"{step} before {awaited} is offloaded"
        return None

    def _unfinished(self, step: Instruction) -> str | None:
        """The weight gradients that are missing, though an instruction needs all of them."""
        program = self.program
        finished = {(op.chunk, op.microbatch) for op in self.done if op.kind in _WEIGHT_GRADIENTS}
        for chunk in range(program.num_chunks):
            missing = [m for m in range(program.num_microbatches) if (chunk, m) not in finished]
            if missing:
                of_chunk = f" of chunk {chunk}" if program.num_chunks > 1 else ""
                return f"{step} before the weight gradients of {missing}{of_chunk}"
        return None


def _single_ops(op: Op) -> tuple[Op, ...]:
    """The op, or that of each microbatch of a group."""
    if op.group == 1:
        return (op,)
    return tuple(Op(op.kind, microbatch, op.chunk) for microbatch in op.microbatches)


def _replay_alone(program: RankInstructions) -> None:
    """Runs the instructions of one rank; a message is there from its receive on."""
    rank = _Alone(program)
    if (reason := rank.replay()) is not None:
        where = _around(program, rank.position)
        raise ProgramError(f"rank {program.rank}: {reason}\n{where}")


def _check_room(program: RankInstructions, memory: StageMemory) -> None:
    """Checks that a rank's device has room for all that it may hold, however long copies take."""
    room = memory.room * program.num_chunks
    for step, held in zip(program.instructions, most_held(program, memory), strict=True):
        if held > room:
            raise ProgramError(
                f"rank {program.rank}: {step} may make its device hold {held:,}, expected at most "
                f"{room:,}"
            )
