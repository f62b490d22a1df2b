"""Plain values that all packages share: links, routes, events, step records and summaries."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias


class Link(NamedTuple):
    """A pair of stages that exchange data, the lower one first; printed as ``2-3``."""

    lower: int
    upper: int

    def __str__(self) -> str:
        return f"{self.lower}-{self.upper}"

    def in_replica(self, index: int) -> str:
        """Its name where there are several replicas of the pipeline, such as ``r1:2-3``."""
        return f"r{index}:{self}"

    @classmethod
    def of(cls, one: int, other: int) -> "Link":
        """The link of two stages, in either order."""
        return cls(one, other) if one < other else cls(other, one)

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Reads a link back from its text form, such as ``2-3``.

        Raises:
            ValueError: The text is not two stages, the lower one first.
        """
        lower, dash, upper = text.partition("-")
        if not (dash and lower.isdecimal() and upper.isdecimal() and int(lower) < int(upper)):
            raise ValueError(f"got {text!r}, expected a link such as 2-3, the lower stage first")
        return cls(int(lower), int(upper))


Route: TypeAlias = Literal["direct", "delegated"]
"""How a link's transfers travel: on the accelerators' queues, or through the hosts."""

AffectedRoute: TypeAlias = Literal["both", "direct", "delegated"]
"""The route that a condition of an emulated link affects."""

Regime: TypeAlias = Literal["A", "B", "C", "bursty"]
"""How drawn delays of emulated links change: see ``emulation.delay_traces``."""

Routes: TypeAlias = Mapping[Link, Route]
"""The route of each link; a link that is not in the mapping is direct."""


DETECT, TEAR_DOWN, BACK_OFF = "detect", "tear_down", "back_off"
START, COMPILE, RESTORE, PLAN = "start", "compile", "restore", "plan"
REPLAY = "replay"
PHASES = (DETECT, TEAR_DOWN, BACK_OFF, START, COMPILE, RESTORE, PLAN, REPLAY)
"""The phases of a recovery, in order; `training.ledger` measures them."""


