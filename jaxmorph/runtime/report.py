"""A rank's report of a step, and the totals of all ranks' reports.

Ranks exchange `StepReport`s in the exchange that ends a step; timings go to rank 0 alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from statistics import median
from typing import Any, Self, TypeVar

import numpy as np

from jaxmorph.control.rank_times import RankTimes, timeline_of
from jaxmorph.messages import ReplicaMessage
from jaxmorph.placement import PlacementKind
from jaxmorph.plain_json import Json, ParseError, as_object, dump, parse, parse_line
from jaxmorph.program.instructions import Channel, Transfer, channel_of
from jaxmorph.records import EventKind, ReplicaStep
from jaxmorph.runtime.executor import StepOutcome
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import CopySpan, Timeline

_Part = TypeVar("_Part")
_THEN = b"\n"  # ends the JSON, which escapes its newlines
_NOT_FOR_ALL = frozenset({DETAIL, "own_parts"})


@dataclass(frozen=True)
class LinkEvent:
    """An event of a rank's delegated links, such as a lost connection.

    Attributes:
        time_s: On the monotonic clock; in `StepTimings` since the step began.
        peer: The rank at the link's other end, where the event is about one link.
    """

    time_s: float
    kind: EventKind
    detail: str = ""
    peer: int | None = None

    @classmethod
    def of(cls, record: Json) -> Self:
        """Parse a link's record; its other fields become the detail where it has none."""
        own = (name for name in record if name not in ("time_s", "kind", "peer", "detail"))
        fields = (f"{name.replace('_', ' ')} {record[name]}" for name in own)
        detail = record.get("detail") or ", ".join(fields)
        return cls(record["time_s"], EventKind(record["kind"]), detail, record.get("peer"))


@dataclass(frozen=True)
class StepTimings(RankTimes):
    """A rank's times in a step, and the events of its delegated links."""

    events: tuple[LinkEvent, ...] = ()

    @classmethod
    def of_step(
        cls, outcome: StepOutcome, began_s: float, events: Sequence[LinkEvent] = ()
    ) -> Self:
        """The timings of a step that began at `began_s`, on the monotonic clock."""
        ops: list[tuple[Any, float, float]] = []
        direct: list[tuple[Any, float, float]] = []
        for span in _spans(outcome.stamps, began_s):
            (ops if isinstance(span[0], Op) else direct).append(span)
        return cls.of(
            ops,
            direct,
            _spans(outcome.arrivals, began_s),
            [
                CopySpan(0, label.kind, label.stash.microbatch, label.stash.chunk, *times_ms)
                for label, *times_ms in _spans(outcome.copies, began_s)
            ],
            events=tuple(replace(event, time_s=event.time_s - began_s) for event in events),
        )

    def detail(self) -> bytes:
        """What a rank sends rank 0 alone."""
        return (dump(self.events) if self.events else "").encode() + _THEN + self.to_bytes()

    @classmethod
    def of_detail(cls, detail: bytes) -> Self:
        """Parse what `detail` wrote; raises `ParseError` for anything else."""
        events, _, times = detail.partition(_THEN)
        line = events.decode(errors="replace")
        read = parse_line(tuple[LinkEvent, ...], line, "events") if line else ()
        return cls.of_bytes(times, events=read)


def _spans(stamps: Iterable[Stamp], began_s: float) -> list[tuple[Any, float, float]]:
    return [
        (stamp.label, 1e3 * (stamp.start_s - began_s), 1e3 * (stamp.end_s - began_s))
        for stamp in stamps
    ]


