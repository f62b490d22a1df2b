"""A planning problem in whole numbers: what the planner's inner loops read, forward or mirrored.

Run backwards in time, a pipeline is a pipeline again: B takes F's place on the way up the stages, F
takes B's on the way down, and W comes before instead of after. So one list scheduler serves both
directions: what it makes of the mirrored problem, read backwards, is a schedule of the real one.
"""

import math
from dataclasses import dataclass

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.simulator import stage_times

_PICOSECONDS_PER_MS = 10**9


@dataclass(frozen=True)
class Workload:
    """Durations in picoseconds and memory in whole units, one value per stage.

    Whole numbers, so that events at one instant compare equal on every machine.

    Args:
        forward_latency: From each stage to the next, 0 for the last.
        backward_latency: From each stage to the one before, 0 for the first.
        forward_holds: What a microbatch holds from F until B.
        backward_holds: What it holds from B until W.
        room: What all microbatches may hold together.
        mirrored: Whether time runs backwards: then forwards are really B, and W precedes them.
    """

    num_microbatches: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    forward_latency: tuple[int, ...]
    backward_latency: tuple[int, ...]
    forward_holds: tuple[int, ...]
    backward_holds: tuple[int, ...]
    room: tuple[int, ...]
    mirrored: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages, S."""
        return len(self.forward)

    def mirror(self) -> "Workload":
        """The same problem with time running backwards."""
        return Workload(
            self.num_microbatches,
            self.backward_input,
            self.forward,
            self.backward_weight,
            (*self.backward_latency[1:], 0),
            (0, *self.forward_latency[:-1]),
            self.forward_holds,
            self.backward_holds,
            self.room,
            not self.mirrored,
        )


def make_workload(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> Workload:
    """The problem in whole numbers.

    Args:
        costs: Durations of the ops, milliseconds.
        links: State of the links between neighbouring stages, milliseconds; a message takes its
            occupancy and latency, as over an idle link.
    """
    times = [_picoseconds(row) for row in stage_times(costs, links)]
    memory = limits.stage_memory(costs.num_stages, num_microbatches)
    forward, backward_input, backward_weight, up, down = zip(*times, strict=True)
    forward_holds, backward_holds, room = zip(*memory, strict=True)
    return Workload(
        num_microbatches,
        forward,
        backward_input,
        backward_weight,
        up,
        down,
        forward_holds,
        backward_holds,
        room,
    )


def to_picoseconds(milliseconds: float) -> int:
    """A duration of the rest of the planner, rounded down."""
    return math.floor(milliseconds * _PICOSECONDS_PER_MS)


def _picoseconds(times_ms: StageTimes) -> list[int]:
    return [round(value_ms * _PICOSECONDS_PER_MS) for value_ms in times_ms]
