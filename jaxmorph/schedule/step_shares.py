"""Where a step goes, from barrier to barrier: each stage computes, or idles for a cause."""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from jaxmorph.schedule.bubbles import BubbleCause, find_bubbles
from jaxmorph.schedule.timeline import Timeline


class IdleCause(StrEnum):
    """Why a stage runs no op.

    Attributes:
        WARM_UP: It fills: the data of its first op isn't made yet.
        DEPENDENCY: Between its ops, the next one's data isn't made yet on another stage.
        TRANSFER: The data is made, and its own transfer is under way.
        BLOCKING: The data is made, but a transfer of other data holds its queue, or its sender's.
        COPIES: The data is there, and a stash isn't back from host memory, or hasn't made room.
        DISPATCH: The op is ready and the queue free: what starting ops costs.
        COOL_DOWN: It has run its last op, and other stages have not.
        OPTIMIZER: No stage has begun its first op, or all have ended their last: tied gradients,
            norms, the meeting of the ranks and the update.
    """

    WARM_UP = "warm-up"
    DEPENDENCY = "dependency"
    TRANSFER = "transfer"
    BLOCKING = "blocking"
    COPIES = "copies"
    DISPATCH = "dispatch"
    COOL_DOWN = "cool-down"
    OPTIMIZER = "optimizer"


_CAUSE_OF = {
    BubbleCause.WARM_UP: IdleCause.WARM_UP,
    BubbleCause.FORWARD: IdleCause.DEPENDENCY,
    BubbleCause.BACKWARD: IdleCause.DEPENDENCY,
    BubbleCause.LINK: IdleCause.TRANSFER,
    BubbleCause.BLOCKING: IdleCause.BLOCKING,
    BubbleCause.COPIES: IdleCause.COPIES,
    BubbleCause.COOL_DOWN: IdleCause.COOL_DOWN,
    BubbleCause.OTHER: IdleCause.DISPATCH,
}


class IdleSpan(NamedTuple):
    """One time in which a stage idles for one cause; milliseconds since the step's start."""

    stage: int
    start_ms: float
    end_ms: float
    cause: IdleCause


class StepShares(NamedTuple):
    """What a stage does with a step, as shares of it that add up to 1; see ``IdleCause``."""

    compute: float
    warm_up: float
    dependency: float
    transfer: float
    blocking: float
    copies: float
    dispatch: float
    cool_down: float
    optimizer: float


def idle_spans(timeline: Timeline, step_ms: float | None = None) -> list[IdleSpan]:
    """The times in which stages idle, each with its cause.

    ``find_bubbles`` says what a stage waits for between the step's first op and its last; what lies
    before the first and after the last belongs to no stage and is the optimizer's.

    Args:
        timeline: A simulated or measured step.
        step_ms: From barrier to barrier, milliseconds; the makespan when None, or longer.

    Returns:
        The spans, stage by stage and in order of time; with the ops they fill the step.
    """
    makespan_ms = timeline.makespan_ms
    first_ms = min((float(start.min()) for start in timeline.start_ms if len(start)), default=0.0)
    bubbles = list(_between(timeline, first_ms))
    end_ms = max(makespan_ms, step_ms or 0.0)
    ends = [(start, end) for start, end in ((0.0, first_ms), (makespan_ms, end_ms)) if end > start]
    around = [
        IdleSpan(stage, *span, IdleCause.OPTIMIZER)
        for stage in range(timeline.num_stages)
        for span in ends
    ]
    return sorted([*bubbles, *around])


def _between(timeline: Timeline, first_ms: float) -> Iterator[IdleSpan]:
    for stage, start_ms, end_ms, cause in find_bubbles(timeline):
        if end_ms > first_ms:
            yield IdleSpan(stage, max(start_ms, first_ms), end_ms, _CAUSE_OF[cause])


def step_shares(timeline: Timeline, step_ms: float | None = None) -> tuple[StepShares, ...]:
    """How each stage's step divides.

    Args:
        timeline: A simulated or measured step.

    Returns:
        Shares for every stage. ``compute`` is what no idle time takes.
    """
    whole_ms = max(timeline.makespan_ms, step_ms or 0.0) or 1.0
    idle = [dict.fromkeys(IdleCause, 0.0) for _ in timeline.orders]
    for stage, start_ms, end_ms, cause in idle_spans(timeline, step_ms):
        idle[stage][cause] += (end_ms - start_ms) / whole_ms
    return tuple(StepShares(1.0 - sum(row.values()), *row.values()) for row in idle)


def mean_shares(shares: tuple[StepShares, ...]) -> StepShares:
    """The mean of all stages."""
    return StepShares(*(sum(column) / len(shares) for column in zip(*shares, strict=True)))
