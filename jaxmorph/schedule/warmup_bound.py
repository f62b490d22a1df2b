"""A step time that no schedule with given warm-ups can beat."""

from collections.abc import Iterator, Sequence

from jaxmorph.schedule.bound import Ways, turn_bound
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.workload import Workload


class WarmupBound:
    """The bounds of one problem, for as many warm-ups as are asked about.

    A stage runs as many forwards as its warm-up says before its first B, and never has more of them
    waiting for their B: so microbatches take turns in that many places. All is in whole
    picoseconds, so that bounds and makespans compare exactly.

    Args:
        workload: The problem, not mirrored; its memory is not considered.
    """

    def __init__(self, workload: Workload) -> None:
        self._count = workload.num_microbatches
        rows = zip(
            workload.forward,
            workload.backward_input,
            workload.backward_weight,
            workload.forward_latency,
            workload.backward_latency,
            strict=True,
        )
        self._times = [StageTimes(*row) for row in rows]
        self._ways = Ways.of(self._times, num_chunks=1)
        self._turns: dict[tuple[int, int], float] = {}

    def of(self, warmup_forwards: Sequence[int]) -> float:
        """A makespan that no schedule with these warm-ups beats, picoseconds.

        Args:
            warmup_forwards: Each stage's, from 1 to N.
        """
        turns = map(self._turn_bound, range(len(self._times)), warmup_forwards)
        return max(*turns, *self._start_bounds(warmup_forwards))

    def _turn_bound(self, stage: int, cap: int) -> float:
        if (stage, cap) not in self._turns:
            self._turns[stage, cap] = turn_bound(
                self._times, self._ways, stage, cap, self._count, until_weight=False
            )
        return self._turns[stage, cap]

    def _start_bounds(self, warmup_forwards: Sequence[int]) -> Iterator[float]:
        """What each stage has left when its first B can start at the earliest.

        That needs the gradient of the stage behind, which has a warm-up of its own before it.
        """
        gradient = 0.0
        for stage in reversed(range(len(self._times))):
            row, forwards = self._times[stage], warmup_forwards[stage]
            warm = self._ways.head[stage] + forwards * row.forward
            first = max(gradient, self._ways.first_backward[stage], warm)
            inputs_done = first + (self._count - forwards) * row.forward
            inputs_done += self._count * row.backward_input
            yield inputs_done + max(self._count * row.backward_weight, self._ways.tail[stage])
            gradient = first + row.backward_input + row.backward_latency
