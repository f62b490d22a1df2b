"""Proves by replay that ranks' instructions run to completion and use only data they have.

The replay runs all ranks together under the rules of the real queues: instructions in order; a
direct transfer, or pair of them, only when both ends have reached it; a delegated send at once, and
its receive after the send and all earlier receives of its channel.

What completes here also completes if a link's direct path fails at any of its transfers, after
which each pair is a send through a slot and then a receive (`docs/explanation/failures.md`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxmorph.program.dataflow import reads, writes
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    Channel,
    Fetch,
    Free,
    Instruction,
    Move,
    Offload,
    Payload,
    Pipeline,
    RankInstructions,
    Receive,
    Reduce,
    Run,
    Send,
    SendReceive,
    Transfer,
    Update,
    channel_of,
)
from jaxmorph.program.offload import most_held
from jaxmorph.schedule.costs import StageMemory
from jaxmorph.schedule.ops import Op, OpKind

InFlight = dict[Channel, deque[Transfer]]
"""Delegated messages that were sent and not received yet, in the order of sending."""

_LINES_BEFORE, _LINES_AFTER = 3, 2
_MOVES = (Send, Receive, SendReceive)


class ProgramError(ValueError):
    """The ranks' instructions don't fit together; the message shows each rank's position."""


@dataclass
class _Replay:
    """The state of one rank."""

    program: RankInstructions
    position: int = 0
    held: set[Buffer] = field(default_factory=set)
    away: set[Buffer] = field(default_factory=set)
    offloaded: set[Buffer] = field(default_factory=set)
    done: set[Op] = field(default_factory=set)
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        self.pipeline = self.program.pipeline

    @property
    def head(self) -> Instruction | None:
        steps = self.program.instructions
        return steps[self.position] if self.position < len(steps) else None


def check(programs: Sequence[RankInstructions], memory: Sequence[StageMemory] = ()) -> None:
    """Replays all ranks, in rank order, to completion.

    Args:
        memory: What a microbatch holds on each rank's device, and the room there; empty for no
            limit.

    Raises:
        ProgramError: The ranks deadlock or reach different transfers; an op runs before its data
            has arrived or while it is in host memory; a buffer is read after it was freed, or never
            freed; a weight gradient is unfinished at the update; a message is never received; or a
            device may have to hold more than fits.
    """
    ranks = [_Replay(program) for program in programs]
    in_flight: InFlight = {}
    while any(rank.position < len(rank.program.instructions) for rank in ranks):
        moved = [_advance(rank, ranks, in_flight) for rank in ranks]
        if not any(moved):
            raise _stuck(ranks)
    for rank in ranks:
        if rank.held:
            names = ", ".join(map(str, sorted(rank.held)))
            raise _error(f"rank {rank.program.rank} never frees {names}", ranks)
    left = sorted(transfer for waiting in in_flight.values() for transfer in waiting)
    if left:
        raise _error(f"no rank receives {', '.join(map(str, left))}", ranks)
    if memory:
        for program, of_rank in zip(programs, memory, strict=True):
            _check_room(program, of_rank)


def _check_room(program: RankInstructions, memory: StageMemory) -> None:
    """Checks that a rank's device has room for all that it may hold, however long copies take."""
    room = memory.room * program.num_chunks
    for step, held in zip(program.instructions, most_held(program, memory), strict=True):
        if held > room:
            raise ProgramError(
                f"rank {program.rank}: {step} may make its device hold {held:,}, expected at most "
                f"{room:,}"
            )


def _advance(rank: _Replay, ranks: list[_Replay], in_flight: InFlight) -> bool:
    """Runs what the rank can run now; returns whether anything moved."""
    steps, before = rank.program.instructions, rank.position
    while rank.position < len(steps):
        head = steps[rank.position]
        if isinstance(head, _MOVES) and not _move(head, rank, ranks, in_flight):
            break
        _complete(head, rank, ranks)
    return rank.position > before


def _move(head: Move, rank: _Replay, ranks: list[_Replay], in_flight: InFlight) -> bool:
    """Moves a transfer's other end, or the messages in flight, if the transfer can run now."""
    if head.route == "direct":
        if not _peer_is_there(head, rank, ranks):
            return False
        peer = ranks[head.peer]
        _complete(peer.program.instructions[peer.position], peer, ranks)
        return True
    transfer = head.transfer
    if isinstance(head, Send):
        in_flight.setdefault(channel_of(transfer), deque()).append(transfer)
    elif not _is_next(transfer, in_flight, ranks):
        return False
    else:
        in_flight[channel_of(transfer)].popleft()
    return True