class EventKind(StrEnum):
    """The kinds of events; the text below each one is its row in `docs/reference/run-files.md`."""

    LAYERS_CUT = "layers_cut"
    """what `schedule.placement: auto` and `parallelism.layers: auto` have chosen, and why"""
    PLAN_ADOPTED = "plan_adopted"
    """the first plan, what it is based on, what ranks compute on, and how messages are copied"""
    WITHOUT_EFFECT = "without_effect"
    """a setting of the configuration that has no effect in this run, and why"""
    WITHOUT_GRADIENT = "without_gradient"
    """parameters of the model that no gradient reaches
    ([what is checked](../tutorial/own-model.md#what-is-checked))"""
    STRAGGLER_DETECTED = "straggler_detected"
    """a link is slow or dead ([detection](../explanation/detection.md))"""
    STRAGGLER_RECOVERING = "straggler_recovering"
    """a degraded link seems healthy again"""
    STRAGGLER_CLEARED = "straggler_cleared"
    """a degraded link is healthy again"""
    COMPUTE_CHANGED = "compute_changed"
    """a stage's ops have become slower or faster"""
    PLAN_CHANGED = "plan_changed"
    """another plan runs from this step on ([adaptation](../explanation/adaptation.md))"""
    ROUTE_CHANGED = "route_changed"
    """a link has another route from this step on"""
    PLAN_KEPT = "plan_kept"
    """no other plan was better by enough"""
    PLANNING_FAILED = "planning_failed"
    """planning in the background has failed, and training continues"""
    SUM_SLOW = "sum_slow"
    """a stage's gradients take longer than usual to be summed over replicas"""
    REMAPPED = "remapped"
    """ranks change places in the mesh after this step, so that a slow pair of hosts sums nothing;
    or they go back, as none is slow any more"""
    REOPENED = "reopened"
    """ranks have changed places, and what that has cost"""
    LINK_PROBED = "link_probed"
    """a delegated link's direct path was probed, and how fast it was"""
    LINK_FAILED = "link_failed"
    """a direct path has failed in mid-step ([failures](../explanation/failures.md))"""
    LINK_HANDED_OVER = "link_handed_over"
    """a direct link has turned slow in mid-step, and its further messages are delegated
    ([adaptation](../explanation/adaptation.md#a-link-that-turns-slow-in-mid-step))"""
    LINK_PATH_DOWN = "link_path_down"
    """a restored direct path has failed again"""
    LINK_GIVEN_UP = "link_given_up"
    """a direct path is not tried again"""
    LINK_RESTORED = "link_restored"
    """a direct path is used again"""
    STEP_SKIPPED = "step_skipped"
    """the loss or a gradient was not finite: where, and what"""
    CHECKPOINT_SAVED = "checkpoint_saved"
    """a checkpoint is complete ([checkpoints](../how-to/resume.md))"""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """a checkpoint could not be written, and why"""
    CHECKPOINT_NOT_REMOVED = "checkpoint_not_removed"
    """an old checkpoint, or what is left of one, could not be removed, and why"""
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    """a checkpoint that the run doesn't resume from, and why"""
    FILES_DAMAGED = "files_damaged"
    """files of the run directory, or lines of them, that are damaged or can't be written, and what
    becomes of them"""
    RESUMED = "resumed"
    """the run continues from a checkpoint"""
    LINKS_KNOWN = "links_known"
    """links that begin
    [as they were before the restart](../explanation/restarts.md#links-after-a-restart)"""
    RANK_FAILED = "rank_failed"
    """a rank has died or raised, why, and whether the run continues"""
    STALLED = "stalled"
    """a rank made no progress: what it did or waited for
    ([deadlines](../explanation/deadlines.md))"""
    RESTARTED = "restarted"
    """all ranks have started again, and
    [what that has cost](../explanation/restarts.md#what-a-recovery-costs)"""
    STOPPED = "stopped"
    """the run was asked to end, and has saved"""
    LANE_UP = "lane_up"
    """a connection of the [data plane](../explanation/transport.md) is open"""
    LANE_DOWN = "lane_down"
    """a connection of the data plane is lost, or can't be opened for seconds, and why"""
    LANE_CLOSED = "lane_closed"
    """a connection of the data plane is lost, as its receiver reports it"""
    SIDECAR_RESTARTED = "sidecar_restarted"
    """a sidecar was started again"""
    WAITED_FOR_SLOTS = "waited_for_slots"
    """messages waited for a free slot; only the first such step of each plan reports it"""
    PEER_GONE = "peer_gone"
    """a rank has left the data plane"""


CHANGES = frozenset({
    EventKind.STRAGGLER_DETECTED, EventKind.STRAGGLER_CLEARED, EventKind.PLAN_CHANGED,
    EventKind.ROUTE_CHANGED, EventKind.LINK_FAILED, EventKind.LINK_RESTORED,
})  # fmt: skip
"""The kinds of events near which steps save their timelines."""


@dataclass(frozen=True)
class RunHeader:
    """What is about to run.

    Attributes:
        model: in a few words, such as `gpt2 tiny`.
        data: the source of the text, in a few words.
        regime: whether ops are paced, in a few words (`describe_regime`).
        cut_reason: why the layers are cut this way; empty if there was no choice.
        evaluates: whether some steps will have a held-out loss.
    """

    model: str
    num_parameters: int
    layers_per_stage: tuple[int, ...]
    schedule: str
    warmup_forwards: tuple[int, ...]
    microbatches: int
    microbatch_size: int
    sequence_length: int
    num_steps: int
    data: str
    regime: str
    run_directory: Path
    cut_reason: str = ""
    evaluates: bool = False
    num_replicas: int = 1
    devices_per_stage: int = 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.microbatches * self.microbatch_size * self.sequence_length


@dataclass(frozen=True)
class ReplicaStep:
    """How one replica of the pipeline ran a step.

    Attributes:
        routes: those of its plan; a link that has failed over since is in an event.
        pipeline_s: seconds until its first stage had its gradients, before they were summed.
    """

    schedule: str
    warmup_forwards: tuple[int, ...]
    routes: Mapping[str, str]
    predicted_step_s: float | None
    pipeline_s: float


