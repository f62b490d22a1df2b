"""One global order of all ops and transfers of a step, which every rank's instructions follow.

Direct transfers are rendezvous on an in-order queue: both ends must reach them in the same order or
they deadlock. If every rank's instructions are a subsequence of one total order that respects the
data dependencies, the earliest unfinished item of that order can always run, so nothing deadlocks.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmorph.program.instructions import Routes, Transfer, output_transfer
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline


class Key(NamedTuple):
    """A place in the global order.

    At one instant transfers come before the ops that start then, and they take turns: links that
    share no stage have the same turn, so that no transfer waits for a chain of others.
    """

    time_us: int
    is_op: bool
    turn: int
    tie: float


@dataclass(frozen=True)
class Placed:
    """An op on a rank, or the transfer that the op makes, with its place in the global order."""

    key: Key
    rank: int
    op: Op
    transfer: Transfer | None = None


def global_order(schedule: Schedule, planned: Timeline, routes: Routes) -> list[Placed]:
    """All ops and transfers of a step in one order that every rank follows.

    Args:
        schedule: Which ops each stage runs, in which order.
        planned: When they run, by simulation of the same schedule.
        routes: The route of each link; a link that is not named is direct.

    Returns:
        Ops at their planned starts; each transfer at the end of the op that made it, except that a
        direct transfer whose receiver started an op only shortly before goes before that op: the
        receiver then waits a little instead of the sender a lot.
    """
    ties = _topological_index(schedule)
    placed: list[Placed] = []
    for rank, order in enumerate(schedule.orders):
        start_us, end_us = (
            _microseconds(planned.start_ms[rank]),
            _microseconds(planned.end_ms[rank]),
        )
        for op, start, end in zip(order, start_us, end_us, strict=True):
            tie = ties[rank, op]
            placed.append(Placed(Key(start, True, 0, tie), rank, op))
            transfer = output_transfer(op, rank, schedule.num_stages)
            if transfer is not None:
                direct = routes.get(transfer.link, "direct") == "direct"
                key = _transfer_key(transfer, start, end, tie, planned if direct else None)
                placed.append(Placed(key, rank, op, transfer))
    return sorted(placed, key=lambda item: item.key)


def _microseconds(times_ms: np.ndarray) -> list[int]:
    """Whole microseconds, in which sums of the same durations in another order are equal."""
    return np.rint(times_ms * 1e3).astype(np.int64).tolist()


def _transfer_key(
    transfer: Transfer, start_us: int, end_us: int, tie: int, planned: Timeline | None
) -> Key:
    """Any time after the producer's start and up to the consumer's start keeps the order sound."""
    if end_us <= start_us:  # an op that takes no time: its transfer stays behind it by the tie
        return Key(start_us, True, 0, tie + 0.5)
    boundary_us = _nearer_boundary(transfer.destination, end_us, planned) if planned else None
    if boundary_us is not None and boundary_us > start_us:
        return Key(boundary_us, False, _turn(transfer), tie)
    return Key(end_us, False, _turn(transfer), tie)


def _turn(transfer: Transfer) -> int:
    """Downstream on even links, then on odd ones, then upstream likewise."""
    is_upstream = transfer.source > transfer.destination
    return 2 * is_upstream + transfer.link.lower % 2


def _nearer_boundary(rank: int, time_us: int, planned: Timeline) -> int | None:
    """The start of the op that `rank` is running at a time, if that is nearer than its end."""
    position = int(np.searchsorted(planned.start_ms[rank] * 1e3, time_us)) - 1
    if position < 0:
        return None
    start_us = round(float(planned.start_ms[rank][position]) * 1e3)
    end_us = round(float(planned.end_ms[rank][position]) * 1e3)
    return start_us if time_us - start_us < end_us - time_us else None


def _topological_index(schedule: Schedule) -> dict[tuple[int, Op], int]:
    """Positions of all ops in one order that respects each stage's order and the data."""
    index: dict[tuple[int, Op], int] = {}
    remaining = [deque(order) for order in schedule.orders]
    ready = deque(range(schedule.num_stages))
    while ready:
        rank = ready.popleft()
        while remaining[rank] and _input_made(remaining[rank][0], rank, schedule, index):
            op = remaining[rank].popleft()
            index[rank, op] = len(index)
            transfer = output_transfer(op, rank, schedule.num_stages)
            if transfer is not None:
                ready.append(transfer.destination)
    if any(remaining):
        raise ValueError(f"schedule {schedule.name!r} cannot run to completion:\n{schedule}")
    return index


def _input_made(op: Op, rank: int, schedule: Schedule, made: dict[tuple[int, Op], int]) -> bool:
    """Whether the neighbour that feeds this op, if any does, has run its own."""
    for neighbour in (rank - 1, rank + 1):
        if 0 <= neighbour < schedule.num_stages and (neighbour, op) not in made:
            transfer = output_transfer(op, neighbour, schedule.num_stages)
            if transfer is not None and transfer.destination == rank:
                return False
    return True
