"""Lowers a planned schedule to each rank's instructions, in pure passes from list to list.

Direct transfers are rendezvous on in-order queues: both ends must reach them in the same order, or
they deadlock. So all ops and transfers of a step get one global order that respects the data
dependencies, and every rank's instructions are a subsequence of it. The earliest unfinished item of
that order can always run, so nothing deadlocks.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count, islice
from operator import attrgetter
from typing import NamedTuple, TypeGuard

import numpy as np

from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.dataflow import (
    consumer,
    feeder,
    output_transfer,
    reads,
    received_buffer,
    sent_buffer,
    writes,
)
from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Free,
    Instruction,
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
)
from jaxmorph.records import Link, Routes
from jaxmorph.schedule.costs import LinkDelay, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline

# Ranks share what is alike on them: so large plans have a fifth of the objects.
_run, _free = lru_cache(maxsize=1 << 14)(Run), lru_cache(maxsize=1 << 14)(Free)


def lower(
    schedule: Schedule,
    planned: Timeline,
    routes: Routes | None = None,
    *,
    num_tied: int = 0,
    pairs: bool | None = None,
) -> tuple[RankInstructions, ...]:
    """Each rank's instructions for one step of a schedule.

    Direct transfers have the same order on both ends. A delegated send comes right after its op, a
    delegated receive right before, and a buffer is freed right after its last reader.

    Args:
        planned: The schedule's simulated timeline, which decides the order of transfers.
        routes: A link that is missing is direct.
        num_tied: How many parameters have a copy on both the first and the last stage, which
            exchange the copies' gradients after their last op.
        pairs: Whether transfers of direct links go in pairs (`join_pairs`); None: as the schedule's
            kind does (`goes_in_pairs`).
    """
    lowered = lower_order(schedule, planned, routes, num_tied=num_tied, pairs=pairs)
    return tuple(map(insert_frees, lowered))


def lower_order(
    schedule: Schedule,
    planned: Timeline,
    routes: Routes | None = None,
    *,
    num_tied: int = 0,
    pairs: bool | None = None,
) -> tuple[RankInstructions, ...]:
    """As `lower`, without the frees, which a simulation does not need."""
    routes = routes or {}
    num_ranks = schedule.num_stages
    order = global_order(schedule, planned, routes)
    if goes_in_pairs(schedule) if pairs is None else pairs:
        order = join_pairs(order, Pipeline(num_ranks, schedule.num_chunks), routes)
    rows = _rows(order, num_ranks, routes)
    return tuple(
        _place_delegated(
            RankInstructions(
                rank,
                num_ranks,
                schedule.num_microbatches,
                (*row, *_step_end(rank, num_ranks, routes, num_tied)),
                schedule.num_chunks,
            )
        )
        for rank, row in enumerate(rows)
    )


def lower_in_step(
    schedule: Schedule,
    costs: StageCosts,
    links: Links,
    routes: Routes,
    *,
    num_tied: int = 0,
    pairs: bool | None = None,
) -> tuple[RankInstructions, ...]:
    """As `lower`, with the order of transfers in which direct links block ranks the least.

    It simulates two orders and takes the shorter one; with one chunk there is only the first.
    """
    lowered = [
        lower(schedule, planned, routes, num_tied=num_tied, pairs=pairs)
        for planned in _timelines(schedule, costs, links, routes)
    ]
    if len(lowered) == 1:
        return lowered[0]
    return min(lowered, key=lambda programs: simulate_blocking(programs, costs, links).makespan_ms)


def _timelines(
    schedule: Schedule, costs: StageCosts, links: Links, routes: Routes
) -> Iterator[Timeline]:
    yield simulate(schedule, costs, links)
    ring = range(schedule.num_stages)
    if schedule.num_chunks == 1 or len(ring) == 1:
        return
    # If all ops run as early as possible, each rank is one forward behind the previous one. Around
    # a ring these delays add up. Unless the sum is a whole number of turns of forward and backward,
    # transfers between the last rank and the first block each other in the middle of ops, in every
    # turn. If messages are planned to take as long as a forward, all ranks stay in step, at the
    # price of a longer warm-up.
    forward_ms = max(costs.forward_ms) / schedule.num_chunks
    pairs = (sorted((rank, (rank + 1) % len(ring))) for rank in ring)
    direct = [link for link in map(Link._make, pairs) if routes.get(link, "direct") == "direct"]
    yield simulate(
        schedule, costs, {**links, **dict.fromkeys(direct, LinkDelay(forward_ms, forward_ms))}
    )


class Key(NamedTuple):
    """A place in the global order.

    At one instant, transfers come before the ops that start then. Links that share a stage have
    different turns, so that no transfer waits for a chain of others.
    """

    time_us: int
    is_op: bool
    turn: int
    tie: float


class Placed(NamedTuple):
    """An op on a rank, or the transfer of its result, with its place in the global order.

    `back` is the other transfer of a pair, from the destination to the source.
    """

    key: Key
    rank: int
    op: Op
    transfer: Transfer | None = None
    back: Transfer | None = None


class _Planned(NamedTuple):
    """The times of a rank's ops: exact starts, and starts and ends in whole microseconds."""

    exact_start_us: list[float]
    start_us: list[int]
    end_us: list[int]

    @classmethod
    def of(cls, start_ms: np.ndarray, end_ms: np.ndarray) -> "_Planned":
        return cls((start_ms * 1e3).tolist(), _microseconds(start_ms), _microseconds(end_ms))


