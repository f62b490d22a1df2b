"""One global order of all ops and transfers of a step, which every rank's instructions follow.

Direct transfers are rendezvous on an in-order queue: both ends must reach them in the same order or
they deadlock. If every rank's instructions are a subsequence of one total order that respects the
data dependencies, the earliest unfinished item of that order can always run, so nothing deadlocks.
"""

from bisect import bisect_left
from collections import deque
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from jaxmorph.program.dataflow import feeder, output_transfer
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.program.pipeline import Pipeline
from jaxmorph.schedule.costs import Routes
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


class Placed(NamedTuple):
    """An op on a rank, or the transfer that the op makes, with its place in the global order."""

    key: Key
    rank: int
    op: Op
    transfer: Transfer | None = None


class _Planned(NamedTuple):
    """When a rank's ops run: their starts in microseconds, starts and ends in whole ones."""

    exact_start_us: list[float]
    start_us: list[int]
    end_us: list[int]

    @classmethod
    def of(cls, start_ms: np.ndarray, end_ms: np.ndarray) -> "_Planned":
        """The times of a rank in a timeline."""
        return cls((start_ms * 1e3).tolist(), _microseconds(start_ms), _microseconds(end_ms))


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
    pipeline = Pipeline(schedule.num_stages, schedule.num_chunks)
    ties = _topological_index(schedule, pipeline)
    times = [*map(_Planned.of, planned.start_ms, planned.end_ms)]
    placed: list[Placed] = []
    for rank, order in enumerate(schedule.orders):
        _, start_us, end_us = times[rank]
        for op, start, end in zip(order, start_us, end_us, strict=True):
            made = Key(start, True, 0, ties[rank, op])
            placed.append(Placed(made, rank, op))
            transfer = output_transfer(op, rank, pipeline)
            if transfer is not None:
                direct = routes.get(transfer.link, "direct") == "direct"
                turn = _turn(transfer, pipeline.num_ranks)
                there = times[transfer.destination] if direct else None
                placed.append(Placed(_transfer_key(made, end, turn, there), rank, op, transfer))
    return sorted(placed, key=attrgetter("key"))


def _microseconds(times_ms: np.ndarray) -> list[int]:
    """Whole microseconds, in which sums of the same durations in another order are equal."""
    return np.rint(times_ms * 1e3).astype(np.int64).tolist()


def _transfer_key(made: Key, end_us: int, turn: int, there: _Planned | None) -> Key:
    """Any time after the producer's start and up to the consumer's start keeps the order sound."""
    if end_us <= made.time_us:  # an op that takes no time: its transfer stays behind it by the tie
        return made._replace(tie=made.tie + 0.5)
    boundary_us = _nearer_boundary(end_us, there) if there else None
    if boundary_us is not None and boundary_us > made.time_us:
        return Key(boundary_us, False, turn, made.tie)
    return Key(end_us, False, turn, made.tie)


def _turn(transfer: Transfer, num_ranks: int) -> int:
    """Activations on even links, then on odd ones, then gradients likewise.

    The link around the ranks counts as the one after the last; where that is even, so is link 0-1
    beside it, and it has a turn of its own.
    """
    link = num_ranks - 1 if transfer.goes_around else transfer.link.lower
    alone = transfer.goes_around and link % 2 == 0
    return 3 * (transfer.payload is Payload.GRADIENT) + (2 if alone else link % 2)


def _nearer_boundary(time_us: int, there: _Planned) -> int | None:
    """The start of the op that a rank is running at a time, if that is nearer than its end."""
    position = bisect_left(there.exact_start_us, time_us) - 1
    if position < 0:
        return None
    start_us, end_us = there.start_us[position], there.end_us[position]
    return start_us if time_us - start_us < end_us - time_us else None


def _topological_index(schedule: Schedule, pipeline: Pipeline) -> dict[tuple[int, Op], int]:
    """Positions of all ops in one order that respects each stage's order and the data."""
    index: dict[tuple[int, Op], int] = {}
    remaining = [deque(order) for order in schedule.orders]
    ready = deque(range(schedule.num_stages))
    while ready:
        rank = ready.popleft()
        while remaining[rank] and _input_made(remaining[rank][0], rank, pipeline, index):
            op = remaining[rank].popleft()
            index[rank, op] = len(index)
            transfer = output_transfer(op, rank, pipeline)
            if transfer is not None:
                ready.append(transfer.destination)
    if any(remaining):
        raise ValueError(f"schedule {schedule.name!r} cannot run to completion:\n{schedule}")
    return index


def _input_made(op: Op, rank: int, pipeline: Pipeline, made: dict[tuple[int, Op], int]) -> bool:
    """Whether the op that feeds this one, if any does, has run."""
    source = feeder(op, rank, pipeline)
    return source is None or source in made
