"""Lower bounds on the step time: of every schedule, and of schedules with given warm-ups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxmorph.placement import Placement
from jaxmorph.schedule.costs import NO_LATENCY, Limits, Links, StageCosts, StageMemory
from jaxmorph.schedule.list_schedule import Workload
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.simulate import stage_times

_NO_LIMITS = Limits()
_ROUNDING = 1e-9
"""Relative: bound and makespan sum the same times in different orders."""


def lower_bound_ms(
    costs: StageCosts,
    num_microbatches: int,
    links: Links = NO_LATENCY,
    limits: Limits = _NO_LIMITS,
    placement: Placement | None = None,
) -> float:
    """A time below which no schedule can finish the step, in milliseconds.

    It is the largest of several bounds per stage. A stage cannot start before the first microbatch
    has reached it, nor run a B before that microbatch has come back from the last stage; until then
    it runs forwards only, within its cap. Its last B is followed by the gradient's path up to stage
    0, a W there, and all W that the stage has put off. With a cap, a microbatch takes the place of
    one that has finished its round trip.

    Args:
        links: Messages are assumed to overlap.
        placement: None: one chunk per rank. With more than one, caps are ignored.
    """
    placement = placement or Placement(costs.num_stages)
    times = stage_times(costs, links, placement)
    alone = LoneTimes.of(times)
    work = max(_work_bounds(times, alone, placement, num_microbatches, limits))
    if placement.num_chunks > 1:
        return work
    memory = limits.stage_memory(costs.num_stages, num_microbatches)
    return max(work, *_turn_bounds(times, alone, memory, num_microbatches))


def certified_ms(bound_ms: float, makespan_ms: float) -> float:
    """The bound, or the makespan where the bound exceeds it by rounding alone.

    Raises:
        ArithmeticError: The bound exceeds the makespan by more: one of the two is wrong.
    """
    if bound_ms > makespan_ms * (1 + _ROUNDING):
        raise ArithmeticError(
            f"got a lower bound of {bound_ms!r} ms for a schedule of {makespan_ms!r} ms, expected "
            "one that the schedule does not beat"
        )
    return min(bound_ms, makespan_ms)


@dataclass(frozen=True)
class LoneTimes:
    """The times of a microbatch that is alone in the pipeline, for each virtual stage.

    Args:
        head: From the step's start until it reaches the stage.
        first_backward: From the step's start until its gradient comes back to the stage.
        tail: From the end of the stage's B to the end of the step.
    """

    head: list[float]
    first_backward: list[float]
    tail: list[float]

    @classmethod
    def of(cls, times: Sequence[StageTimes]) -> "LoneTimes":
        """From each virtual stage's times, through the pipeline and back."""
        steps = [stage.forward + stage.forward_latency for stage in times]
        head = list(accumulate(steps[:-1], initial=0.0))
        steps_up = (stage.backward_input + stage.backward_latency for stage in reversed(times[1:]))
        first_backward = list(accumulate(steps_up, initial=sum(steps)))[::-1]
        return cls(head, first_backward, _tails(times))


def _tails(times: Sequence[StageTimes]) -> list[float]:
    """What must still run after each stage's last B: its W, or B of the stages up to stage 0."""
    tails = [times[0].backward_weight]
    for before, here in pairwise(times):
        upstream = here.backward_latency + before.backward_input + tails[-1]
        tails.append(max(here.backward_weight, upstream))
    return tails


def _work_bounds(
    times: Sequence[StageTimes],
    alone: LoneTimes,
    placement: Placement,
    num_microbatches: int,
    limits: Limits,
) -> Iterator[float]:
    """All of a rank's forwards, then all B, then either all W or the last gradient's tail."""
    caps = limits.caps(placement.num_ranks, num_microbatches)
    count = num_microbatches * placement.num_chunks
    for rank, cap in enumerate(caps):
        own = placement.own_stages(rank)
        first, last = own[0], own[-1]
        late = max(0, num_microbatches - cap) if placement.num_chunks == 1 else 0
        row = times[first]
        forwards_done = max(
            alone.head[first] + count * row.forward,
            alone.first_backward[last] + late * row.forward,
        )
        inputs_done = forwards_done + count * row.backward_input
        yield inputs_done + max(count * row.backward_weight, alone.tail[first])


