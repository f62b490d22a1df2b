"""How many stashes a stage's device holds, read off a timeline, measured or simulated."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxmorph.schedule.ops import LiveUntil, OpKind
from jaxmorph.schedule.timeline import Timeline

_TAKES, _GIVES = 1, -1


class _Change(NamedTuple):
    """A stash comes to a device, or leaves it; at one time those that leave come first."""

    time_ms: float
    by: int


def peak_on_device(timeline: Timeline, live_until: LiveUntil = "B") -> tuple[int, ...]:
    """Most (microbatch, chunk) pairs whose stash each stage's device holds at once.

    A stash takes its place when its F starts, and gives it back when its B, or its W, has ended. In
    between it is away from the end of its offload until its fetch starts: while it is copied it
    counts.

    Args:
        live_until: The op that ends a microbatch's stash, as in ``ops.peak_live``.

    Returns:
        One count per stage; without copies ``Timeline.peak_live``.
    """
    peaks = []
    for stage in range(timeline.num_stages):
        held = peak = 0
        for change in sorted(_changes(timeline, stage, live_until)):
            held += change.by
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _changes(timeline: Timeline, stage: int, live_until: LiveUntil) -> Iterator[_Change]:
    rows = timeline.orders[stage], timeline.start_ms[stage], timeline.end_ms[stage]
    for op, start_ms, end_ms in zip(*rows, strict=True):
        if op.kind is OpKind.F:
            yield _Change(float(start_ms), _TAKES)
        elif op.kind in (OpKind(live_until), OpKind.BW):
            yield _Change(float(end_ms), _GIVES)
    for copy in timeline.copies:
        if copy.stage == stage and copy.kind == "offload":
            yield _Change(copy.end_ms, _GIVES)
        elif copy.stage == stage:
            yield _Change(copy.start_ms, _TAKES)