def global_order(schedule: Schedule, planned: Timeline, routes: Routes) -> list[Placed]:
    """All ops and transfers of a step in one order that every rank follows.

    An op is placed at its planned start, a transfer at the end of its producer. If the receiver of
    a direct transfer has started an op shortly before, the transfer goes before that op: the
    receiver then waits a little instead of the sender a lot.
    """
    pipeline = Pipeline(schedule.num_stages, schedule.num_chunks)
    ties = _topological_index(schedule, pipeline)
    times = [*map(_Planned.of, planned.start_ms, planned.end_ms)]
    placed: list[Placed] = []
    for rank, order in enumerate(schedule.orders):
        _, start_us, end_us = times[rank]
        for op, start, end, tie in zip(order, start_us, end_us, ties[rank], strict=True):
            made = Key(start, True, 0, tie)
            placed.append(Placed(made, rank, op))
            transfer = output_transfer(op, rank, pipeline)
            if transfer is not None:
                direct = routes.get(transfer.link, "direct") == "direct"
                turn = _turn(transfer, pipeline.num_ranks)
                there = times[transfer.destination] if direct else None
                placed.append(Placed(_transfer_key(made, end, turn, there), rank, op, transfer))
    return sorted(placed, key=attrgetter("key"))


def _microseconds(times_ms: np.ndarray) -> list[int]:
    """Whole microseconds, so that sums of the same durations in another order are equal."""
    return np.rint(times_ms * 1e3).astype(np.int64).tolist()


def _transfer_key(made: Key, end_us: int, turn: int, there: _Planned | None) -> Key:
    # Any time after the producer's start and up to the consumer's start keeps the order valid.
    if end_us <= made.time_us:  # after an op of no duration, the tie keeps the transfer behind it
        return made._replace(tie=made.tie + 0.5)
    boundary_us = _nearer_boundary(end_us, there) if there else None
    if boundary_us is not None and boundary_us > made.time_us:
        return Key(boundary_us, False, turn, made.tie)
    return Key(end_us, False, turn, made.tie)


def _turn(transfer: Transfer, num_ranks: int) -> int:
    """Activations on even links, then on odd ones, then gradients likewise.

    The wrap-around link counts as the one after the last. If its number is even, its neighbour
    link 0-1 is even too, so it gets a turn of its own.
    """
    link = num_ranks - 1 if transfer.goes_around else transfer.link.lower
    alone = transfer.goes_around and link % 2 == 0
    return 3 * (transfer.payload is Payload.GRADIENT) + (2 if alone else link % 2)