_REPLICA = re.compile(r"r(\d+):")
_IF_KNOWN = {"in_line": "if known"}
_NOT_IN_LINE = {"in_line": "never"}


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, planned and measured: a line of `metrics.jsonl`.

    The text below each field is its row in `docs/reference/run-files.md`.
    """

    step: int
    """its number, from 0"""
    loss: float
    """mean loss of a token, before the update"""
    grad_norm: float
    """global norm of the gradients, before clipping"""
    step_s: float
    """seconds from barrier to barrier"""
    tokens_per_s: float
    """of all ranks together"""
    schedule: str
    """the schedule's name"""
    warmup_forwards: tuple[int, ...]
    """how many forwards each stage runs before its first backward"""
    routes: Mapping[str, str]
    """each link's route, such as `{"0-1": "direct"}`"""
    predicted_step_s: float | None
    """the step as simulated from measured costs and latencies; direct transfers hold queues. It is
    the latest simulation that was ready when the step ended"""
    bubble_rate: float | None
    """the idle share of the devices' time, measured"""
    peak_live: tuple[int, ...]
    """most microbatches that each stage held at once, on its device or in host memory"""
    compilations: int
    """programs that all ranks have compiled so far, without those found in the compilation cache;
    it grows only after a link's path has failed, for its next direct programs, and while ranks
    change places"""
    planned_bubble_rate: float | None = field(default=None, metadata=_NOT_IN_LINE)
    """the plan's idle share; for the terminal only"""
    link_states: Mapping[str, str] = field(default_factory=dict, metadata=_NOT_IN_LINE)
    """links that are not healthy, in a few words; for the terminal only"""
    held_out_loss: float | None = field(default=None, metadata=_IF_KNOWN)
    """after steps that were evaluated: mean loss of a token of held-out text, after the update"""
    auxiliary: Mapping[str, float] | None = field(default=None, metadata=_IF_KNOWN)
    """the model's auxiliary losses by name: summed over layers, a mean over microbatches; `loss`
    has each times its weight"""
    link_ms: Mapping[str, float] | None = field(default=None, metadata=_IF_KNOWN)
    """the median transfer of each direction, such as `{"2>3": 31.2}`, milliseconds; missing if
    nothing was transferred"""
    peak_on_device: tuple[int, ...] | None = field(default=None, metadata=_IF_KNOWN)
    """with `offload.enabled`: most microbatches whose stash each stage's device held at once"""
    peak_device_bytes: tuple[int, ...] | None = field(default=None, metadata=_IF_KNOWN)
    """most bytes in use on each stage's device since its rank started, if devices report it, as
    GPUs do"""
    replicas: tuple[ReplicaStep, ...] | None = field(default=None, metadata=_IF_KNOWN)
    """with `parallelism.data` above 1: of each replica `schedule`, `warmup_forwards`, `routes` and
    `predicted_step_s`, as its own plan has them, and `pipeline_s`, the seconds until its first
    stage had its gradients, before they were summed; outside `replicas`, these fields are those of
    replica 0"""
    tflops_per_device: float | None = field(default=None, metadata=_IF_KNOWN)
    """unless ops are paced or steps have several lengths: how fast each device computes the model,
    in 10^12 floating-point operations a second. Only products of matrices count, three times those
    of the forward; recomputation does not"""
    mfu: float | None = field(default=None, metadata=_IF_KNOWN)
    """`tflops_per_device` as a share of the device's bfloat16 peak in its data sheet (H100, H800,
    H200 and A100)"""
    skipped: bool = False
    """whether the update was skipped because the loss or a gradient was not finite"""

    def metrics(self) -> dict[str, Any]:
        """A line of `metrics.jsonl`."""
        found = {
            item.name: value
            for item in fields(self)
            if item.metadata != _NOT_IN_LINE
            and ((value := getattr(self, item.name)) is not None or not item.metadata)
        }
        if self.replicas is not None:
            found["replicas"] = [*map(vars, self.replicas)]
        return found


