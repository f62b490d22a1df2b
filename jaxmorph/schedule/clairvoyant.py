"""The best order of a step whose every message's delay is known beforehand, and how good it can be.

What orders that are chosen while a step runs are measured against.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

from jaxmorph.schedule.costs import NO_LATENCY, Limits, StageCosts
from jaxmorph.schedule.improvement import Search
from jaxmorph.schedule.list_schedule import ListSchedule
from jaxmorph.schedule.numbering import KINDS, to_schedule
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.order_graph import Arcs
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.workload import make_workload, to_picoseconds

DelaysOfOps = Callable[[int, Op], float]
"""How long what a stage's op made is on its way, milliseconds."""

_NO_LIMITS = Limits()
_PICOSECONDS_PER_MS = 1e9
_SLACK_PS = 1_000
_SHARES = ((8, 0.4), (2, 0.3), (1, 0.3))
"""How many of the best searches go on in each round, and their share of the effort together."""


@dataclass(frozen=True)
class Clairvoyant:
    """What could have been done.

    Attributes:
        schedule: The shortest order found.
        makespan_ms: How long it takes, milliseconds.
        lower_bound_ms: A makespan that no order beats, milliseconds.
    """

    schedule: Schedule
    makespan_ms: float
    lower_bound_ms: float


def clairvoyant_schedule(
    costs: StageCosts,
    delay_ms: DelaysOfOps,
    starts: Sequence[Schedule],
    limits: Limits = _NO_LIMITS,
    effort: int = 1_000_000,
) -> Clairvoyant:
    """The shortest order found by searching from several, with every message's delay known.

    Args:
        costs: Durations of the ops, milliseconds.
        delay_ms: Each message's delay, told by the stage and the F or B that made it; a message
            overtakes others if it can.
        starts: Split schedules of one chunk within the caps, to search from; at least one.
        effort: How many ops to visit: the same work on every machine.

    Returns:
        The order, never longer than any of those it began with.
    """
    count = starts[0].num_microbatches
    workload = make_workload(costs, NO_LATENCY, limits, count)
    arcs = _with_delays(Arcs.of(workload), delay_ms, count)
    bound_ms = lower_bound_of_messages_ms(costs, delay_ms, count, limits)
    bound = to_picoseconds(bound_ms) + _SLACK_PS
    searches = [
        Search(workload, arcs, ListSchedule(_numbers(start, costs), 0), bound) for start in starts
    ]
    for most, share in _SHARES:
        searches.sort(key=lambda search: search.best.makespan)
        del searches[most:]
        for search in searches:
            search.run(int(effort * share / len(searches)))
    best = min((search.best for search in searches), key=lambda found: found.makespan)
    schedule = to_schedule("clairvoyant", costs.num_stages, count, best.numbers)
    makespan_ms = best.makespan / _PICOSECONDS_PER_MS
    return Clairvoyant(schedule, makespan_ms, min(bound_ms, makespan_ms))


def lower_bound_of_messages_ms(
    costs: StageCosts,
    delay_ms: DelaysOfOps,
    num_microbatches: int,
    limits: Limits = _NO_LIMITS,
) -> float:
    """A makespan that no order beats, with every message's delay as it is.

    Every op has a head, the longest way of messages and of ops of one kind that leads to it, and a
    tail likewise. With these a stage is one machine, and no order of its ops ends before the one
    that may interrupt them, which always runs the op with the longest tail.

    Args:
        costs: Durations of the ops, milliseconds.
        delay_ms: Each message's delay, told by the stage and the F or B that made it.
        limits: Memory caps; how many microbatches may wait for their B counts.

    Returns:
        The bound, milliseconds.
    """
    caps = limits.caps(costs.num_stages, num_microbatches)
    after = _Precedences(costs, delay_ms, num_microbatches, caps)
    heads, tails = after.heads(), after.tails()
    return max(
        _interruptible_ms(
            [
                (heads[key], costs.duration_ms(stage, key[1]), tails[key])
                for key in heads
                if key[0] == stage
            ]
        )
        for stage in range(costs.num_stages)
    )


_Key = tuple[int, OpKind, int]  # stage, kind, microbatch


