"""List scheduling: runs a pipeline on paper and gives every idle stage its next op by a rule.

Source: the selection of Algorithms 3 and 4, driven by events rather than by a time step, so
decisions happen at the exact instant data arrives. Three corrections: data arrives at the END of
the op that produced it plus the latency; a W needs its own stage's B, and the last stage's B its
own F; and the run ends when every op has, not when no op is available. Three additions: a stage
without room refuses F, else W starves and every stage may hold all microbatches; a stage may wait
for something better that is on its way; and the whole can be done backwards in time.

Run backwards in time, a pipeline is a pipeline again: B takes F's place on the way up the stages, F
takes B's on the way down, and W comes before instead of after. So one list scheduler serves both
directions: what it makes of the mirrored problem, read backwards, is a schedule of the real one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import StageTimes
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import stage_times

_PICOSECONDS_PER_MS = 10**9


@dataclass(frozen=True)
class Workload:
    """A planning problem: durations in picoseconds and memory in whole units, one value per stage.

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
    """The problem in whole numbers; a message takes occupancy and latency, as on an idle link."""
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


@dataclass(frozen=True)
class Rule:
    """What an idle stage does next.

    It takes the favoured of F and B if that is there, else the other one, else W: but rather than
    begin the latter it waits, if something better is sure to arrive within a part of its duration
    and the stage can spare the time.

    Args:
        backward_first: Whether B is favoured, as in Algorithm 3, or F.
        patience: The part of the other op's duration that it waits for the favoured one.
        weight_patience: The part of W's duration that it waits for either.
        spare_share: The part of a stage's spare time per microbatch that it waits at most (the
            stage with most work has none, and never waits); None for no such limit.
        mirrored: Whether the rule is used backwards in time.
    """

    backward_first: bool = True
    patience: float = 0.0
    weight_patience: float = 0.0
    spare_share: float | None = None
    mirrored: bool = False


PAPER = Rule()
"""Algorithm 3 after its warm-up: B before F before W, and never idle while one of them can run."""


@dataclass(frozen=True)
class ListSchedule:
    """What a rule made.

    Args:
        numbers: The ops by their numbers (``to_schedule``), each after all that it needs.
        makespan: When the last op ends, picoseconds.
    """

    numbers: list[int]
    makespan: int


KINDS = (OpKind.F, OpKind.B, OpKind.W)


def to_schedule(
    name: str, num_stages: int, num_microbatches: int, numbers: Iterable[int]
) -> Schedule:
    """The schedule in which every stage runs its ops in the order of their numbers' appearance.

    The planner's inner loops index lists with ops, which are numbers there:
    stage * 3 N + (0 for F, N for B, 2 N for W) + microbatch.

    Args:
        numbers: Each of the 3 S N ops once.
    """
    ops = [Op(kind, microbatch) for kind in KINDS for microbatch in range(num_microbatches)]
    rows: list[list[Op]] = [[] for _ in range(num_stages)]
    for number in numbers:
        stage, op = divmod(number, len(ops))
        rows[stage].append(ops[op])
    return Schedule(name, num_microbatches, tuple(map(tuple, rows)))


def list_schedule(
    workload: Workload,
    rule: Rule = PAPER,
    warmup_forwards: Sequence[int] | None = None,
    *,
    keep_warmup: bool = False,
    spare: Sequence[float] | None = None,
) -> ListSchedule | None:
    """The schedule that a rule makes; None where it ends with stages that wait for each other.

    Args:
        warmup_forwards: Forwards each stage runs before any backward, at most what it and all
            earlier stages can hold; None for none. For rules that aren't mirrored.
        keep_warmup: Whether a stage never has more forwards than these waiting for their backward.
        spare: How long each stage can idle per microbatch, picoseconds; needed by rules that limit
            their waiting by it.
    """
    directed = workload.mirror() if rule.mirrored else workload
    warmup = warmup_forwards or (0,) * workload.num_stages
    most = _longest_waits(rule.spare_share, spare, workload.num_stages)
    numbers, makespan = _run(directed, rule, warmup, keep_warmup, most)
    if len(numbers) < 3 * workload.num_stages * workload.num_microbatches:
        return None
    return ListSchedule(numbers[::-1] if rule.mirrored else numbers, makespan)


_NEVER = float("inf")


