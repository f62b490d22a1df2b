"""Builds a schedule by running the pipeline and choosing, whenever a stage falls idle, its next op.

Source: Algorithms 3 and 4, driven by events rather than by a time step, so decisions happen at the
exact instant data arrives. Three corrections: data arrives at the END of the op that produced it
plus the latency; a W needs its own stage's B, and the last stage's B its own F; and the run ends
when every op has, not when no op is available. One addition: a stage at its memory cap refuses F.

Times are whole picoseconds here, so that events at one instant compare equal on every machine.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import stage_times

_PICOSECONDS_PER_MS = 10**9


@dataclass(slots=True)
class _Stage:
    """What a stage knows when it chooses: what has arrived, what has run, what it may hold."""

    warmup: int
    cap: int
    live_until_weight: bool
    durations: tuple[int, int, int]
    forward_arrivals: list[int] = field(default_factory=list)
    backward_arrivals: list[int] = field(default_factory=list)
    forwards: int = 0
    inputs: int = 0
    weights: int = 0
    free_at: int = 0
    order: list[Op] = field(default_factory=list)

    def select(self, now: int) -> OpKind | None:
        """The op to start now: forwards only in warm-up, then B before F before W; or none."""
        if self.forwards < self.warmup:
            return OpKind.F if self._forward_is_ready(now) else None
        if self.inputs < len(self.backward_arrivals) and self.backward_arrivals[self.inputs] <= now:
            return OpKind.B
        if self._forward_is_ready(now) and self._has_room():
            return OpKind.F
        return OpKind.W if self.weights < self.inputs else None

    def start(self, kind: OpKind, now: int) -> int:
        """Runs the next op of ``kind`` from ``now`` on; returns when it ends."""
        if kind is OpKind.F:
            index, microbatch = 0, self.forwards
            self.forwards += 1
        elif kind is OpKind.B:
            index, microbatch = 1, self.inputs
            self.inputs += 1
        else:
            index, microbatch = 2, self.weights
            self.weights += 1
        self.order.append(Op(kind, microbatch))
        self.free_at = now + self.durations[index]
        return self.free_at

    def _forward_is_ready(self, now: int) -> bool:
        arrivals = self.forward_arrivals
        return self.forwards < len(arrivals) and arrivals[self.forwards] <= now

    def _has_room(self) -> bool:
        released = self.weights if self.live_until_weight else self.inputs
        return self.forwards - released < self.cap


def select_ops(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    warmup_forwards: Sequence[int],
    name: str = "paper",
) -> Schedule:
    """The schedule that greedy selection makes: warm up, then B before F before W.

    It always completes: a warm-up is no longer than what earlier stages can send without a
    backward, and after it a stage at its cap holds either a microbatch whose B will come or one
    whose W can run.

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.
        limits: Memory caps.
        num_microbatches: Number of microbatches, N.
        warmup_forwards: Forwards each stage runs before any backward: non-increasing, from 1 to N,
            and within the caps of all earlier stages. A stage may run more before its first B.
        name: The schedule's name.

    Returns:
        A valid schedule whose stages hold no more than their caps.
    """
    times = [_in_picoseconds(row) for row in stage_times(costs, links)]
    caps = limits.caps(costs.num_stages, num_microbatches)
    stages = [
        _Stage(warmup, cap, limits.live_until == "W", (row[0], row[1], row[2]))
        for warmup, cap, row in zip(warmup_forwards, caps, times, strict=True)
    ]
    stages[0].forward_arrivals = [0] * num_microbatches
    _run(stages, [row[3:] for row in times])
    return Schedule(name, num_microbatches, tuple(tuple(stage.order) for stage in stages))


def _run(stages: list[_Stage], latencies: list[tuple[int, ...]]) -> None:
    """Wakes stages in order of time until none has anything left to wait for."""
    events = [(0, stage) for stage in range(len(stages))]
    while events:
        now, at = heapq.heappop(events)
        stage = stages[at]
        if stage.free_at > now:
            continue
        kind = stage.select(now)
        if kind is None:
            continue
        end = stage.start(kind, now)
        heapq.heappush(events, (end, at))
        delivery = _deliver(stages, latencies[at], at, kind, end)
        if delivery is not None and delivery != (end, at):
            heapq.heappush(events, delivery)


def _deliver(
    stages: list[_Stage], latencies: tuple[int, ...], at: int, kind: OpKind, end: int
) -> tuple[int, int] | None:
    """Sends an op's output to the stage that needs it; returns when and where it arrives."""
    if kind is OpKind.F and at + 1 < len(stages):
        arrival, to = end + latencies[0], at + 1
        stages[to].forward_arrivals.append(arrival)
    elif kind is OpKind.F:
        arrival, to = end, at
        stages[to].backward_arrivals.append(arrival)
    elif kind is OpKind.B and at > 0:
        arrival, to = end + latencies[1], at - 1
        stages[to].backward_arrivals.append(arrival)
    else:
        return None
    return arrival, to


def _in_picoseconds(times: StageTimes) -> tuple[int, ...]:
    return tuple(round(value * _PICOSECONDS_PER_MS) for value in times)