def _turn_bounds(
    times: Sequence[StageTimes],
    alone: LoneTimes,
    memory: Sequence[StageMemory],
    num_microbatches: int,
) -> Iterator[float]:
    yield 0.0
    for stage, room in enumerate(memory):
        for cap, until_weight in room.slots(num_microbatches):
            yield turn_bound(times, alone, stage, cap, num_microbatches, until_weight=until_weight)


def turn_bound(
    times: Sequence[StageTimes],
    alone: LoneTimes,
    stage: int,
    cap: int,
    num_microbatches: int,
    *,
    until_weight: bool,
) -> float:
    """The bound from a stage with room for ``cap`` microbatches until B, or until W; 0 if all fit.

    A microbatch starts only when the one ``cap`` places before it has left. So the last ones start
    after all these turns, and then pass every later stage one after another, down and up.
    """
    turns = (num_microbatches - 1) // cap
    if not turns:
        return 0.0
    round_trip = _round_trip(times, alone, stage)
    held = round_trip + (times[stage].backward_weight if until_weight else 0.0)
    started = alone.head[stage] + turns * held
    rest = num_microbatches - turns * cap
    return max(
        started + _passing(times, alone, stage, rest) + alone.tail[stage],
        started + held + (rest - 1) * (held - round_trip),
    )


def _passing(times: Sequence[StageTimes], alone: LoneTimes, stage: int, count: int) -> float:
    """From a stage's F to its last B, for some microbatches that start there together."""
    longest = 0.0
    for below in range(stage, len(times)):
        row, one = times[below], _round_trip(times, alone, below)
        together = max(
            count * (row.forward + row.backward_input),
            one + (count - 1) * max(row.forward, row.backward_input),
        )
        longest = max(longest, _round_trip(times, alone, stage) - one + together)
    return longest


def _round_trip(times: Sequence[StageTimes], alone: LoneTimes, stage: int) -> float:
    """From a stage's F to the end of its B."""
    return alone.first_backward[stage] - alone.head[stage] + times[stage].backward_input


class WarmupBound:
    """Lower bounds of one problem for given warm-ups.

    A stage runs its warm-up forwards before its first B and never has more forwards waiting for B.
    So microbatches take turns in that many places. The bounds are in whole picoseconds and compare
    exactly with makespans. The workload must not be mirrored; its memory is ignored.
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
        self._alone = LoneTimes.of(self._times)
        self._turns: dict[tuple[int, int], float] = {}

    def of(self, warmup_forwards: Sequence[int]) -> float:
        """The bound, picoseconds, for each stage's warm-up forwards, from 1 to N."""
        turns = map(self._turn_bound, range(len(self._times)), warmup_forwards)
        return max(*turns, *self._start_bounds(warmup_forwards))

    def _turn_bound(self, stage: int, cap: int) -> float:
        if (stage, cap) not in self._turns:
            self._turns[stage, cap] = turn_bound(
                self._times, self._alone, stage, cap, self._count, until_weight=False
            )
        return self._turns[stage, cap]

    def _start_bounds(self, warmup_forwards: Sequence[int]) -> Iterator[float]:
        """Each stage's earliest first B plus its remaining work.

        The first B needs the gradient of the next stage, which has its own warm-up before it.
        """
        gradient = 0.0
        for stage in reversed(range(len(self._times))):
            row, forwards = self._times[stage], warmup_forwards[stage]
            warm = self._alone.head[stage] + forwards * row.forward
            first = max(gradient, self._alone.first_backward[stage], warm)
            inputs_done = first + (self._count - forwards) * row.forward
            inputs_done += self._count * row.backward_input
            yield inputs_done + max(self._count * row.backward_weight, self._alone.tail[stage])
            gradient = first + row.backward_input + row.backward_latency
