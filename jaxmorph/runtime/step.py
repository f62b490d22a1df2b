"""One step of training on one rank: run instructions, exchange reports, apply gradients.

Training, comparisons and first measurements all run their steps here.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmorph.placement import ALONE, Replica
from jaxmorph.program.instructions import RankInstructions
from jaxmorph.progress import progress
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.optimizer import clip_scale
from jaxmorph.runtime.rank_process import reporting_failures
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.report import (
    AuxiliaryLosses,
    LinkEvent,
    StepReport,
    StepTimings,
    StepTotals,
    addressed_parts,
    named_parts,
    parts_of,
    peak_bytes,
    total,
)
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.stage.model import count_targets

_Part = TypeVar("_Part")
_NAMED = 2  # arrays that a message names


@dataclass(frozen=True)
class StepResult:
    """A step that is over.

    Attributes:
        program: This rank's instructions.
        totals: The scalars of all ranks together.
        reports: All ranks' reports, in rank order; on rank 0 they contain the timings.
        timings: This rank's own.
        step_s: From the step's beginning to the end of the exchange.
        ended_s: When the exchange ended, on the monotonic clock.
        updated: Whether parameters were updated.
        events: Events of this rank's delegated links since the last step, on the monotonic clock.
    """

    step: int
    program: RankInstructions
    totals: StepTotals
    reports: tuple[StepReport, ...]
    timings: StepTimings
    step_s: float
    ended_s: float
    updated: bool
    events: tuple[LinkEvent, ...] = ()

    def parts_of(self, kind: type[_Part]) -> list[_Part]:
        """The parts that callbacks added to each rank's report: see `report.parts_of`."""
        return parts_of(self.reports, kind)


@dataclass(frozen=True)
class ForwardTotals:
    """The results of forwards alone, on all ranks together.

    Attributes:
        loss: The weighted sum of the losses that count.
        counted: How many targets count.
    """

    loss: float
    counted: int


@dataclass(frozen=True)
class StepRunner:
    """Runs steps on one rank; all ranks make the same calls.

    Attributes:
        clip_norm: Largest global norm of gradients; None: no clipping.
        compilations: Counts this rank's compilations; None: reported as 0.
        timeout_s: How long a step may take from one of its stamps to the next (`progress`); 0: the
            limit that is in force already.
        gradient_sum: Sums over the replicas of the pipeline; None: there is only one.
    """

    stage: StageTrainer
    rendezvous: Rendezvous
    clip_norm: float | None = None
    compilations: CompilationCounter | None = None
    timeout_s: float = 0.0
    gradient_sum: GradientSum | None = None

    @property
    def replica(self) -> Replica:
        """The replica whose step this is."""
        return ALONE if self.gradient_sum is None else self.gradient_sum.replicas.own

    def run(
        self,
        program: RankInstructions,
        inputs: StepInputs,
        step: int,
        *,
        began_s: float | None = None,
        report: Callable[[int], Iterable[Any]] = lambda step: (),
        updates: bool = True,
    ) -> StepResult:
        """Run a step, and update the parameters unless a loss or gradient is not finite.

        Args:
            began_s: When the step began, on the monotonic clock; None: now.
            report: Returns the parts that this rank adds to its report (`named_parts`); called once
                the gradients are there.
            updates: False in a step that runs only for its timings: its gradients are discarded.
        """
        began_s = time.monotonic() if began_s is None else began_s
        with reporting_failures(), progress.within(self.timeout_s, f"step {step}"):
            stage = self.stage
            outcome = self._run_ops(program, inputs, step)
            parts = [*report(step)]
            if updates and self.gradient_sum is not None:
                outcome, parts = self.gradient_sum.run(stage, outcome, parts, step)
            progress.stamp("computes the norm of its gradients")
            squared_norm = self._squared_norm() if updates else 0.0
            took_s = time.monotonic() - began_s
            # Steps for timings leave the events to the first step of training.
            events = self._events() if updates else ()
            timings = StepTimings.of_step(outcome, began_s, events)
            if inputs.length_index:  # plans are made for the longest steps: these ops don't count
                timings = replace(timings, op_times={}, copies_ms={})
            parts.append(AuxiliaryLosses(outcome.aux))
            own = StepReport(
                loss=outcome.loss,
                squared_norm=squared_norm,
                compilations=0 if self.compilations is None else self.compilations.count,
                took_s=took_s,
                not_finite=not_finite_in_words(stage, outcome, squared_norm) if updates else "",
                peak_device_bytes=peak_bytes(stage.device),
                parts=named_parts(parts),
            )
            own_parts = addressed_parts(parts)
            of_ranks = self.rendezvous.exchange(own.to_json(), timings.detail(), own_parts)
            ended_s = time.monotonic()
            progress.stamp("updates its parameters")
            reports = tuple(StepReport.from_json(each, rank) for rank, each in enumerate(of_ranks))
            totals = total(reports)
            updated = updates and apply_gradients(stage, totals, self.clip_norm)
            if not updates:
                stage.discard()
            if updated and self.gradient_sum is not None:
                self.gradient_sum.complete(stage, step)
            step_s = ended_s - began_s
            return StepResult(
                step, program, totals, reports, timings, step_s, ended_s, updated, events
            )

    def _squared_norm(self) -> float:
        if self.gradient_sum is None:
            return self.stage.squared_norm()
        return self.gradient_sum.squared_norm(self.stage)

    def forwards(self, program: RankInstructions, inputs: StepInputs, step: int) -> ForwardTotals:
        """Run forwards alone, for an evaluation."""
        counted = count_targets(inputs.targets)
        doing = f"evaluation after step {step}"
        with reporting_failures(), progress.within(self.timeout_s, doing):
            outcome = self._run_ops(program, replace(inputs, evaluates=True), step)
            own = ForwardTotals(outcome.loss, counted)
            if self.gradient_sum is not None:
                own = _added(self.gradient_sum.replicas.of_stage(ForwardTotals, own))
            of_ranks = gather(self.rendezvous, ForwardTotals, own)
        return _added(of_ranks)

    def _run_ops(self, program: RankInstructions, inputs: StepInputs, step: int) -> StepOutcome:
        """Run the stage's ops and transfers; errors name the run's ranks."""
        try:
            return self.stage.run(program, inputs, step)
        except Exception as error:
            members, named = self.rendezvous.members, vars(error)
            if "waited_for" in named and [*members] != [*range(len(members))]:
                stage = named["waited_for"]  # numbered within the replica
                named["waited_for"] = None if stage is None else members[stage]
                ranks = ", ".join(map(str, members))
                where = f"in replica {self.replica.index}, whose ranks are the run's {ranks}"
                error.args = (f"{where}: {error}",)
            raise

    def _events(self) -> tuple[LinkEvent, ...]:
        of_links = map(LinkEvent.of, self.stage.events())
        return (*of_links, *(self.gradient_sum.take_events() if self.gradient_sum else ()))


