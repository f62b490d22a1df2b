"""List scheduling: simulates a pipeline and gives every idle stage its next op by a rule.

Source: the selection of Algorithms 3 and 4, driven by events rather than by a time step, so that
decisions happen at the exact instant data arrives. Corrections: data arrives at the END of its
producer plus the latency; W needs its own stage's B, and the last stage's B its own F; the run ends
when every op has ended, not when no op is available. Additions: a stage without room refuses F
(otherwise W starves and every stage may hold all microbatches; with S = 8, N = 64 and a link of
30 ms, a cap of 15 costs no time); a stage may wait for a better op that is about to become ready;
and the scheduler can run backwards in time.

A pipeline run backwards in time is again a pipeline: B takes F's place, F takes B's, and W comes
before instead of after. One scheduler serves both: its result for the mirrored problem, read
backwards, is a schedule of the real one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import stage_times

_PICOSECONDS_PER_MS = 10**9


@dataclass(frozen=True)
class Workload:
    """A planning problem: durations in picoseconds and memory in whole units, one value per stage.

    Whole numbers, so that events at one instant compare equal on every machine.

    Args:
        forward_latency: From each stage to the next; 0 for the last.
        backward_latency: From each stage to the previous; 0 for the first.
        after_forward: As in ``costs.StageMemory``, like ``after_backward`` and ``room``.
        mirrored: Whether time runs backwards: forwards are then the real B, and W precedes them.
    """

    num_microbatches: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    forward_latency: tuple[int, ...]
    backward_latency: tuple[int, ...]
    after_forward: tuple[int, ...]
    after_backward: tuple[int, ...]
    room: tuple[int, ...]
    mirrored: bool = False

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward)

    def mirror(self) -> "Workload":
        """The same problem with time running backwards."""
        return replace(
            self,
            forward=self.backward_input,
            backward_input=self.forward,
            forward_latency=(*self.backward_latency[1:], 0),
            backward_latency=(0, *self.forward_latency[:-1]),
            mirrored=not self.mirrored,
        )


def make_workload(
    costs: StageCosts, links: Links, limits: Limits, num_microbatches: int
) -> Workload:
    """The problem in whole numbers; messages overlap, each delayed by occupancy and latency."""
    times = [[round(ms * _PICOSECONDS_PER_MS) for ms in row] for row in stage_times(costs, links)]
    memory = limits.stage_memory(costs.num_stages, num_microbatches)
    forward, backward_input, backward_weight, up, down = zip(*times, strict=True)
    durations = forward, backward_input, backward_weight
    after_forward, after_backward, room = zip(*memory, strict=True)
    holds = after_forward, after_backward, room
    return Workload(num_microbatches, *durations, up, down, *holds)


def to_picoseconds(milliseconds: float) -> int:
    """A duration in whole picoseconds, rounded down: a lower bound must stay one."""
    return math.floor(milliseconds * _PICOSECONDS_PER_MS)


@dataclass(frozen=True)
class Rule:
    """How an idle stage chooses its next op.

    It runs the favoured of F and B if that is ready, else the other one, else W. It waits instead
    of running a less favoured op if a better one comes soon and the stage can spare the time.

    Args:
        backward_first: Whether B is favoured, as in Algorithm 3; else F is.
        patience: The longest wait for the favoured op, as a share of the other one's duration.
        weight_patience: The longest wait for F or B, as a share of W's duration.
        spare_share: The longest wait as a share of a stage's spare time per microbatch (the stage
            with most work has none); None for no such limit.
        mirrored: Whether the rule runs backwards in time.
    """

    backward_first: bool = True
    patience: float = 0.0
    weight_patience: float = 0.0
    spare_share: float | None = None
    mirrored: bool = False


PAPER = Rule()
"""Algorithm 3 after its warm-up: B before F before W, never idle while one of them can run."""


@dataclass(frozen=True)
class ListSchedule:
    """The ops by number (see ``to_schedule``), in dependency order; makespan in picoseconds."""

    numbers: list[int]
    makespan: int


KINDS = (OpKind.F, OpKind.B, OpKind.W)


def to_schedule(
    name: str, num_stages: int, num_microbatches: int, numbers: Iterable[int]
) -> Schedule:
    """The schedule in which every stage runs its ops in the order of ``numbers``.

    The planner's inner loops index lists by op, so an op is a number there:
    stage * 3 N + (0 for F, N for B, 2 N for W) + microbatch.
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
    """The schedule that a rule makes; None if its stages end up waiting for each other.

    Args:
        warmup_forwards: The least forwards of each stage before any backward, at most what it and
            all earlier stages can hold. Only for rules that aren't mirrored.
        keep_warmup: Whether a stage never has more forwards than these waiting for their backward.
        spare: How long each stage can idle per microbatch, picoseconds; rules with a
            ``spare_share`` need it.
    """
    directed = workload.mirror() if rule.mirrored else workload
    warmup = warmup_forwards or (0,) * workload.num_stages
    most = _longest_waits(rule.spare_share, spare, workload.num_stages)
    numbers, makespan = _run(directed, rule, warmup, keep_warmup, most)
    if len(numbers) < 3 * workload.num_stages * workload.num_microbatches:
        return None
    return ListSchedule(numbers[::-1] if rule.mirrored else numbers, makespan)