def _is_next(transfer: Transfer, in_flight: InFlight, ranks: list[_Replay]) -> bool:
    """Whether a message has been sent; an earlier one still waiting on its channel is an error."""
    waiting = in_flight.get(channel_of(transfer))
    if waiting and waiting[0] != transfer:
        raise _error(f"{transfer} is received while {waiting[0]} is before it", ranks)
    return bool(waiting)


def _peer_is_there(head: Move, rank: _Replay, ranks: list[_Replay]) -> bool:
    """Whether the peer has reached the same transfer; another one on this link is an error."""
    other = ranks[head.peer].head
    if not isinstance(other, _MOVES) or other.route != "direct":
        return False
    if other.peer != rank.program.rank:
        return False
    if other != head.other_end:
        raise _error(
            f"rank {rank.program.rank} is at {head!s} while its peer is at {other!s}", ranks
        )
    return True


def _complete(head: Instruction, rank: _Replay, ranks: list[_Replay]) -> None:
    """Applies the head instruction's effects and steps over it."""
    number = rank.program.rank
    for buffer in reads(head, number, rank.pipeline):
        if buffer not in rank.held:
            raise _error(f"rank {number}: {head} {_why_missing(buffer, rank)}", ranks)
        if (buffer in rank.away) != isinstance(head, Fetch):
            where = "in host memory" if buffer in rank.away else "on the device"
            raise _error(f"rank {number}: {head} while {buffer} is {where}", ranks)
    # By type: a plan for 64 ranks has 200,000 instructions, and most are of these two kinds.
    if isinstance(head, Free):
        rank.held.discard(head.buffer)
    elif isinstance(head, Run):
        if head.op in rank.done:
            raise _error(f"rank {number}: {head} a second time", ranks)
        rank.done.add(head.op)
        rank.held.update(writes(head, number, rank.pipeline))
    elif isinstance(head, Offload | Fetch | AwaitRoom):
        _account_for_copies(head, rank, ranks)
    else:
        if isinstance(head, Update | Reduce) or _sends_tied_gradient(head):
            _check_weight_gradients(rank, ranks)
        rank.held.update(writes(head, number, rank.pipeline))
    rank.position += 1


def _why_missing(buffer: Buffer, rank: _Replay) -> str:
    """Why an instruction can't use a buffer that the rank doesn't hold."""
    if Free(buffer) in rank.program.instructions[: rank.position]:
        return f"uses {buffer} after it was freed"
    return f"runs before its {buffer} is there"


def _account_for_copies(
    head: Offload | Fetch | AwaitRoom, rank: _Replay, ranks: list[_Replay]
) -> None:
    """Checks that an awaited offload has started, and records where the stash is."""
    number, awaited = rank.program.rank, None
    match head:
        case AwaitRoom(awaited):
            pass
        case Fetch(buffer, awaited):
            rank.away.discard(buffer)
        case Offload(buffer):
            rank.away.add(buffer)
            rank.offloaded.add(buffer)
    if awaited is not None and awaited not in rank.offloaded:
        raise _error(f"rank {number}: {head} before {awaited} is offloaded", ranks)


def _sends_tied_gradient(step: Instruction) -> bool:
    return isinstance(step, Send) and step.transfer.payload is Payload.TIED


def _check_weight_gradients(rank: _Replay, ranks: list[_Replay]) -> None:
    program = rank.program
    finished = {(op.chunk, op.microbatch) for op in rank.done if op.kind in (OpKind.W, OpKind.BW)}
    for chunk in range(program.num_chunks):
        missing = [m for m in range(program.num_microbatches) if (chunk, m) not in finished]
        if missing:
            of_chunk = f" of chunk {chunk}" if program.num_chunks > 1 else ""
            reason = f"{rank.head} before the weight gradients of {missing}{of_chunk}"
            raise _error(f"rank {program.rank}: {reason}", ranks)


def _stuck(ranks: list[_Replay]) -> ProgramError:
    waiting = ", ".join(
        f"rank {rank.program.rank} waits at {rank.head}" for rank in ranks if rank.head is not None
    )
    return _error(f"deadlock: {waiting}", ranks)


def _error(reason: str, ranks: list[_Replay]) -> ProgramError:
    return ProgramError(f"{reason}\n{_grid(ranks)}")


def _grid(ranks: list[_Replay]) -> str:
    """A few instructions around each rank's position, which is marked."""
    return "\n".join(f"rank {rank.program.rank}: {_around_head(rank)}" for rank in ranks)


def _around_head(rank: _Replay) -> str:
    steps, position = rank.program.instructions, rank.position
    window = range(max(0, position - _LINES_BEFORE), min(len(steps), position + _LINES_AFTER + 1))
    shown = [f">{steps[i]}<" if i == position else str(steps[i]) for i in window]
    return " | ".join(shown) + (" | >end<" if position >= len(steps) else "")