def _added(totals: Sequence[ForwardTotals]) -> ForwardTotals:
    return ForwardTotals(sum(each.loss for each in totals), sum(each.counted for each in totals))


def apply_gradients(stage: StageTrainer, totals: StepTotals, clip_norm: float | None) -> bool:
    """Update the stage's parameters, unless the loss or a gradient of any stage is not finite.

    Returns:
        Whether the parameters were updated; if not, the optimizer state is unchanged too.
    """
    if not totals.is_finite:
        stage.discard()
        return False
    stage.update(clip_scale(totals.grad_norm, clip_norm))
    return True


def not_finite_in_words(stage: StageTrainer, outcome: StepOutcome, squared_norm: float) -> str:
    """Which of a rank's losses and gradients are not finite; empty if all are finite."""
    found = [
        f"auxiliary loss {name} {mean}"
        for name, mean in outcome.aux.items()
        if not math.isfinite(mean)
    ]
    if not found and not math.isfinite(outcome.loss):  # this includes the auxiliary losses
        found = [f"loss {outcome.loss}"]
    # Gradients are checked only if their norm is not finite, and on the host, to compile nothing.
    if not math.isfinite(squared_norm):
        found.append(_gradients_in_words(stage.gradients, is_share=stage.shares is not None))
    return ", ".join(found)


def _gradients_in_words(gradients: Any, *, is_share: bool) -> str:
    leaves = jax.tree.leaves_with_path(gradients)
    bad = [path for path, leaf in leaves if not np.isfinite(np.asarray(leaf)).all()]
    if not bad and is_share:
        return "gradients of another replica's share"
    if not bad:
        return "finite gradients, the sum of whose squares is not"
    names = ", ".join(_name(path, len(gradients)) for path in bad[:_NAMED])
    others = ", ..." if len(bad) > _NAMED else ""
    return f"gradients of {len(bad)} of {len(leaves)} arrays ({names}{others})"


def _name(path: tuple[Any, ...], num_chunks: int) -> str:
    """An array's name in the model, such as `layers/attention/qkv/kernel`."""
    chunk, *rest = path
    name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in rest)
    return name if num_chunks == 1 else f"chunk {chunk.idx} {name}"