@dataclass(frozen=True)
class StepReport:
    """What one rank reports of a step.

    Attributes:
        loss: Its part of the mean loss of the counted tokens.
        squared_norm: Its part of the squared gradient norm.
        compilations: How many programs it has compiled so far.
        took_s: From the step's beginning to its last gradient.
        not_finite: Which of its loss and gradients are not finite; empty if all are finite.
        peak_device_bytes: Peak memory in use on its device; None where the device doesn't report.
        parts: What callbacks add, by the names of their dataclasses: see `parts_of`.
        own_parts: In rank 0's report, what callbacks add for the reading rank alone (`Addressed`).
        detail: The timings; only rank 0 has those of other ranks.
    """

    loss: float
    squared_norm: float
    compilations: int = 0
    took_s: float = 0.0
    not_finite: str = ""
    peak_device_bytes: int | None = None
    parts: Mapping[str, Json] = field(default_factory=dict)
    own_parts: Mapping[str, Json] = field(default_factory=dict)
    detail: bytes = b""

    def to_json(self) -> Json:
        """What goes to all ranks: both scalars, and other fields that are not empty or 0."""
        more = vars(self).items()
        scalars = {"loss": self.loss, "squared_norm": self.squared_norm}
        return scalars | {name: each for name, each in more if each and name not in _NOT_FOR_ALL}

    @classmethod
    def from_json(cls, message: Json, rank: int) -> "StepReport":
        """Parse what `to_json` wrote, on rank 0 together with `DETAIL`.

        Raises:
            ParseError: The message is no report; the error names the field.
        """
        return parse(StepReport, message, f"rank {rank}'s report of a step")

    @cached_property
    def timings(self) -> StepTimings:
        """The timings in `detail`; raises `ParseError` if it is something else."""
        return StepTimings.of_detail(self.detail)


@dataclass(frozen=True)
class Addressed:
    """Parts that rank 0 adds to its report: one for each rank, in rank order."""

    parts: tuple[Any, ...] = ()


def named_parts(parts: Iterable[Any]) -> dict[str, Json]:
    """What a rank sends of its callbacks' parts: dataclasses whose fields all have defaults.

    A part that equals its default is not sent, so most steps send none.
    """
    return {
        type(part).__name__: as_object(part)
        for part in parts
        if not isinstance(part, Addressed) and part != type(part)()
    }


def addressed_parts(parts: Iterable[Any]) -> list[Json]:
    """What rank 0 sends each rank alone (`StepReport.own_parts`); empty in most steps."""
    of_ranks = zip(*(each.parts for each in parts if isinstance(each, Addressed)), strict=True)
    return [{"own_parts": named_parts(own)} for own in of_ranks]


def parts_of(reports: Sequence[StepReport], kind: type[_Part]) -> list[_Part]:
    """Each rank's part of a kind, in rank order; the default where it sent none.

    Raises:
        ParseError: A rank sent something else; the error names the rank.
    """
    name, default = kind.__name__, kind()
    sent = (report.own_parts.get(name) or report.parts.get(name) for report in reports)
    return [
        default if each is None else parse(kind, each, f"rank {rank}'s {name}")
        for rank, each in enumerate(sent)
    ]


@dataclass(frozen=True)
class ProbeTimes:
    """The label and milliseconds of each message of a probe, at one end."""

    took_ms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class SumTook:
    """How long a stage's sum over replicas took, from when the last of them came to it.

    Attributes:
        seconds: 0 if unknown.
        num_rounds: How many messages followed one another.
        num_bytes: Of the stage's gradients.
    """

    seconds: float = 0.0
    num_rounds: int = 2
    num_bytes: int = 1


@dataclass(frozen=True)
class OfReplicas:
    """Each replica's report to the replica that records the run, whose first stage gets all.

    Attributes:
        steps: How each replica ran the step.
        messages: Messages of the other replicas, to be recorded.
    """

    steps: tuple[ReplicaStep, ...] = ()
    messages: tuple[ReplicaMessage, ...] = ()

    def joined(self, of_replicas: Sequence[Self]) -> "OfReplicas":
        """All replicas' steps, in order, and messages."""
        steps = chain.from_iterable(each.steps for each in of_replicas)
        messages = chain.from_iterable(each.messages for each in of_replicas)
        return OfReplicas(tuple(steps), tuple(messages))


