"""Lowers a planned schedule to each rank's instructions, in pure passes from list to list.

Direct transfers are rendezvous on in-order queues: both ends must reach them in the same order, or
they deadlock. So all ops and transfers of a step get one global order that respects the data
dependencies, and every rank's instructions are a subsequence of it. The earliest unfinished item of
that order can always run, so nothing deadlocks.
"""

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeGuard

import numpy as np

from jaxmorph.placement import Placement
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.dataflow import Flow, flows, received_buffer, sent_buffer, uses
from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Instruction,
    Payload,
    RankInstructions,
    Receive,
    Reduce,
    Run,
    Send,
    SendReceive,
    Transfer,
    Update,
)
from jaxmorph.program.pairs import goes_in_pairs, join_pairs
from jaxmorph.records import Routes
from jaxmorph.schedule.costs import LinkDelay, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import replay
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline

# Ranks share equal instructions, so large plans have fewer objects.
_run = lru_cache(maxsize=1 << 14)(Run)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pauses garbage collection, which finds nothing in instructions: they hold no cycles.

    It would walk the instructions of a large step, a million objects, again and again as they grow.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
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
    delegated receive right before its op.

    Args:
        planned: The schedule's simulated timeline, which decides the order of transfers.
        routes: A link that is missing is direct.
        num_tied: How many parameters have a copy on both the first and the last stage, which
            exchange the copies' gradients after their last op.
        pairs: Whether transfers of direct links go in pairs (`join_pairs`); None: as
            `goes_in_pairs` says for the schedule.
    """
    routes = routes or {}
    num_ranks = schedule.num_stages
    rows = _rows(schedule, global_order(schedule, planned, routes), routes)
    programs = [
        RankInstructions(
            rank,
            num_ranks,
            schedule.num_microbatches,
            (*row, *_step_end(rank, schedule.placement, routes, num_tied)),
            schedule.num_chunks,
            schedule.placement_kind,
        )
        for rank, row in enumerate(rows)
    ]
    if goes_in_pairs(schedule) if pairs is None else pairs:
        programs = join_pairs(programs)
    delegating = {rank for link, route in routes.items() if route == "delegated" for rank in link}
    return tuple(
        _place_delegated(program) if program.rank in delegating else program for program in programs
    )


@_without_collections()
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
    orders = [
        lower(schedule, planned, routes, num_tied=num_tied, pairs=pairs)
        for planned in _timelines(schedule, costs, links, routes)
    ]
    if len(orders) == 1:
        return orders[0]
    return min(orders, key=lambda order: simulate_blocking(order, costs, links).makespan_ms)


def _timelines(
    schedule: Schedule, costs: StageCosts, links: Links, routes: Routes
) -> Iterator[Timeline]:
    yield simulate(schedule, costs, links)
    if schedule.num_chunks == 1 or schedule.num_stages == 1:
        return
    # If all ops run as early as possible, each rank is one forward behind the previous one. Around
    # a ring these delays add up. Unless the sum is a whole number of turns of forward and backward,
    # transfers between the last rank and the first block each other in the middle of ops, in every
    # turn. If messages are planned to take as long as a forward, all ranks stay in step, at the
    # price of a longer warm-up.
    forward_ms = max(costs.forward_ms) / schedule.num_chunks
    direct = [it for it in schedule.placement.links if routes.get(it, "direct") == "direct"]
    yield simulate(
        schedule, costs, {**links, **dict.fromkeys(direct, LinkDelay(forward_ms, forward_ms))}
    )


class Keys(NamedTuple):
    """Places in the global order, by which they sort; no two places of a step are equal.

    At one instant, transfers come before the ops that start then. Links that share a stage have
    different turns, so that no transfer waits for a chain of others.

    Attributes:
        time_us: int64 ``[places]``.
        turn: int64 ``[places]``.
        tie: float64 ``[places]``, in an order that respects all dependencies.
    """

    time_us: np.ndarray
    turn: np.ndarray
    tie: np.ndarray


_TURN_OF_OPS = 6  # after the turns of all transfers


class GlobalOrder(NamedTuple):
    """The places of all ops and transfers of a step in one order that every rank follows.

    Attributes:
        ops: The places of each rank's ops, in the rank's order.
        transfers: The places of each flow between two ranks, by microbatch.
    """

    ops: list[Keys]
    transfers: list[tuple[Flow, Keys]]


class _Planned(NamedTuple):
    """When ops of a rank are planned, exactly and in whole microseconds, and their ties.

    Sums of the same durations in different orders are equal only in whole microseconds.
    """

    exact_start_us: np.ndarray
    start_us: np.ndarray
    end_us: np.ndarray
    tie: np.ndarray

    @classmethod
    def of(cls, start_ms: np.ndarray, end_ms: np.ndarray, tie: np.ndarray) -> "_Planned":
        starts, ends = (np.rint(ms * 1e3).astype(np.int64) for ms in (start_ms, end_ms))
        return cls(start_ms * 1e3, starts, ends, tie)

    def of_ops(self, positions: Sequence[int]) -> "_Planned":
        """The same, for only the ops at some positions."""
        return _Planned(*(values[positions] for values in self))


def global_order(schedule: Schedule, planned: Timeline, routes: Routes) -> GlobalOrder:
    """The order of all ops and transfers of a step.

    An op is placed at its planned start, a transfer at the end of its producer. If the receiver of
    a direct transfer has started an op shortly before, the transfer goes before that op: the
    receiver then waits a little instead of the sender a lot.
    """
    sizes = schedule.num_chunks, schedule.num_microbatches
    positions = [_positions(order, *sizes) for order in schedule.orders]
    times = [*map(_Planned.of, planned.start_ms, planned.end_ms, _ties(schedule))]
    ops = [Keys(own.start_us, np.full_like(own.start_us, _TURN_OF_OPS), own.tie) for own in times]
    transfers: list[tuple[Flow, Keys]] = []
    for flow in flows(schedule.placement):
        source, target = flow.source.rank, flow.target.rank
        if flow.is_handover:
            continue
        made = times[source].of_ops(positions[source][flow.payload][flow.source.chunk])
        is_direct = routes.get(flow.link, "direct") == "direct"
        ends_us = _nearer_boundaries(made, times[target]) if is_direct else made.end_us
        transfers.append((flow, _transfer_keys(made, ends_us, _turn(flow, schedule.num_stages))))
    return GlobalOrder(ops, transfers)


def _transfer_keys(made: _Planned, time_us: np.ndarray, turn: int) -> Keys:
    # Any time after the producer's start and up to the consumer's start keeps the order valid.
    # After an op of no duration, the tie keeps the transfer behind it.
    at_once = made.end_us <= made.start_us
    return Keys(
        np.where(at_once, made.start_us, time_us),
        np.where(at_once, _TURN_OF_OPS, turn),
        np.where(at_once, made.tie + 0.5, made.tie),
    )


def _nearer_boundaries(made: _Planned, there: _Planned) -> np.ndarray:
    """When to place the transfers of some ops' results.

    A transfer is placed at the end of the op that makes its data, unless the receiver has just
    begun an op by then: if less time has passed since that start than is left until its end, the
    transfer goes before that op (but always after the start of the op that makes its data).
    """
    running = np.searchsorted(there.exact_start_us, made.end_us) - 1
    start_us, end_us = there.start_us[running], there.end_us[running]
    is_nearer = (running >= 0) & (made.end_us - start_us < end_us - made.end_us)
    return np.where(is_nearer & (start_us > made.start_us), start_us, made.end_us)


def _turn(flow: Flow, num_ranks: int) -> int:
    """Activations on even links, then on odd ones, then gradients likewise.

    The wrap-around link counts as the one after the last. If its number is even, its neighbour
    link 0-1 is even too, so it gets a turn of its own.
    """
    link = num_ranks - 1 if flow.goes_around else flow.link.lower
    alone = flow.goes_around and link % 2 == 0
    return 3 * (flow.payload is Payload.GRADIENT) + (2 if alone else link % 2)


_Positions = dict[Payload, list[list[int]]]
"""By chunk and microbatch, the position of the op that makes, or needs, a payload."""


def _positions(order: Sequence[Op], num_chunks: int, num_microbatches: int) -> _Positions:
    forward = [[0] * num_microbatches for _ in range(num_chunks)]
    backward = [[0] * num_microbatches for _ in range(num_chunks)]
    forward_kind, weight_kind = OpKind.F, OpKind.W
    for at, (kind, microbatch, chunk, _) in enumerate(order):
        if kind is forward_kind:
            forward[chunk][microbatch] = at
        elif kind is not weight_kind:
            backward[chunk][microbatch] = at
    return {Payload.ACTIVATION: forward, Payload.GRADIENT: backward}


def _ties(schedule: Schedule) -> list[np.ndarray]:
    """A number per op: no two are equal, and an op is over 0.5 above the ops that it needs."""
    # If every op takes one unit of time, an op starts at least one after the ops it needs.
    ran = replay(schedule.orders, schedule.num_microbatches, schedule.placement)
    schedule.require_complete(ran.ends)
    most = 2 * schedule.num_stages
    return [np.array(starts, np.float64) + rank / most for rank, starts in enumerate(ran.starts)]


def _rows(schedule: Schedule, places: GlobalOrder, routes: Routes) -> list[list[Instruction]]:
    """Each rank's ops and its ends of transfers, in the global order."""
    rows: list[list[tuple[Keys, list[Instruction]]]] = [
        [(keys, [*map(_run, order)])]
        for keys, order in zip(places.ops, schedule.orders, strict=True)
    ]
    for flow, keys in places.transfers:
        route = routes.get(flow.link, "direct")
        transfers = flow.transfers(schedule.num_microbatches)
        rows[flow.source.rank].append((keys, [Send(each, route) for each in transfers]))
        rows[flow.target.rank].append((keys, [Receive(each, route) for each in transfers]))
    return [*map(_in_order, rows)]