def _run(  # noqa: C901 (one flat loop: see below)
    workload: Workload,
    rule: Rule,
    warmup: Sequence[int],
    keep_warmup: bool,
    longest_wait: Sequence[float],
) -> tuple[list[int], int]:
    """Wakes stages in order of time until none has anything left to wait for.

    One flat loop over local names: it runs once for every op of a plan. "F", "B" and "W" are those
    of the workload, which in a mirrored one are B, F and W of the schedule.
    """
    count, last, mirrored = workload.num_microbatches, workload.num_stages - 1, workload.mirrored
    stages = range(workload.num_stages)
    forward, backward = workload.forward, workload.backward_input
    weight = workload.backward_weight
    up, down = workload.forward_latency, workload.backward_latency
    backward_first = rule.backward_first
    forward_change, backward_change, weight_change = _changes(workload)
    first_forward, first_backward, first_weight, step = _first_numbers(workload)
    # When each microbatch's data arrives; the entry behind the last one never does.
    forward_arrivals = [[_NEVER] * (count + 1) for _ in stages]
    backward_arrivals = [[_NEVER] * (count + 1) for _ in stages]
    forward_arrivals[0] = [0.0] * count + [_NEVER]
    # What a stage's choice depends on, unpacked at once: that is quicker than one by one.
    other = forward if backward_first else backward
    choices = list(
        zip(
            forward_arrivals,
            backward_arrivals,
            warmup,
            *_most_held(workload),
            _waits(rule.patience, other, longest_wait),
            _waits(rule.weight_patience, weight, longest_wait),
            strict=True,
        )
    )
    forwards, backwards, weights = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    held, free = [0] * len(stages), [0] * len(stages)
    numbers: list[int] = []
    makespan = 0
    events = [(0, stage) for stage in stages]
    while events:
        now, stage = heappop(events)
        if free[stage] > now:
            continue
        (
            arrivals_here,
            arrivals_back,
            least_forwards,
            forward_most,
            backward_most,
            weight_most,
            patience,
            weight_patience,
        ) = choices[stage]
        num_forwards, num_backwards = forwards[stage], backwards[stage]
        num_weights, holds = weights[stage], held[stage]
        forward_at = arrivals_here[num_forwards] if holds <= forward_most else _NEVER
        weight_is_due = False
        if mirrored:
            weight_is_ready = num_weights < count and holds <= weight_most
            if num_weights <= num_forwards:
                weight_is_due = forward_at <= now
                forward_at = _NEVER
        else:
            weight_is_ready = num_weights < num_backwards
        if num_forwards < least_forwards:
            backward_at = _NEVER
            weight_is_ready = False
        else:
            backward_at = arrivals_back[num_backwards] if holds <= backward_most else _NEVER
            if keep_warmup and num_forwards - num_backwards >= least_forwards:
                forward_at = _NEVER

        if backward_first:
            better_at, other_at = backward_at, forward_at
        else:
            better_at, other_at = forward_at, backward_at
        if better_at <= now:
            is_forward = not backward_first
        elif other_at <= now:
            if better_at - now < patience:
                continue
            is_forward = backward_first
        elif weight_is_ready:
            soon = better_at if better_at < other_at else other_at
            if soon - now < weight_patience and not weight_is_due:
                continue
            # Where the stage waited, and for nothing, W ran meanwhile.
            free[stage] = end = max(now, free[stage] + weight[stage])
            weights[stage] = num_weights + 1
            held[stage] = holds + weight_change[stage]
            numbers.append(first_weight[stage] + step * num_weights)
            heappush(events, (end, stage))
            if end > makespan:
                makespan = end
            continue
        else:
            continue

        if is_forward:
            free[stage] = end = now + forward[stage]
            forwards[stage] = num_forwards + 1
            held[stage] = holds + forward_change[stage]
            numbers.append(first_forward[stage] + step * num_forwards)
            if stage < last:
                to, arrival = stage + 1, end + up[stage]
                forward_arrivals[to][num_forwards] = arrival
            else:
                to, arrival = stage, end
                arrivals_back[num_forwards] = arrival
        else:
            free[stage] = end = now + backward[stage]
            backwards[stage] = num_backwards + 1
            held[stage] = holds + backward_change[stage]
            numbers.append(first_backward[stage] + step * num_backwards)
            if stage:
                to, arrival = stage - 1, end + down[stage]
                backward_arrivals[to][num_backwards] = arrival
            else:
                to, arrival = stage, end
        heappush(events, (end, stage))
        if not now < free[to] >= arrival:  # else it looks when the op it is running has ended
            heappush(events, (arrival, to))
        if end > makespan:
            makespan = end
    return numbers, makespan


def _longest_waits(
    share: float | None, spare: Sequence[float] | None, num_stages: int
) -> list[float]:
    if share is None:
        return [_NEVER] * num_stages
    if spare is None:
        raise ValueError("spare: got None, expected each stage's spare time for this rule")
    return [share * time for time in spare]


def _waits(patience: float, durations: Sequence[int], longest: Sequence[float]) -> list[float]:
    """How long each stage waits rather than begin an op."""
    return [min(patience * time, most) for time, most in zip(durations, longest, strict=True)]


def _first_numbers(workload: Workload) -> tuple[list[int], list[int], list[int], int]:
    """The numbers of each stage's first F, B and W, and the step from one to the next."""
    count, mirrored = workload.num_microbatches, workload.mirrored
    bases = [3 * count * stage for stage in range(workload.num_stages)]
    last = count - 1 if mirrored else 0
    offsets = (count, 0, 2 * count) if mirrored else (0, count, 2 * count)
    forward, backward, weight = ([base + offset + last for base in bases] for offset in offsets)
    return forward, backward, weight, -1 if mirrored else 1


def _changes(workload: Workload) -> tuple[list[int], list[int], list[int]]:
    """How F, B and W change what each stage holds."""
    rows = list(zip(workload.forward_holds, workload.backward_holds, strict=True))
    after_forward = [a for a, _ in rows]
    after_backward = [b for _, b in rows]
    between = [b - a for a, b in rows]
    if workload.mirrored:
        return [-change for change in between], [-a for a in after_forward], after_backward
    return after_forward, between, [-b for b in after_backward]


def _most_held(workload: Workload) -> tuple[list[float], list[float], list[float]]:
    """The most that a stage may hold before F, B and W, so that it then has room.

    Whatever begins to hold memory leaves room for the next op of its microbatch, if that holds
    more: else a stage could fill up with microbatches none of which can go on.
    """
    rows = zip(workload.forward_holds, workload.backward_holds, workload.room, strict=True)
    if not workload.mirrored:
        most = [(room - max(a, b), room - b + a, _NEVER) for a, b, room in rows]
    else:
        most = [(room - a + b, _NEVER, room - max(a, b) if b else _NEVER) for a, b, room in rows]
    forward, backward, weight = zip(*most, strict=True)
    return list(forward), list(backward), list(weight)