@dataclass(frozen=True)
class AuxiliaryLosses:
    """A rank's auxiliary losses by name: see `StepOutcome.aux`."""

    means: Mapping[str, float] = field(default_factory=dict)


def total_auxiliary(reports: Sequence[StepReport]) -> dict[str, float]:
    """The step's auxiliary losses by name, summed in stage order; {} for a model without any."""
    totals: dict[str, float] = {}
    for part in parts_of(reports, AuxiliaryLosses):
        for name, mean in part.means.items():
            totals[name] = totals.get(name, 0.0) + mean
    return totals


@dataclass(frozen=True)
class StepTotals:
    """The scalars of a step, summed in stage order, the same on every rank.

    Attributes:
        loss: Mean loss of the counted tokens.
        grad_norm: Global norm of the gradients before clipping.
        not_finite: By stage: which of its loss and gradients are not finite.
    """

    loss: float
    grad_norm: float
    not_finite: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether the step may update parameters."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def in_words(self) -> str:
        """One line with the scalars and, by stage, what is not finite."""
        stages = (f"stage {stage}: {what}" for stage, what in self.not_finite.items())
        return "; ".join([f"loss {self.loss:g}, gradient norm {self.grad_norm:g}", *stages])


def total(reports: Sequence[StepReport]) -> StepTotals:
    """The step's totals over all ranks."""
    loss = sum(report.loss for report in reports)
    squared_norm = sum(report.squared_norm for report in reports)
    not_finite = {rank: each.not_finite for rank, each in enumerate(reports) if each.not_finite}
    return StepTotals(loss, float(np.sqrt(squared_norm)), not_finite)


def timings_of(reports: Sequence[StepReport]) -> list[StepTimings]:
    """Each rank's timings; only rank 0 has those of others.

    Raises:
        ParseError: A rank sent something else; the error names the rank.
    """
    timings = []
    for rank, report in enumerate(reports):
        try:
            timings.append(report.timings)
        except ParseError as error:
            raise ParseError(f"rank {rank}'s timings of a step: {error}") from None
    return timings


def measured_timeline(
    reports: Sequence[StepReport], placement_kind: PlacementKind = "wrap"
) -> Timeline:
    """When ops, transfers and copies ran; each rank's times start with its own step.

    Only rank 0 has other ranks' timings.
    """
    return timeline_of(timings_of(reports), placement_kind)


def reported_events(reports: Sequence[StepReport]) -> list[tuple[int, LinkEvent]]:
    """The events of ranks' delegated links in a step, with their ranks; seconds since it began."""
    return [(rank, event) for rank, each in enumerate(timings_of(reports)) for event in each.events]


def probe_times(reports: Sequence[StepReport]) -> dict[str, float]:
    """A probe's time in each direction, in milliseconds, by the label of the first message there.

    It is the median over the messages of a direction.
    """
    took_ms: dict[str, float] = {}
    for each in parts_of(reports, ProbeTimes):
        for label, duration_ms in each.took_ms:
            # The end that came first waited for the other, so the smaller time is the link's.
            took_ms[label] = min(duration_ms, took_ms.get(label, duration_ms))
    names: dict[Channel, list[str]] = {}
    for label in took_ms:
        names.setdefault(channel_of(Transfer.parse(label)), []).append(label)
    return {of[0]: median(took_ms[label] for label in of) for of in names.values()}


def total_compilations(reports: Sequence[StepReport]) -> int:
    """How many programs all ranks have compiled so far."""
    return sum(report.compilations for report in reports)


def peak_bytes(device: Any) -> int | None:
    """Peak memory in use on a device; None where it doesn't report that, as CPUs don't."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def peaks_of(reports: Sequence[StepReport]) -> tuple[int, ...] | None:
    """Peak memory in use on every rank's device; None if one doesn't report it."""
    peaks = [report.peak_device_bytes for report in reports]
    return tuple(peak for peak in peaks if peak is not None) if None not in peaks else None