def _in_order(parts: Sequence[tuple[Keys, list[Instruction]]]) -> list[Instruction]:
    keys, instructions = zip(*parts, strict=True)
    time_us, turn, tie = map(np.concatenate, zip(*keys, strict=True))
    every = [*chain.from_iterable(instructions)]
    return [every[at] for at in np.lexsort((tie, turn, time_us)).tolist()]


def _place_delegated(program: RankInstructions) -> RankInstructions:
    """Moves each delegated send right after its op and each receive right before its op.

    So no direct transfer delays a delegated message. A channel delivers in the order of sending. If
    ops need messages in another order, earlier messages are received together with the first needed
    one; they have been sent by then.
    """
    moved = [step for step in program.instructions if _is_delegated(step)]
    sends = {sent_buffer(step.transfer): step for step in moved if isinstance(step, Send)}
    received = [step for step in moved if isinstance(step, Receive)]
    receives = _Receives(received, program.placement)
    placed: list[Instruction] = []
    for step, (read, made) in zip(program.instructions, uses(program), strict=True):
        if isinstance(step, Run):
            for buffer in read:
                placed += receives.up_to(buffer)
            placed.append(step)
            placed += [sends[buffer] for buffer in made if buffer in sends]
        elif not _is_delegated(step):
            placed.append(step)
    return replace(program, instructions=tuple(placed))


