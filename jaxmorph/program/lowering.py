"""From a planned schedule to each rank's instructions: pure passes, list in and list out."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeGuard

from jaxmorph.program.dataflow import output_transfer, reads, received_buffer, writes
from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Free,
    Instruction,
    Payload,
    RankProgram,
    Receive,
    Reduce,
    Run,
    Send,
    Transfer,
    Update,
)
from jaxmorph.program.ordering import Placed, global_order
from jaxmorph.schedule.costs import Link, Routes
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline


def lower(
    schedule: Schedule, planned: Timeline, routes: Routes | None = None, *, num_tied: int = 0
) -> tuple[RankProgram, ...]:
    """Every rank's instructions for one step of a schedule.

    Args:
        schedule: Which ops each stage runs, in which order.
        planned: The simulated timeline of the same schedule; it decides the order of transfers.
        routes: The route of each link; a link that is not named is direct.
        num_tied: How many parameters the first and the last stage both hold a copy of; they
            exchange the copies' gradients after their last op.

    Returns:
        One program per rank. Direct transfers stand in the same order on both ends; a delegated
        send follows its op at once and a delegated receive stands right before its op. A buffer is
        freed right after its last reader.
    """
    return tuple(map(insert_frees, lower_order(schedule, planned, routes, num_tied=num_tied)))


def lower_order(
    schedule: Schedule, planned: Timeline, routes: Routes | None = None, *, num_tied: int = 0
) -> tuple[RankProgram, ...]:
    """The instructions of `lower` that take time, which a simulation needs: nothing is freed."""
    routes = routes or {}
    num_ranks = schedule.num_stages
    rows = _rows(global_order(schedule, planned, routes), num_ranks, routes)
    return tuple(
        _place_delegated(
            RankProgram(
                rank,
                num_ranks,
                schedule.num_microbatches,
                (*row, *_step_end(rank, num_ranks, routes, num_tied)),
                schedule.num_chunks,
            )
        )
        for rank, row in enumerate(rows)
    )


def _rows(order: list[Placed], num_ranks: int, routes: Routes) -> list[list[Instruction]]:
    """Each rank's ops, and both ends' instructions of each transfer, in the global order."""
    rows: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    for _, rank, op, transfer in order:
        if transfer is None:
            rows[rank].append(Run(op))
            continue
        route = routes.get(transfer.link, "direct")
        rows[transfer.source].append(Send(transfer, route))
        rows[transfer.destination].append(Receive(transfer, route))
    return rows


def _place_delegated(program: RankProgram) -> RankProgram:
    """Move each delegated send right behind the op it is of, each receive right before its op.

    Nothing stands between them: no direct transfer may hold up a message that waits for nobody. A
    channel delivers in the order of sending, so where ops take messages in another order, those
    sent earlier are received with the first that is needed; they have been sent by then.
    """
    moved = [step for step in program.instructions if _is_delegated(step)]
    if not moved:
        return program
    sends = {step.transfer: step for step in moved if isinstance(step, Send)}
    receives = _Receives(step for step in moved if isinstance(step, Receive))
    placed: list[Instruction] = []
    for step in program.instructions:
        if isinstance(step, Run):
            for buffer in reads(step, program.rank, program.pipeline):
                placed += receives.up_to(buffer)
            placed.append(step)
            made = output_transfer(step.op, program.rank, program.pipeline)
            placed += [sends[made]] if made is not None and made in sends else []
        elif not _is_delegated(step):
            placed.append(step)
    return replace(program, instructions=tuple(placed))


def _is_delegated(step: Instruction) -> TypeGuard[Send | Receive]:
    """Whether it is the delegated transfer of an op's result: tied gradients are exchanged last."""
    if not isinstance(step, Send | Receive) or step.transfer.payload is Payload.TIED:
        return False
    return step.route == "delegated"


class _Receives:
    """A rank's delegated receives, of each channel in the order of sending."""

    def __init__(self, receives: Iterable[Receive]) -> None:
        self._waiting: dict[tuple[Payload, int], deque[Receive]] = {}
        self._channel: dict[Buffer, tuple[Payload, int]] = {}
        for step in receives:
            channel = (step.transfer.payload, step.transfer.source)
            self._waiting.setdefault(channel, deque()).append(step)
            self._channel[received_buffer(step.transfer)] = channel

    def up_to(self, buffer: Buffer) -> Iterator[Receive]:
        """Takes out the receives of a buffer's channel up to its own, if that is still there."""
        while buffer in self._channel:
            step = self._waiting[self._channel[buffer]].popleft()
            del self._channel[received_buffer(step.transfer)]
            yield step


def _step_end(rank: int, num_ranks: int, routes: Routes, num_tied: int) -> list[Instruction]:
    """The exchange of tied gradients between the first and the last stage, and the update."""
    if num_ranks == 1:
        return [*(Reduce(index, None) for index in range(num_tied)), Update()]
    if rank not in (0, num_ranks - 1):
        return [Update()]
    ending: list[Instruction] = []
    for index in range(num_tied):
        ending += _tied_exchange(rank, num_ranks - 1, index, routes)
    return [*ending, Update()]


def _tied_exchange(rank: int, last: int, index: int, routes: Routes) -> list[Instruction]:
    route = routes.get(Link(0, last), "direct")
    toward_last = Transfer(Payload.TIED, 0, last, index)
    toward_first = Transfer(Payload.TIED, last, 0, index)
    messages: list[Instruction] = (
        [Send(toward_last, route), Receive(toward_first, route)]
        if rank == 0
        else [Receive(toward_last, route), Send(toward_first, route)]
    )
    return [*messages, Reduce(index, Buffer(BufferKind.TIED_GRADIENT, index))]


def insert_frees(program: RankProgram) -> RankProgram:
    """The same program with each buffer freed right after its last reader.

    Returns:
        The program in which every buffer that is made is freed exactly once, as soon as nothing
        reads it any more (a buffer that nothing reads is freed where it was made).
    """
    steps, rank, pipeline = program.instructions, program.rank, program.pipeline
    last_use: dict[Buffer, int] = {}
    for position, step in enumerate(steps):
        for buffer in (*writes(step, rank, pipeline), *reads(step, rank, pipeline)):
            last_use[buffer] = position
    freed_at: dict[int, list[Buffer]] = {}
    for buffer, position in last_use.items():
        freed_at.setdefault(position, []).append(buffer)
    freed: list[Instruction] = []
    for position, step in enumerate(steps):
        freed.append(step)
        freed.extend(Free(buffer) for buffer in freed_at.get(position, ()))
    return replace(program, instructions=tuple(freed))