@dataclass(frozen=True)
class _Precedences:
    """What has to run before what, whatever the order."""

    costs: StageCosts
    delay_ms: DelaysOfOps
    count: int
    caps: Sequence[int]

    def heads(self) -> dict[_Key, float]:
        """The earliest start of every op."""
        heads: dict[_Key, float] = {}
        for key in self._keys():
            befores = (
                heads[before] + self._duration_ms(before) + lag_ms
                for before, lag_ms in self._before(key)
            )
            heads[key] = max(befores, default=0.0)
        return heads

    def tails(self) -> dict[_Key, float]:
        """The least time from every op's end to the end of the step."""
        tails = dict.fromkeys(self._keys(), 0.0)
        for key in reversed(tails):
            rest_ms = tails[key] + self._duration_ms(key)
            for before, lag_ms in self._before(key):
                tails[before] = max(tails[before], rest_ms + lag_ms)
        return tails

    def _keys(self) -> Iterator[_Key]:
        """Every op after all that it needs: microbatch by microbatch, up the stages and down."""
        stages = range(self.costs.num_stages)
        for microbatch in range(self.count):
            yield from ((stage, OpKind.F, microbatch) for stage in stages)
            yield from ((stage, OpKind.B, microbatch) for stage in reversed(stages))
            yield from ((stage, OpKind.W, microbatch) for stage in stages)

    def _before(self, key: _Key) -> Iterator[tuple[_Key, float]]:
        stage, kind, microbatch = key
        if microbatch:
            yield (stage, kind, microbatch - 1), 0.0
        if kind is OpKind.W:
            yield (stage, OpKind.B, microbatch), 0.0
            return
        if kind is OpKind.B:
            yield (stage, OpKind.F, microbatch), 0.0
        elif microbatch >= self.caps[stage]:
            yield (stage, OpKind.B, microbatch - self.caps[stage]), 0.0
        source = stage - 1 if kind is OpKind.F else stage + 1
        if 0 <= source < self.costs.num_stages:
            yield (source, kind, microbatch), self.delay_ms(source, Op(kind, microbatch))

    def _duration_ms(self, key: _Key) -> float:
        return self.costs.duration_ms(key[0], key[1])


def _interruptible_ms(ops: list[tuple[float, float, float]]) -> float:
    """The makespan of one machine that may interrupt ops, given heads, durations and tails.

    Source: Jackson's preemptive schedule, the classic bound of job-shop scheduling.
    """
    coming = ops[::]
    heapify(coming)
    waiting: list[tuple[float, float]] = []  # minus the tail, and what is left to run
    now_ms = longest_ms = 0.0
    while coming or waiting:
        if not waiting:
            now_ms = max(now_ms, coming[0][0])
        while coming and coming[0][0] <= now_ms:
            _, duration_ms, tail_ms = heappop(coming)
            heappush(waiting, (-tail_ms, duration_ms))
        minus_tail_ms, left_ms = waiting[0]
        next_ms = coming[0][0] if coming else float("inf")
        if now_ms + left_ms <= next_ms:
            heappop(waiting)
            now_ms += left_ms
            longest_ms = max(longest_ms, now_ms - minus_tail_ms)
        else:
            heapreplace(waiting, (minus_tail_ms, left_ms - (next_ms - now_ms)))
            now_ms = next_ms
    return longest_ms


def _with_delays(arcs: Arcs, delay_ms: DelaysOfOps, count: int) -> Arcs:
    """The arcs with each message's own delay."""
    source_lag, user_lag = list(arcs.source_lag), list(arcs.user_lag)
    for user, source in enumerate(arcs.source):
        if source >= 0:
            stage, rest = divmod(source, arcs.per_stage)
            kind, microbatch = divmod(rest, count)
            lag = to_picoseconds(delay_ms(stage, Op(KINDS[kind], microbatch)))
            source_lag[user] = user_lag[source] = lag
    return replace(arcs, source_lag=source_lag, user_lag=user_lag)


def _numbers(schedule: Schedule, costs: StageCosts) -> list[int]:
    """A schedule's ops by their numbers, each after all that it needs."""
    count = schedule.num_microbatches
    placed = sorted(
        (span.end_ms, span.start_ms, span.stage * 3 * count + KINDS.index(span.op.kind) * count
         + span.op.microbatch)
        for span in simulate(schedule, costs).spans()
    )  # fmt: skip
    return [number for _, _, number in placed]