def _nearer_boundary(time_us: int, there: _Planned) -> int | None:
    """The start of the op that a rank runs at a time, if it is nearer than the op's end."""
    position = bisect_left(there.exact_start_us, time_us) - 1
    if position < 0:
        return None
    start_us, end_us = there.start_us[position], there.end_us[position]
    return start_us if time_us - start_us < end_us - time_us else None


def _topological_index(schedule: Schedule, pipeline: Pipeline) -> list[list[int]]:
    """Positions of each rank's ops in one order that respects ranks' orders and dependencies."""
    index: list[list[int]] = [[] for _ in schedule.orders]
    made: list[set[Op]] = [set() for _ in schedule.orders]
    numbers = count()
    ready = deque(range(schedule.num_stages))
    while ready:
        rank = ready.popleft()
        for op in islice(schedule.orders[rank], len(index[rank]), None):
            source = feeder(op, rank, pipeline)
            if source is not None and source[1] not in made[source[0]]:
                break
            made[rank].add(op)
            index[rank].append(next(numbers))
            there = consumer(op, rank, pipeline)
            if there is not None and there.rank != rank:
                ready.append(there.rank)
    if [*map(len, index)] != [*map(len, schedule.orders)]:
        raise ValueError(f"schedule {schedule.name!r} cannot run to completion:\n{schedule}")
    return index


def goes_in_pairs(schedule: Schedule) -> bool:
    """Whether a schedule's transfers always go in pairs: if its backwards are whole ops.

    Such are 1F1B, its eager form and interleaving, whose own authors exchange messages so.
    """
    return any(op.kind is OpKind.BW for order in schedule.orders for op in order)


def join_pairs(order: list[Placed], pipeline: Pipeline, routes: Routes) -> list[Placed]:
    """Joins an activation and a gradient that follow each other on a direct link to a pair.

    The first one goes when the second does, unless an op needs it before that. Then its own
    rendezvous is gone, and the op comes after the second one's in any case, as queues are in order.
    So where a link delays both directions alike, pairs never make a step longer.
    """
    joined: dict[int, Placed] = dict(enumerate(order))
    last: dict[Link, int] = {}  # of each link, the transfer that the next one may take along
    for at, (_, rank, op, transfer, _) in enumerate(order):
        if transfer is None:
            made = feeder(op, rank, pipeline)
            link = Link(*sorted((rank, made[0]))) if made else None
            if link and link in last and order[last[link]][1:3] == made:
                del last[link]  # the op needs it now
            continue
        link = transfer.link
        if routes.get(link, "direct") != "direct":
            continue
        before = order[last[link]].transfer if link in last else None
        if before is not None and _are_pair(before, transfer):
            del joined[last.pop(link)]
            joined[at] = order[at]._replace(back=before)
        else:
            last[link] = at
    return [*joined.values()]


def _are_pair(one: Transfer, other: Transfer) -> bool:
    """Whether two transfers of a link go in opposite directions, one activation, one gradient."""
    return one.source == other.destination and one.payload is not other.payload


def _rows(order: list[Placed], num_ranks: int, routes: Routes) -> list[list[Instruction]]:
    """Each rank's ops and its ends of transfers, in the global order."""
    rows: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    for _, rank, op, transfer, back in order:
        if transfer is None:
            rows[rank].append(_run(op))
            continue
        if back is not None:
            rows[transfer.source].append(SendReceive(transfer, back))
            rows[transfer.destination].append(SendReceive(back, transfer))
            continue
        route = routes.get(transfer.link, "direct")
        rows[transfer.source].append(Send(transfer, route))
        rows[transfer.destination].append(Receive(transfer, route))
    return rows


