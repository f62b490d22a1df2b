"""What a rank tells the others of a step, and the step put together from all ranks' reports."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from jaxmorph.program.instructions import Channel, Transfer, channel_of
from jaxmorph.records import Message
from jaxmorph.runtime.executor import StepOutcome
from jaxmorph.runtime.host_copies import CopyLabel
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan

NOT_FINITE = "not_finite"
"""The key under which a rank says what of its step is not finite; elsewhere it is left out."""

_PEAK = "peak_device_bytes"


@dataclass(frozen=True)
class StepTotals:
    """The scalars of a step, summed in stage order, the same on every rank.

    Attributes:
        loss: Mean loss of the counted tokens.
        grad_norm: Global norm of the gradients before clipping.
        not_finite: What is not finite, in a few words, by stage; only of stages that found it.
    """

    loss: float
    grad_norm: float
    not_finite: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether parameters may be updated by the step."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def in_words(self) -> str:
        """The scalars, and what is not finite on which stage, in a line."""
        stages = (f"stage {stage}: {what}" for stage, what in self.not_finite.items())
        return "; ".join([f"loss {self.loss:g}, gradient norm {self.grad_norm:g}", *stages])


def rank_report(
    outcome: StepOutcome,
    squared_norm: float,
    began_s: float,
    compilations: int,
    events: Sequence[Message] = (),
) -> tuple[Message, Message]:
    """What one rank says of its step: scalars for all ranks, and a detail for rank 0.

    That has the timings, in milliseconds since the step began, and the events of delegated links.

    Args:
        squared_norm: Its part of the squared gradient norm.
        began_s: When the step began on this rank, on the monotonic clock.
        compilations: How many programs it has compiled so far.
    """
    ops = [_span(stamp, began_s) for stamp in outcome.stamps if isinstance(stamp.label, Op)]
    held = [_span(stamp, began_s) for stamp in outcome.stamps if not isinstance(stamp.label, Op)]
    arrivals = [_span(stamp, began_s) for stamp in outcome.arrivals]
    message = {
        "loss": outcome.loss,
        "squared_norm": squared_norm,
        "compilations": compilations,
    }
    told = [{**event, "time_s": event["time_s"] - began_s} for event in events]
    timings = {"ops": ops, "transfers": held, "arrivals": arrivals, "events": told}
    if outcome.copies:
        timings["copies"] = [_copy_span(stamp, began_s) for stamp in outcome.copies]
    return message, timings


def _span(stamp: Stamp, began_s: float) -> tuple[str, float, float]:
    return str(stamp.label), 1e3 * (stamp.start_s - began_s), 1e3 * (stamp.end_s - began_s)


def _copy_span(stamp: Stamp, began_s: float) -> tuple[str, int, int, float, float]:
    label: CopyLabel = stamp.label
    _, start_ms, end_ms = _span(stamp, began_s)
    return label.kind, label.stash.microbatch, label.stash.chunk, start_ms, end_ms


def total(reports: Sequence[Message]) -> StepTotals:
    """The step's loss and gradient norm, and what of them is not finite, of all ranks' reports."""
    loss = sum(report["loss"] for report in reports)
    squared_norm = sum(report["squared_norm"] for report in reports)
    told = ((rank, report.get(NOT_FINITE)) for rank, report in enumerate(reports))
    not_finite = {rank: what for rank, what in told if what}
    return StepTotals(loss, float(np.sqrt(squared_norm)), not_finite)


def measured_timeline(reports: Sequence[Message]) -> Timeline:
    """When ops, transfers and copies ran, on each rank since its own step began; on rank 0."""
    timings = [json.loads(report[DETAIL]) for report in reports]
    ops = [row["ops"] for row in timings]
    return Timeline(
        orders=tuple(tuple(_parse_op(name) for name, _, _ in row) for row in ops),
        start_ms=tuple(np.array([start for _, start, _ in row], np.float64) for row in ops),
        end_ms=tuple(np.array([end for _, _, end in row], np.float64) for row in ops),
        transfers=tuple(
            TransferSpan(rank, label, start, end, holds_queue=kind == "transfers")
            for rank, row in enumerate(timings)
            for kind in ("transfers", "arrivals")
            for label, start, end in row[kind]
        ),
        copies=tuple(
            CopySpan(rank, *copy)
            for rank, row in enumerate(timings)
            for copy in row.get("copies", ())
        ),
    )


_parse_op = lru_cache(maxsize=1 << 14)(Op.parse)  # the same names come step by step


def reported_events(reports: Sequence[Message]) -> list[tuple[int, Message]]:
    """What ranks' delegated links report of a step, each with its rank; seconds since it began."""
    told = (json.loads(report[DETAIL])["events"] for report in reports)
    return [(rank, event) for rank, events in enumerate(told) for event in events]


def probe_times(reports: Sequence[Message]) -> dict[str, float]:
    """What messages of a probe took each way, milliseconds, by the name of a direction's first one.

    The end that came later to one waited for nobody: the smaller time is the link's. Of those of a
    direction the median counts.
    """
    took_ms: dict[str, float] = {}
    for report in reports:
        for label, duration_ms in json.loads(report[DETAIL]).get("probes", ()):
            took_ms[label] = min(duration_ms, took_ms.get(label, duration_ms))
    names: dict[Channel, list[str]] = {}
    for label in took_ms:
        names.setdefault(channel_of(Transfer.parse(label)), []).append(label)
    return {of[0]: median(took_ms[label] for label in of) for of in names.values()}


def total_compilations(reports: Sequence[Message]) -> int:
    """How many programs all ranks have compiled so far."""
    return sum(report["compilations"] for report in reports)


def free_bytes(device: Any) -> int | None:
    """What is free of the memory that JAX may take on a device, or None where it doesn't tell."""
    statistics = device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def told_peak(device: Any) -> dict[str, int]:
    """A part of a report: the most that has been in use on a device, if it says so."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {} if peak is None else {_PEAK: peak}


def peaks_of(reports: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """The most that has been in use on every rank's device, or None where one doesn't say."""
    peaks = [report.get(_PEAK) for report in reports]
    return tuple(peak for peak in peaks if peak is not None) if None not in peaks else None
