"""Timelines as a Chrome trace, for Perfetto and chrome://tracing."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmorph.placement import PlacementKind
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan

_NANOSECONDS_PER_MS = 1e6
_NANOSECONDS_PER_MICROSECOND = 1e3
_FIRST_ID = 1  # of processes and threads: 0 is the idle process of Perfetto
_THREADS_PER_STAGE = 1000
_COPIES_AFTER = {"offload": 998, "fetch": 999}  # below a stage's transfers

Event = dict[str, Any]


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Timelines by name, such as ``planned`` and ``measured``, as one trace.

    Returns:
        A JSON object in Chrome's trace format. Each timeline is a process, each stage a thread, and
        each op a complete event. A stage has more threads for its measured transfers, and one for
        each direction of its copies.
    """
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items(), _FIRST_ID):
        in_a_v = {} if timeline.placement_kind == "wrap" else {"placement": "v"}
        events.append(_metadata("process_name", process, {"name": name, **in_a_v}))
        events.append(_metadata("process_sort_index", process, {"sort_index": process}))
        events.extend(_op_events(process, timeline))
        for stage in range(timeline.num_stages):
            spans = [span for span in timeline.transfers if span.stage == stage]
            events.extend(_transfer_events(process, stage, spans))
            copies = [copy for copy in timeline.copies if copy.stage == stage]
            events.extend(_copy_events(process, stage, copies))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _op_events(process: int, timeline: Timeline) -> Iterator[Event]:
    for stage in range(timeline.num_stages):
        yield from _thread(process, _thread_of(stage), f"stage {stage}")
    for stage, op, start_ms, end_ms in timeline.spans():
        args = {"kind": op.kind.value, "microbatch": op.microbatch, "chunk": op.chunk}
        args |= {"group": op.group} if op.group > 1 else {}
        event = _complete(process, _thread_of(stage), str(op), start_ms, end_ms)
        yield event | {"cat": "op", "args": args}


def _transfer_events(process: int, stage: int, spans: Sequence[TransferSpan]) -> Iterator[Event]:
    """A stage's transfers; those that overlap are on several threads, as the format requires."""
    busy_until_ms: list[float] = []
    for _, label, start_ms, end_ms, holds_queue in sorted(spans, key=lambda span: span.start_ms):
        free = (lane for lane, until in enumerate(busy_until_ms) if until <= start_ms)
        lane = next(free, len(busy_until_ms))
        thread = _thread_of(stage) + 1 + lane
        if lane == len(busy_until_ms):
            busy_until_ms.append(end_ms)
            yield from _thread(process, thread, f"stage {stage} transfers")
        busy_until_ms[lane] = end_ms
        event = _complete(process, thread, label, start_ms, end_ms)
        yield event | {"cat": "transfer", "args": {"holds_queue": holds_queue}}


def _copy_events(process: int, stage: int, copies: Sequence[CopySpan]) -> Iterator[Event]:
    """Copies of a stage's stashes; those of one direction don't overlap, and share a thread."""
    threads = {kind: _thread_of(stage) + after for kind, after in _COPIES_AFTER.items()}
    for kind in sorted({copy.kind for copy in copies}, reverse=True):
        yield from _thread(process, threads[kind], f"stage {stage} {kind}")
    for copy in copies:
        event = _complete(process, threads[copy.kind], copy.label, copy.start_ms, copy.end_ms)
        yield event | {"cat": "copy", "args": {"microbatch": copy.microbatch, "chunk": copy.chunk}}


def _thread_of(stage: int) -> int:
    return _FIRST_ID + stage * _THREADS_PER_STAGE


def _thread(process: int, thread: int, name: str) -> Iterator[Event]:
    yield _metadata("thread_name", process, {"name": name}) | {"tid": thread}
    yield _metadata("thread_sort_index", process, {"sort_index": thread}) | {"tid": thread}


def _metadata(kind: str, process: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "args": args}


def _complete(process: int, thread: int, name: str, start_ms: float, end_ms: float) -> Event:
    # Perfetto drops an event that overlaps the one before it, even by a rounding error. So both
    # ends are rounded to nanoseconds, rather than the start and the duration.
    start_ns = round(start_ms * _NANOSECONDS_PER_MS)
    end_ns = round(end_ms * _NANOSECONDS_PER_MS)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start_ns / _NANOSECONDS_PER_MICROSECOND,
        "dur": (end_ns - start_ns) / _NANOSECONDS_PER_MICROSECOND,
    }


def read_chrome_trace(trace: Mapping[str, Any]) -> dict[str, Timeline]:
    """The timelines of a trace by ``chrome_trace``, by name, with times to a nanosecond.

    Raises:
        ValueError: The object is no such trace.
    """
    names: dict[int, str] = {}
    kinds: dict[int, PlacementKind] = {}
    rows: dict[int, dict[int, list[Event]]] = defaultdict(dict)
    transfers: dict[int, list[TransferSpan]] = defaultdict(list)
    copies: dict[int, list[CopySpan]] = defaultdict(list)
    try:
        for event in trace["traceEvents"]:
            process = event["pid"]
            if event["name"] == "process_name":
                names[process] = event["args"]["name"]
                kinds[process] = event["args"].get("placement", "wrap")
            elif event["name"] == "thread_name" and event["tid"] == _thread_of(_stage_of(event)):
                rows[process][_stage_of(event)] = []
            elif event.get("cat") == "op":
                rows[process][_stage_of(event)].append(event)
            elif event.get("cat") == "transfer":
                transfers[process].append(_transfer(event))
            elif event.get("cat") == "copy":
                copies[process].append(_copy(event))
        return {
            name: _timeline(rows[process], transfers[process], copies[process], kinds[process])
            for process, name in names.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"got a trace without {error}, expected one of ops by stage") from error


def _stage_of(event: Event) -> int:
    return (event["tid"] - _FIRST_ID) // _THREADS_PER_STAGE


def _times_ms(event: Event) -> tuple[float, float]:
    start_ns = round(event["ts"] * _NANOSECONDS_PER_MICROSECOND)
    duration_ns = round(event["dur"] * _NANOSECONDS_PER_MICROSECOND)
    return start_ns / _NANOSECONDS_PER_MS, (start_ns + duration_ns) / _NANOSECONDS_PER_MS


def _transfer(event: Event) -> TransferSpan:
    holds_queue = bool(event["args"]["holds_queue"])
    return TransferSpan(_stage_of(event), event["name"], *_times_ms(event), holds_queue)


def _copy(event: Event) -> CopySpan:
    kind = event["name"].partition(" ")[0]
    args = event["args"]
    return CopySpan(_stage_of(event), kind, args["microbatch"], args["chunk"], *_times_ms(event))


def _timeline(
    rows: Mapping[int, list[Event]],
    transfers: Sequence[TransferSpan],
    copies: Sequence[CopySpan],
    placement_kind: PlacementKind,
) -> Timeline:
    events = [rows[stage] for stage in sorted(rows)]
    times = [np.array([_times_ms(event) for event in row]).reshape(-1, 2) for row in events]
    return Timeline(
        tuple(tuple(Op.parse(event["name"]) for event in row) for row in events),
        tuple(row[:, 0] for row in times),
        tuple(row[:, 1] for row in times),
        tuple(transfers),
        tuple(copies),
        placement_kind,
    )