def _place_delegated(program: RankInstructions) -> RankInstructions:
    """Moves each delegated send right after its op and each receive right before its op.

    So no direct transfer delays a delegated message. A channel delivers in the order of sending. If
    ops need messages in another order, earlier messages are received together with the first needed
    one; they have been sent by then.
    """
    moved = [step for step in program.instructions if _is_delegated(step)]
    if not moved:
        return program
    sends = {sent_buffer(step.transfer): step for step in moved if isinstance(step, Send)}
    receives = _Receives(step for step in moved if isinstance(step, Receive))
    placed: list[Instruction] = []
    pipeline = program.pipeline
    for step in program.instructions:
        if isinstance(step, Run):
            for buffer in reads(step, program.rank, pipeline):
                placed += receives.up_to(buffer)
            placed.append(step)
            made = writes(step, program.rank, pipeline)
            placed += [sends[buffer] for buffer in made if buffer in sends]
        elif not _is_delegated(step):
            placed.append(step)
    return replace(program, instructions=tuple(placed))


def _is_delegated(step: Instruction) -> TypeGuard[Send | Receive]:
    """Whether it is a delegated transfer of an op's result; tied gradients stay at the end."""
    if not isinstance(step, Send | Receive) or step.transfer.payload is Payload.TIED:
        return False
    return step.route == "delegated"


class _Receives:
    """A rank's delegated receives, by channel and in the order of sending."""

    def __init__(self, receives: Iterable[Receive]) -> None:
        self._waiting: dict[tuple[Payload, int], deque[Receive]] = {}
        self._channel: dict[Buffer, tuple[Payload, int]] = {}
        for step in receives:
            channel = (step.transfer.payload, step.transfer.source)
            self._waiting.setdefault(channel, deque()).append(step)
            self._channel[received_buffer(step.transfer)] = channel

    def up_to(self, buffer: Buffer) -> Iterator[Receive]:
        """Removes the receives of a buffer's channel up to the buffer's own, if still waiting."""
        while buffer in self._channel:
            step = self._waiting[self._channel[buffer]].popleft()
            del self._channel[received_buffer(step.transfer)]
            yield step


def _step_end(rank: int, num_ranks: int, routes: Routes, num_tied: int) -> list[Instruction]:
    """The exchange of tied gradients between the first and the last rank, and the update."""
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


def insert_frees(program: RankInstructions) -> RankInstructions:
    """Frees each buffer right after its last reader, or right after it was made."""
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
        freed.extend(map(_free, freed_at.get(position, ())))
    return replace(program, instructions=tuple(freed))


def forward_only(program: RankInstructions, first_microbatch: int = 0) -> RankInstructions:
    """Keeps only the forwards of a rank's instructions and their transfers, to evaluate a loss.

    It keeps the step's order, so it runs to completion as the step does. A stash has no reader and
    is freed right after its forward.

    Args:
        first_microbatch: The new number of microbatch 0, so that messages of the evaluation and of
            the step have different identities.
    """
    parts = map(_part_of_forward, program.instructions)
    kept = tuple(_renumbered(step, first_microbatch) for step in parts if step is not None)
    return insert_frees(replace(program, instructions=kept))


def _part_of_forward(step: Instruction) -> Run | Send | Receive | None:
    match step:
        case SendReceive(sent, received):  # one of them is an activation
            return _part_of_forward(Send(sent)) or _part_of_forward(Receive(received))
        case Run(op):
            return step if op.kind is OpKind.F else None
        case Send(transfer) | Receive(transfer):
            return step if transfer.payload is Payload.ACTIVATION else None
        case _:
            return None


def _renumbered(step: Run | Send | Receive, by: int) -> Instruction:
    if isinstance(step, Run):
        return Run(step.op._replace(microbatch=step.op.microbatch + by))
    transfer = step.transfer
    return replace(step, transfer=transfer._replace(microbatch=transfer.microbatch + by))
