"""Training steps for a loop of the user's own, over their own model and batches."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import optax

from jaxmorph.config import Config
from jaxmorph.control.link_state import FailedPaths
from jaxmorph.control.path_reports import path_news
from jaxmorph.emulation.link_conditions import untimed
from jaxmorph.emulation.link_settings import emulated_conditions
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.program.lowering import forward_only
from jaxmorph.runtime.emulated_links import EmulatedLinks, agree_on_origin_s
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.report import StepReport, measured_timeline
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.stage.model import Params, PipelineModel, taken_on_device
from jaxmorph.stage.parameters import check_weights
from jaxmorph.training.adaptation import OwnEnds
from jaxmorph.training.cluster import require_one_host
from jaxmorph.training.device_budget import with_device_budget
from jaxmorph.training.evaluation import with_room_for_forwards
from jaxmorph.training.first_plan import plan_by_timings
from jaxmorph.training.layer_choice import choose_layers, measured_on_rank_0
from jaxmorph.training.open_stage import open_stage, stage_settings
from jaxmorph.training.plan_in_force import PlanInForce, plan_step, unmeasured_profile
from jaxmorph.training.save_times import SkippedSteps
from jaxmorph.training.script_inputs import configure, cut_batch, sections_without_effect
from jaxmorph.training.script_meeting import end_if_failed, leave

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """What a step gave, the same on every rank.

    Attributes:
        step: Its number, from 0.
        loss: Mean loss of the targets that count, before the update.
        grad_norm: Global norm of the gradients, before clipping.
        updated: Whether parameters were updated: not where the loss or a gradient is not finite.
        step_s: Seconds from the last rank's call to the last gradient.
        tokens_per_s: Tokens of the batch, divided by `step_s`.
        failed_links: The links, such as "1-2", whose direct path failed in this step: it went on by
            hosts, with the same bits, and so do the steps after it. See `failover.enabled`.
    """

    step: int
    loss: float
    grad_norm: float
    updated: bool
    step_s: float
    tokens_per_s: float
    failed_links: tuple[str, ...] = ()


class Trainer:
    """A stage of a pipeline, and the steps that all stages take together.

    Every process of a script makes one, and makes the same calls. One stage needs one process and
    no launcher; `jaxmorph launch --stages N SCRIPT` starts N processes on this machine, and on a
    cluster its own launcher does. With several, the trainer is made before JAX computes anything.
    Use it in a `with` statement, or close it.

    Args:
        model: Embedding, layers and head, as pure functions: see `PipelineModel`.
        config: What `jaxmorph train` reads, by the same names: sections as a mapping, the path of a
            YAML file, or a `Config`. With no `parallelism.stages` there are as many as processes.
            The model, the data but for `sequence_length`, and whatever a run writes are the
            script's own: these keys have no effect.
        optimizer: An Optax transformation that updates each number by itself; None: AdamW, by the
            configuration. Either way gradients are first clipped to `optimizer.clip_norm`.

    Attributes:
        rank: The number of this process and of its stage.
        layers: The layers of each of its virtual stages; of several only with chunks.

    Raises:
        UserError: If model, configuration, optimizer and processes don't fit one another.
    """

    def __init__(
        self,
        model: PipelineModel,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self.config, self._rendezvous = configure(config)
        if self.config.adaptation.enabled:
            raise UserError(
                "adaptation.enabled: got true, expected false: only `jaxmorph train` adapts"
            )
        self.rank = self._rendezvous.rank
        if self.rank == 0 and (unused := sections_without_effect(self.config)):
            sections = ", ".join(unused)
            _log.warning("Trainer ignores %s: only `jaxmorph train` heeds these sections", sections)
        self._num_tied = len(model.tied)
        self._conditions, self._links = emulated_conditions(self.config), EmulatedLinks()
        require_one_host(self.config, self._rendezvous)
        settings = self._settings(model, optimizer)
        self.layers = tuple(settings.layers[stage] for stage in settings.own_stages(self.rank))
        with ExitStack() as opening:
            opened = open_stage(self.config, self._rendezvous, model, settings, self._links)
            self._stage = opening.enter_context(opened)
            self._opened = opening.pop_all()
        self._runner = StepRunner(self._stage, self._rendezvous, self.config.optimizer.clip_norm)
        self._links.emulate(untimed(self._conditions))
        self._own_ends = OwnEnds(self.rank, self._stage, is_watched=False)
        self._failed = FailedPaths()
        self._in_force: PlanInForce | None = None
        self._next_step, self._first_microbatch = 0, 0
        self._reports: Sequence[StepReport] = ()
        self._skipped = SkippedSteps(self.config.optimizer.stop_after_skipped)

    @property
    def params(self) -> tuple[Params, ...]:
        """The parameters of each of the rank's virtual stages, as `layers` has them, float32.

        {"embed": (first stage), "layers": each leaf stacked over the layers, "head": (last stage)}.
        The next step makes new ones of them, and these arrays are gone.
        """
        return self._stage.params

    @property
    def state(self) -> tuple[Any, ...]:
        """All that the next step depends on: for each of the rank's virtual stages one tree.

        A tree is nested dictionaries of arrays, parameters and optimizer state. As with `params`,
        the next step ends these arrays.
        """
        return self._stage.state

    def restore(self, state: Sequence[Any], next_step: int) -> None:
        """Go on from an earlier state, which may be another trainer's of the same stages.

        Args:
            state: What `state` was on this rank, copied with `jax.device_get`.

        Raises:
            UserError: If it is of another model, cut or optimizer.
        """
        self._stage.restore(state)
        self._next_step = next_step

    @property
    def plan(self) -> Plan | None:
        """What is run, and why; None before the first step, which measures and plans."""
        return self._in_force and self._in_force.plan

    @property
    def timeline(self) -> Timeline | None:
        """When every op and transfer of the last step ran, on rank 0; None elsewhere."""
        return measured_timeline(self._reports) if self._reports and self.rank == 0 else None

    def step(self, batch: Sequence[Any]) -> StepMetrics:
        """Take one step of training, together with all other ranks.

        The first call also takes three steps for their timings alone, and plans.

        Args:
            batch: Tokens and targets, the same on every rank: whole numbers [batch.microbatches *
                batch.microbatch_size, data.sequence_length] each. Targets below 0 don't count.

        Raises:
            UserError: If the batch is no such pair; nothing has been changed then.
            RunFailedError: If this is one too many of steps in a row that were not finite: see
                `optimizer.stop_after_skipped`. Parameters are as the last finite step left them.
        """
        inputs = cut_batch(batch, self.config, self.rank)
        in_force = self._in_force = self._in_force or self._planned(inputs)
        self._rendezvous.exchange({})  # what ranks did since the last step is no part of this one
        step = self._next_step
        result = self._runner.run(
            in_force.program, inputs, step, report=lambda _: self._own_ends.told()
        )
        self._reports, totals = result.reports, result.totals
        self._next_step, self._first_microbatch = step + 1, 0
        for event in result.events:
            _log.info("rank %d, step %d: %s: %s", self.rank, step, event.kind, event.detail)
        self._failed, failures = self._failed.note(path_news(result.parts).failures)
        for failure in failures if self.rank == 0 else ():
            _log.warning("step %d: link %s failed: %s", step, failure.link, failure.detail)
        if self._skipped.note(step, totals):
            raise RunFailedError(self._skipped.why_stop)
        step_s = max(report.took_s for report in result.reports)
        tokens_per_s = self.config.tokens_per_step / step_s
        failed = tuple(str(failure.link) for failure in failures)
        return StepMetrics(
            step, totals.loss, totals.grad_norm, result.updated, step_s, tokens_per_s, failed
        )

    def evaluate(self, batch: Sequence[Any]) -> float:
        """The mean loss of a batch, by forwards alone, together with all other ranks.

        Args:
            batch: As for `step`, such as one of held-out data; nothing is learnt from it.

        Returns:
            The loss with the parameters as they are, the same on every rank.

        Raises:
            UserError: As for `step`.
        """
        inputs = cut_batch(batch, self.config, self.rank)
        in_force = self._in_force = self._in_force or self._planned(inputs)
        # No message may pass for one of the next step's: those have the microbatches before these.
        self._first_microbatch += self.config.batch.microbatches
        program = forward_only(in_force.program, self._first_microbatch)
        inputs = replace(inputs, first_microbatch=self._first_microbatch)
        return self._runner.forwards(program, inputs, self._next_step).loss

    def close(self) -> None:
        """End what the trainer has started; another one may be made afterwards.

        After an error inside its `with` statement that holds for one stage alone.
        """
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            leave()  # so that the other ranks don't wait for this one
        self.close()
        if isinstance(error, SystemExit):
            end_if_failed(error)

    def _settings(
        self, model: PipelineModel, optimizer: optax.GradientTransformation | None
    ) -> StageSettings:
        """What the stage is built from; what can be wrong with it is told here, by every rank."""
        config = self.config
        plan_step(config, unmeasured_profile(config))
        if config.model.weights is not None:
            check_weights(model, config.model.weights)
        sizes = config.batch.microbatch_size, config.data.sequence_length
        if taken := taken_on_device(model, *sizes):
            _log.info("rank %d: %s", self.rank, taken)
        choice = choose_layers(
            config, self._rendezvous, model.num_layers, partial(measured_on_rank_0, config, model)
        )
        settings = stage_settings(config, choice.layers, self.rank)
        return settings if optimizer is None else replace(settings, optimizer=optimizer)

    def _planned(self, inputs: StepInputs) -> PlanInForce:
        """The plan for what a few steps over a batch have cost."""
        rendezvous = self._rendezvous
        config = with_device_budget(self.config, rendezvous, self._stage).first
        first = plan_by_timings(
            config, rendezvous, self._stage, inputs, self._num_tied, with_room_for_forwards
        )
        rendezvous.limit(config.timeouts.step_s)
        self._links.emulate(self._conditions, agree_on_origin_s(rendezvous))
        return first.in_force