@dataclass(frozen=True)
class Event:
    """What a run reports besides its steps: a line of `events.jsonl`.

    The text below each field is its row in `docs/reference/run-files.md`.
    """

    time_s: float
    """seconds since training began, resumed, or ranks changed places, after the steps that only
    measure timings"""
    step: int
    """the step of the event"""
    kind: str
    """one of the kinds below"""
    link: str | None = None
    """the link concerned, such as `2-3`, or null"""
    detail: str = ""
    """one line for a human reader"""
    evidence: Mapping[str, Any] | None = None
    """of decisions: the measurements, and the predicted step time of each plan"""

    def of_replica(self, index: int) -> "Event":
        """The event as the run records it for a replica; those of replica 0 have no mark."""
        if index == 0:
            return self
        if self.link is not None:
            return replace(self, link=Link.parse(self.link).in_replica(index))
        return replace(self, detail=f"r{index}: {self.detail}")

    @property
    def replica(self) -> int:
        """Which replica the event is of, by the mark that `of_replica` makes."""
        mark = _REPLICA.match(self.link or self.detail)
        return int(mark[1]) if mark else 0

    def line(self) -> dict[str, Any]:
        """A line of `events.jsonl`."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if name != "evidence" or value}


@dataclass(frozen=True)
class Recovery:
    """A failure, and the time until the run was back where it had been.

    Attributes:
        restart: Its number in the run, from 1.
        step: The step that the failure interrupted.
        from_step: The step at which the run resumes.
        steps_again: How many finished steps were lost.
        phases_s: Seconds by phase (`PHASES`).
        cut_off: Whether another failure, or the end of the run, interrupted the recovery.
    """

    restart: int
    reason: str
    step: int
    from_step: int
    steps_again: int
    phases_s: Mapping[str, float]
    cut_off: bool = False

    @property
    def total_s(self) -> float:
        """The cost of the failure, seconds."""
        return sum(self.phases_s.values())

    def to_json(self) -> dict[str, Any]:
        """The recovery as a JSON object."""
        return {**asdict(self), "total_s": self.total_s}


@dataclass(frozen=True)
class Goodput:
    """How much of a run's time was spent in steps that count.

    Attributes:
        productive_s: Time in steps; a step that was done again counts once.
        wall_s: From the first launch to the end of the last step, or of the last failed restart.
    """

    productive_s: float
    wall_s: float
    recoveries: tuple[Recovery, ...] = ()

    @property
    def share(self) -> float:
        """Productive time over wall time."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    @property
    def lost_s(self) -> float:
        """The cost of all failures, seconds."""
        return sum(recovery.total_s for recovery in self.recoveries)

    def to_json(self) -> dict[str, Any]:
        """The contents of `recovery.json`."""
        return {
            "goodput": self.share,
            "productive_s": self.productive_s,
            "wall_s": self.wall_s,
            "lost_s": self.lost_s,
            "recoveries": [recovery.to_json() for recovery in self.recoveries],
        }


@dataclass(frozen=True)
class RunSummary:
    """The results of a finished run; `None` where nothing was planned, measured or reported.

    Attributes:
        elapsed_s: from the first step's start to the last one's end.
        step_s, predicted_step_s, bubble_rate, planned_bubble_rate: medians over the steps.
        picture: planned against measured.
        traces: Chrome traces of sampled steps.
        morph_steps: the first step of each plan after the first one.
        longer_than_planned: median excess of a step over its own plan, as a share.
        peak_device_bytes: of each stage's device.
        tflops_per_device, mfu: as in a `StepRecord`; medians.
    """

    losses: tuple[float, ...]
    elapsed_s: float
    step_s: float
    predicted_step_s: float | None
    bubble_rate: float | None
    planned_bubble_rate: float | None
    tokens_per_s: float
    run_directory: Path
    picture: Path | None = None
    traces: tuple[Path, ...] = ()
    held_out_losses: tuple[float, ...] = ()
    skipped_steps: int = 0
    morph_steps: tuple[int, ...] = ()
    longer_than_planned: float | None = None
    goodput: Goodput | None = None
    peak_device_bytes: tuple[int, ...] | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None


def in_bytes(count: float) -> str:
    """A number of bytes with a fitting unit, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