def _is_delegated(step: Instruction) -> TypeGuard[Send | Receive]:
    """Whether it is a delegated transfer of an op's result; tied gradients stay at the end."""
    if not isinstance(step, Send | Receive) or step.route != "delegated":
        return False
    return step.transfer.payload is not Payload.TIED


class _Receives:
    """A rank's delegated receives, by channel and in the order of sending."""

    def __init__(self, receives: Iterable[Receive], placement: Placement) -> None:
        self._placement = placement
        self._waiting: dict[tuple[Payload, int], deque[Receive]] = {}
        self._channel: dict[Buffer, tuple[Payload, int]] = {}
        for step in receives:
            channel = (step.transfer.payload, step.transfer.source)
            self._waiting.setdefault(channel, deque()).append(step)
            self._channel[received_buffer(step.transfer, placement)] = channel

    def up_to(self, buffer: Buffer) -> Iterator[Receive]:
        """Removes the receives of a buffer's channel up to the buffer's own, if still waiting."""
        while buffer in self._channel:
            step = self._waiting[self._channel[buffer]].popleft()
            del self._channel[received_buffer(step.transfer, self._placement)]
            yield step


def _step_end(rank: int, placement: Placement, routes: Routes, num_tied: int) -> list[Instruction]:
    """The exchange of tied gradients between the ends of the pipeline, and the update."""
    first, last = placement.first.rank, placement.last.rank
    if rank not in (first, last):
        return [Update()]
    if first == last:
        return [*(Reduce(index, None) for index in range(num_tied)), Update()]
    ending: list[Instruction] = []
    for index in range(num_tied):
        ending += _tied_exchange(rank, first, last, index, routes)
    return [*ending, Update()]


def _tied_exchange(
    rank: int, first: int, last: int, index: int, routes: Routes
) -> list[Instruction]:
    toward_last = Transfer(Payload.TIED, first, last, index)
    toward_first = Transfer(Payload.TIED, last, first, index)
    route = routes.get(toward_last.link, "direct")
    messages: list[Instruction] = (
        [Send(toward_last, route), Receive(toward_first, route)]
        if rank == first
        else [Receive(toward_last, route), Send(toward_first, route)]
    )
    return [*messages, Reduce(index, Buffer(BufferKind.TIED_GRADIENT, index))]


def forward_only(program: RankInstructions, first_microbatch: int = 0) -> RankInstructions:
    """Keeps only the forwards of a rank's instructions and their transfers, to evaluate a loss.

    It keeps the step's order, so it runs to completion as the step does. Nothing reads a stash, so
    it is freed right after its forward.

    Args:
        first_microbatch: The new number of microbatch 0, so that messages of the evaluation and of
            the step have different identities.
    """
    parts = map(_part_of_forward, program.instructions)
    kept = tuple(_renumbered(step, first_microbatch) for step in parts if step is not None)
    return replace(program, instructions=kept)


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
