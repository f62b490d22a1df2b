"""A step time that no schedule can beat, or none with given warm-ups: every plan is held to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxmorph.schedule.costs import NO_LATENCY, Limits, Links, StageCosts, StageMemory
from jaxmorph.schedule.list_schedule import Workload
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.simulate import stage_times

_NO_LIMITS = Limits()
_ROUNDING = 1e-9
"""Relative: bound and makespan are summed in different orders, and may differ by that alone."""


def lower_bound_ms(
    costs: StageCosts,
    num_microbatches: int,
    links: Links = NO_LATENCY,
    limits: Limits = _NO_LIMITS,
    num_chunks: int = 1,
) -> float:
    """A time below which no schedule can finish the step, whatever its order.

    Each stage gives bounds of its own, and the largest counts. A stage cannot start before its
    head (the first microbatch's way down to it) nor run a B before that microbatch came back from
    the last stage; between them it runs forwards only, no more than fit its cap. After its last B
    come its tail (the way of that gradient up to stage 0, and a W there) and all W it put off.
    With a cap, a microbatch takes the place of one that has made its round trip.

    Args:
        links: State of the links, milliseconds; messages are taken to overlap.
        num_chunks: Virtual stages per rank, V. With more than one, caps are not considered.

    Returns:
        The bound, milliseconds; exact but for floating-point rounding.
    """
    times = stage_times(costs, links, num_chunks)
    ways = Ways.of(times, num_chunks)
    work = max(_work_bounds(times, ways, costs, num_microbatches, num_chunks, limits))
    if num_chunks > 1:
        return work
    memory = limits.stage_memory(costs.num_stages, num_microbatches)
    return max(work, *_turn_bounds(times, ways, memory, num_microbatches))


def certified_ms(bound_ms: float, makespan_ms: float) -> float:
    """A bound as it holds for a simulated schedule: without the rounding that exceeds its makespan.

    Raises:
        ArithmeticError: If it exceeds the makespan by more: then one of the two is wrong.
    """
    if bound_ms > makespan_ms * (1 + _ROUNDING):
        raise ArithmeticError(
            f"got a lower bound of {bound_ms!r} ms for a schedule of {makespan_ms!r} ms, expected "
            "one that the schedule does not beat"
        )
    return min(bound_ms, makespan_ms)


@dataclass(frozen=True)
class Ways:
    """How long a microbatch on its own takes, for each stage.

    Args:
        head: From the step's start until it reaches the stage.
        first_backward: From the step's start until its gradient has come back to the stage.
        tail: From the end of the stage's last B to the end of the step.
    """

    head: list[float]
    first_backward: list[float]
    tail: list[float]

    @classmethod
    def of(cls, times: Sequence[StageTimes], num_chunks: int) -> "Ways":
        """The ways down the stages, through all chunks, and up again."""
        steps = [stage.forward + stage.forward_latency for stage in times]
        head = list(accumulate(steps[:-1], initial=0.0))
        turn = num_chunks * sum(steps) - times[-1].forward_latency  # the last chunk goes nowhere
        steps_up = (stage.backward_input + stage.backward_latency for stage in reversed(times[1:]))
        first_backward = list(accumulate(steps_up, initial=turn))[::-1]
        return cls(head, first_backward, _tails(times))


def _tails(times: Sequence[StageTimes]) -> list[float]:
    """What must still run after each stage's last B: a W, or the way up and a W there."""
    tails = [times[0].backward_weight]
    for above, here in pairwise(times):
        way_up = here.backward_latency + above.backward_input + tails[-1]
        tails.append(max(here.backward_weight, way_up))
    return tails


def _work_bounds(
    times: Sequence[StageTimes],
    ways: Ways,
    costs: StageCosts,
    num_microbatches: int,
    num_chunks: int,
    limits: Limits,
) -> Iterator[float]:
    """All of a stage's forwards, then all B, then either all W or the last gradient's tail."""
    caps = limits.caps(costs.num_stages, num_microbatches)
    count = num_microbatches * num_chunks
    for stage, row in enumerate(times):
        late = max(0, num_microbatches - caps[stage]) if num_chunks == 1 else 0
        forwards_done = max(
            ways.head[stage] + count * row.forward,
            ways.first_backward[stage] + late * row.forward,
        )
        inputs_done = forwards_done + count * row.backward_input
        yield inputs_done + max(count * row.backward_weight, ways.tail[stage])


def _turn_bounds(
    times: Sequence[StageTimes],
    ways: Ways,
    memory: Sequence[StageMemory],
    num_microbatches: int,
) -> Iterator[float]:
    """With room for c microbatches, every c-th one starts only when the one c before it has left.

    So the last ones start no earlier than after all these turns, and then have to pass every stage
    further down one after another, twice.
    """
    yield 0.0
    for stage, room in enumerate(memory):
        for cap, until_weight in room.slots(num_microbatches):
            yield turn_bound(times, ways, stage, cap, num_microbatches, until_weight=until_weight)


def turn_bound(
    times: Sequence[StageTimes],
    ways: Ways,
    stage: int,
    cap: int,
    num_microbatches: int,
    *,
    until_weight: bool,
) -> float:
    """The bound by the turns that microbatches take in a stage's places; 0 without turns.

    Args:
        cap: How many places it has.
        until_weight: Whether a place is kept until W, or only until B.
    """
    turns = (num_microbatches - 1) // cap
    if not turns:
        return 0.0
    round_trip = ways.first_backward[stage] - ways.head[stage] + times[stage].backward_input
    held = round_trip + (times[stage].backward_weight if until_weight else 0.0)
    started = ways.head[stage] + turns * held
    rest = num_microbatches - turns * cap
    return max(
        started + _passing(times, ways, stage, rest) + ways.tail[stage],
        started + held + (rest - 1) * (held - round_trip),
    )


def _passing(times: Sequence[StageTimes], ways: Ways, stage: int, count: int) -> float:
    """From a stage's F to its last B, for some microbatches that start there together."""
    round_trip = ways.first_backward[stage] - ways.head[stage] + times[stage].backward_input
    longest = 0.0
    for below in range(stage, len(times)):
        row = times[below]
        alone = ways.first_backward[below] - ways.head[below] + row.backward_input
        together = max(
            count * (row.forward + row.backward_input),
            alone + (count - 1) * max(row.forward, row.backward_input),
        )
        longest = max(longest, round_trip - alone + together)
    return longest


class WarmupBound:
    """The bounds of one problem for any warm-ups: makespans that no schedule with them beats.

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
        """The bound, picoseconds, for each stage's warm-up forwards, from 1 to N."""
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