_NEVER = float("inf")


def _run(  # noqa: C901 (a flat loop over local names: it runs once for every op of a plan)
    workload: Workload,
    rule: Rule,
    warmup: Sequence[int],
    keep_warmup: bool,
    longest_wait: Sequence[float],
) -> tuple[list[int], int]:
    """Wakes stages in order of time until none has anything left to wait for.

    Names are those of the workload: in a mirrored one, "forward" is B of the schedule.
    """
    count, last, mirrored = workload.num_microbatches, workload.num_stages - 1, workload.mirrored
    stages = range(workload.num_stages)
    forward, backward = workload.forward, workload.backward_input
    weight = workload.backward_weight
    up, down = workload.forward_latency, workload.backward_latency
    backward_first = rule.backward_first
    forward_change, backward_change, weight_change = held_changes(workload)
    first_forward, first_backward, first_weight, step = _first_numbers(workload)
    # When each microbatch's data arrives. The sentinel behind the last microbatch never arrives.
    forward_arrivals = [[_NEVER] * (count + 1) for _ in stages]
    backward_arrivals = [[_NEVER] * (count + 1) for _ in stages]
    forward_arrivals[0] = [0.0] * count + [_NEVER]
    # What a stage's choice depends on; one unpacking is faster than eight look-ups.
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
            # The stage has idled since `free` in the hope of an F or B. W was ready all that time,
            # so it counts as started at `free`.
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
        if not now < free[to] >= arrival:  # else the end of the op that runs there wakes it
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
    """The longest wait of each stage before it begins an op."""
    return [min(patience * time, most) for time, most in zip(durations, longest, strict=True)]


def _first_numbers(workload: Workload) -> tuple[list[int], list[int], list[int], int]:
    """The numbers of each stage's first F, B and W, and the step from one to the next."""
    count, mirrored = workload.num_microbatches, workload.mirrored
    bases = [3 * count * stage for stage in range(workload.num_stages)]
    last = count - 1 if mirrored else 0
    offsets = (count, 0, 2 * count) if mirrored else (0, count, 2 * count)
    forward, backward, weight = ([base + offset + last for base in bases] for offset in offsets)
    return forward, backward, weight, -1 if mirrored else 1


def held_changes(workload: Workload) -> tuple[list[int], list[int], list[int]]:
    """How F, B and W change what each stage holds."""
    forward, backward = list(workload.after_forward), list(workload.after_backward)
    between = [b - a for a, b in zip(forward, backward, strict=True)]
    if workload.mirrored:
        return [-change for change in between], [-a for a in forward], backward
    return forward, between, [-b for b in backward]


def _most_held(workload: Workload) -> tuple[list[float], list[float], list[float]]:
    """The most that a stage may hold before it runs F, B and W.

    An op that takes memory leaves room for the next op of its microbatch, if that holds more.
    Otherwise a stage could fill up with microbatches none of which can continue.
    """
    rows = zip(workload.after_forward, workload.after_backward, workload.room, strict=True)
    if not workload.mirrored:
        most = [(room - max(a, b), room - b + a, _NEVER) for a, b, room in rows]
    else:
        most = [(room - a + b, _NEVER, room - max(a, b) if b else _NEVER) for a, b, room in rows]
    forward, backward, weight = zip(*most, strict=True)
    return list(forward), list(backward), list(weight)
