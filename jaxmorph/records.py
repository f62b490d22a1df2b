"""What rooms hand one another as plain values; it imports nothing of jaxmorph."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

Message = dict[str, Any]
"""What a rank or a process tells another, as JSON has it."""


class Link(NamedTuple):
    """A pair of stages that exchange data, the lower one first; printed as ``2-3``."""

    lower: int
    upper: int

    def __str__(self) -> str:
        return f"{self.lower}-{self.upper}"

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
"""How a link's transfers travel: on the accelerators' queues, or by the hosts."""

Routes: TypeAlias = Mapping[Link, Route]
"""The route of each link; a link that is not in the mapping is direct."""


def pipeline_links(num_stages: int, num_chunks: int = 1) -> tuple[Link, ...]:
    """The links that activations and gradients take: 0-1, 1-2, ...

    With several chunks (virtual stages per rank) then 0-(S-1), unless that is link 0-1 itself.
    """
    chain = tuple(Link(stage, stage + 1) for stage in range(num_stages - 1))
    wraps = num_chunks > 1 and num_stages > 2
    return (*chain, Link(0, num_stages - 1)) if wraps else chain


DETECT, TEAR_DOWN, BACK_OFF = "detect", "tear_down", "back_off"
START, COMPILE, RESTORE, PLAN = "start", "compile", "restore", "plan"
REPLAY = "replay"
PHASES = (DETECT, TEAR_DOWN, BACK_OFF, START, COMPILE, RESTORE, PLAN, REPLAY)
"""What a recovery is spent on, one after another; `training.ledger` says what each lasts."""

PLAN_CHANGED = "plan_changed"
"""The kind of event that says which plan is in force from its step on."""
RESUMED = "resumed"
"""The kind of event that says from which step a run goes on."""
LINKS_KNOWN = "links_known"
"""The kind of event that says which links begin as an earlier life of the run knew them."""
DAMAGED = "checkpoint_damaged"
"""The kind of event that says which checkpoint a run doesn't go on from, and why."""
RANK_FAILED = "rank_failed"
"""The kind of event that says which rank failed, why, and whether the run goes on."""
RESTARTED = "restarted"
"""The kind of event that says what a failure has cost, once the run is again where it was."""
CHANGES = frozenset({
    "straggler_detected", "straggler_cleared", "plan_changed", "route_changed", "link_failed",
    "link_restored",
})  # fmt: skip
"""The kinds of event around which steps leave timelines."""


@dataclass(frozen=True)
class RunHeader:
    """What is about to run.

    Attributes:
        model: the model in a few words, such as `gpt2 tiny`.
        warmup_forwards: forwards before the first backward, for each stage.
        data: where the text comes from, in a few words.
        regime: whether ops are paced, in a few words (`describe_regime`).
        cut_reason: why the model is cut so; empty where there was nothing to choose.
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

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step is trained on."""
        return self.microbatches * self.microbatch_size * self.sequence_length


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, planned and measured.

    Attributes:
        loss: mean loss of a token.
        grad_norm: global norm of the gradient, before clipping.
        step_s: from step barrier to step barrier.
        tokens_per_s: of the whole run's processes together.
        warmup_forwards: forwards before the first backward, for each stage.
        routes: each link's route, such as `{"0-1": "direct"}`.
        predicted_step_s: the plan's step time; None while there is no measured plan.
        bubble_rate: measured idle share of the devices' time; None where it was not measured.
        peak_live: most microbatches held at once, for each stage, on its device or in host memory.
        compilations: programs compiled by all ranks together so far.
        planned_bubble_rate: the plan's idle share; for the terminal only.
        link_states: of links that are not healthy, in a few words; for the terminal only.
        held_out_loss: mean loss of a token of held-out text, with the parameters that the step's
            update made; None, and no field of the line, after steps that were not evaluated.
        link_ms: median milliseconds of the step's transfers, by directions such as `2>3`; None, and
            no field of the line, where nothing was transferred.
        peak_on_device: most of them on the device at once, for each stage; None, and no field of
            the line, where stashes may not be offloaded.
        peak_device_bytes: most bytes in use on each stage's device since its rank started; None,
            and no field of the line, where a device doesn't tell, as CPUs don't.
        skipped: whether parameters stayed as they were, as loss or gradients were not finite.
    """

    step: int
    loss: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    schedule: str
    warmup_forwards: tuple[int, ...]
    routes: Mapping[str, str]
    predicted_step_s: float | None
    bubble_rate: float | None
    peak_live: tuple[int, ...]
    compilations: int
    planned_bubble_rate: float | None = field(default=None, metadata={"shown_only": True})
    link_states: Mapping[str, str] = field(default_factory=dict, metadata={"shown_only": True})
    held_out_loss: float | None = field(default=None, metadata={"left_out_if_none": True})
    link_ms: Mapping[str, float] | None = field(default=None, metadata={"left_out_if_none": True})
    peak_on_device: tuple[int, ...] | None = field(
        default=None, metadata={"left_out_if_none": True}
    )
    peak_device_bytes: tuple[int, ...] | None = field(
        default=None, metadata={"left_out_if_none": True}
    )
    skipped: bool = False

    def metrics(self) -> dict[str, Any]:
        """The fields of a line of `metrics.jsonl`."""
        return {
            item.name: value
            for item in fields(self)
            if "shown_only" not in item.metadata
            and ((value := getattr(self, item.name)) is not None or not item.metadata)
        }


@dataclass(frozen=True)
class Event:
    """Something that happened to the run, beside its steps.

    Attributes:
        time_s: seconds since training began, after the warm-up steps.
        kind: such as `plan_changed` or `link_failed`.
        link: the link it happened to, such as `2-3`, if any.
        detail: one line for a human reader.
        evidence: the numbers behind it, as JSON has them; None, and no field of the line, where
            there are none.
    """

    time_s: float
    step: int
    kind: str
    link: str | None = None
    detail: str = ""
    evidence: Mapping[str, Any] | None = None

    def line(self) -> dict[str, Any]:
        """The fields of a line of `events.jsonl`."""
        told = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in told.items() if name != "evidence" or value}


@dataclass(frozen=True)
class RunSummary:
    """What a finished run achieved.

    Attributes:
        elapsed_s: from the first step's start to the last one's end.
        predicted_step_s: median planned step, if steps had plans.
        bubble_rate: median measured idle share, if measured.
        planned_bubble_rate: median planned idle share, if steps had plans.
        picture: the picture of planned against measured, if drawn.
        traces: Chrome traces of sampled steps.
        held_out_losses: the held-out losses of the steps that were evaluated.
        morph_steps: the first step of each plan after the first one.
        longer_than_planned: by which share the median step was longer than its own plan, if steps
            had plans.
        goodput: which share of all the time since the launch was spent in steps that stayed, if
            known.
        productive_s: that time, seconds.
        num_restarts: how often the ranks were started again.
        lost_s: what their failures have cost, seconds.
        peak_device_bytes: most bytes in use on each stage's device, if the devices tell.
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
    goodput: float | None = None
    productive_s: float = 0.0
    wall_s: float = 0.0
    num_restarts: int = 0
    lost_s: float = 0.0
    peak_device_bytes: tuple[int, ...] | None = None
