"""`Trainer`: training steps for a loop of your own, over your own model and batches."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import optax

from jaxmorph.config import Config
from jaxmorph.control.link_state import FailedPaths, PathFailure
from jaxmorph.control.path_reports import PathReport, join_reports
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.messages import EventEmitted, RunMessage
from jaxmorph.program.instructions import RankInstructions, Receive, Send, channel_of
from jaxmorph.program.lowering import forward_only
from jaxmorph.program.slots_needed import power_of_two
from jaxmorph.progress import progress
from jaxmorph.records import CHANGES, EventKind
from jaxmorph.report.terminal import Reporter
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.kept_programs import CompilationCounter, keep_compiled
from jaxmorph.runtime.rendezvous import gather
from jaxmorph.runtime.report import measured_timeline, total_auxiliary
from jaxmorph.runtime.step import StepResult
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.stage.model import Params, PipelineModel, vocabulary_of
from jaxmorph.stage.parameters import check_weights
from jaxmorph.training.callbacks import SaveRequest
from jaxmorph.training.cluster import require_one_host
from jaxmorph.training.open_stage import add_slots
from jaxmorph.training.plan_in_force import plan_step, unmeasured_profile
from jaxmorph.training.remap import Moved, Remapping
from jaxmorph.training.resume import RunStart
from jaxmorph.training.run import Run, Training, begin_training, fail_together, load_run, plan_run
from jaxmorph.training.run_checkpoints import RunCheckpoints, TrainedOn
from jaxmorph.training.run_parts import unreached_in_words
from jaxmorph.training.script import (
    configure,
    cut_batch,
    end_if_failed,
    example_shapes,
    leave,
    script_directory,
    sections_without_effect,
)
from jaxmorph.training.verification import FoundRun, found_by_rank_0, verified_script_start

_log = logging.getLogger(__name__)
_LOGGED = CHANGES - {EventKind.LINK_FAILED}  # `_log_step` warns about that, on every rank


@dataclass(frozen=True)
class StepMetrics:
    """The results of a step, the same on every rank.

    Attributes:
        step: Its number, from 0.
        loss: Mean loss of the targets that count, before the update.
        grad_norm: Global norm of the gradients, before clipping.
        updated: False if the loss or a gradient is not finite: then parameters stay as they are.
        step_s: Seconds from the last rank's call to the last gradient.
        tokens_per_s: Tokens of the batch, divided by `step_s`.
        failed_links: Links, such as "1-2", whose direct path failed in this step. From then on
            they are delegated to the hosts; no bit of the results changes (`failover.enabled`).
        auxiliary: The model's auxiliary losses by name, without weights: summed over layers, a mean
            over microbatches.
        stopped: Whether a rank has asked to stop (`Trainer.ask_to_stop`).
    """

    step: int
    loss: float
    grad_norm: float
    updated: bool
    step_s: float
    tokens_per_s: float
    failed_links: tuple[str, ...] = ()
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    stopped: bool = False


@dataclass(frozen=True)
class _Begun:
    """What ranks send one another when a step begins."""

    length_index: int
    stop_asked: bool


class Trainer:
    """One stage of a pipeline, which takes training steps together with the other stages.

    With `parallelism.data` above 1 it is a stage of one of several replicas.

    Every process of a script makes one `Trainer`, and all make the same calls. A single stage needs
    no launcher; `jaxmorph launch --stages N SCRIPT` starts N processes on this machine, and a
    cluster has its own launcher. With several processes, make the trainer before JAX computes
    anything. Use it in a `with` statement, or call `close`.

    Args:
        model: Embedding, layers and head as pure functions (`PipelineModel`).
        config: The configuration of `jaxmorph train`: a mapping of sections, the path of a YAML
            file, or a `Config`. `parallelism.stages` defaults to the number of processes, divided
            by `parallelism.data`. With `run.dir` the run's records are written there; with a
            section `checkpoint` its state is saved too. Keys about the model (except `weights`),
            the data (except `sequence_length`) and evaluation have no effect.
        optimizer: An Optax transformation that updates each number independently; None: the
            configuration's AdamW. Gradients are clipped to `optimizer.clip_norm` first.
        example: A batch for `step`; only its shapes and dtypes count. It is needed if inputs and
            targets are not tokens of text, the model takes extras, or batches differ in length.
        shorter: A batch of each other length, longest first; `example` is then the longest.
        resume: Resume from the last whole checkpoint in `run.dir`, if there is one; the first batch
            is then that of `next_step`.

    Attributes:
        rank: The number of this process. At first the stages of replica 0 have the lowest numbers,
            then those of replica 1, and so on.
        layers: The layers of each of this rank's virtual stages; several only with chunks. They
            may change when ranks change places (`adaptation.remaps`).

    Raises:
        UserError: Model, configuration, optimizer and processes don't fit each other.
    """

    _stop_asked = False

    def __init__(
        self,
        model: PipelineModel,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        optimizer: optax.GradientTransformation | None = None,
        example: Sequence[Any] | None = None,
        shorter: Sequence[Sequence[Any]] = (),
        resume: bool = False,
    ) -> None:
        _check_optimizer(optimizer)
        checked, self._rendezvous = configure(config)
        directory, self.config = script_directory(config, checked)
        self.rank = self._rendezvous.rank
        if self.rank == 0 and (unused := sections_without_effect(self.config, directory)):
            sections = ", ".join(unused)
            _log.warning("Trainer ignores %s: only `jaxmorph train` reads these sections", sections)
        require_one_host(self.config, self._rendezvous)
        plan_step(self.config, unmeasured_profile(self.config))
        start = self._find_start(directory, resume)
        if self.config.model.weights is not None and not (start and start.first_step):
            check_weights(model, self.config.model.weights)
        self._compilations = CompilationCounter() if directory else None
        self._shapes = example_shapes(example, self.config, shorter)
        self._vocab_size = vocabulary_of(model, self.config.data.sequence_length)
        self._take: Callable[[RunMessage], None] | None = None
        self._last: StepResult | None = None
        self._moved: Moved | None = None
        with ExitStack() as opening:
            checkpoints = None if start is None else self._open_directory(opening, start)
            if checkpoints is not None:
                self.config = checkpoints.starting_config
            self._load = partial(
                load_run,
                rendezvous=self._rendezvous,
                model=model,
                checkpoints=checkpoints,
                shapes=self._shapes,
                optimizer=optimizer,
            )
            self._run: Run = self._load(self.config)
            keep = keep_compiled(self.config, directory, self.rank)
            self._programs_ran = opening.enter_context(keep)
            self._opened_stage = opening.enter_context(ExitStack())
            self._open_stage()
            if self._run.taken:
                _log.info("rank %d: %s", self.rank, self._run.taken)
            if self.rank == 0 and (unreached := unreached_in_words(self._run.unreached)):
                _log.warning("%s", unreached)
            self._opened = opening.pop_all()

    @property
    def params(self) -> tuple[Params, ...]:
        """The float32 parameters of each of the rank's virtual stages, in the order of `layers`.

        {"embed": (first stage), "layers": each leaf stacked over the layers, "head": (last stage)}.
        The next step donates these arrays: copy what you want to keep.
        """
        return self._stage.params

    @property
    def state(self) -> tuple[Any, ...]:
        """Parameters and optimizer state: nested dictionaries, one for each virtual stage.

        As with `params`, the next step donates these arrays.
        """
        return self._stage.state

    @property
    def next_step(self) -> int:
        """The number of the step to come, which is the number of steps done."""
        return self._next_step

    def restore(self, state: Sequence[Any], next_step: int) -> None:
        """Continue from an earlier state of this trainer, or of another one with the same stages.

        Args:
            state: `state` of this rank, copied with `jax.device_get`.

        Raises:
            UserError: It belongs to another model, cut or optimizer; or the run directory has
                later steps already.
        """
        if self._run.checkpoints is not None and next_step < self._next_step:
            raise UserError(
                f"next_step: got {next_step}, expected at least {self._next_step}: run.dir has the "
                "steps before that; to go back, open a trainer with another run.dir, or without one"
            )
        self._stage.restore(state)
        self._next_step = next_step

    @property
    def plan(self) -> Plan | None:
        """The plan and its reason; None before the first step, which measures and plans.

        If the run adapts, only rank 0 has the current plan; the other ranks keep the first one.
        """
        return self._training and self._training.recording.plan

    @property
    def timeline(self) -> Timeline | None:
        """When each op and transfer of the last step ran, on rank 0; None on other ranks."""
        last = self._last
        if last is None or self.rank != 0:
            return None
        return measured_timeline(last.reports, last.program.placement_kind)

    def step(self, batch: Sequence[Any]) -> StepMetrics:
        """Take one training step, together with all other ranks.

        The first call also plans: it first times a few steps, which update nothing.

        Args:
            batch: Tokens and targets, the same on every rank: integers [batch.microbatches *
                batch.microbatch_size, data.sequence_length] each. Targets below 0 don't count. Or
                inputs, targets, and a dictionary of extras if there are any, like the `example`.

        Raises:
            UserError: The batch does not have this form; nothing has changed.
            RunFailedError: Too many steps in a row were not finite
                (`optimizer.stop_after_skipped`); parameters are those after the last finite step.
        """
        inputs = self._cut(batch)
        training = self._begun(inputs)
        loop = training.loop
        # The step begins with the last rank's call, not with the end of the step before.
        begun = gather(self._rendezvous, _Begun, _Begun(inputs.length_index, self._stop_asked))
        lengths = [each.length_index for each in begun]
        if len({*lengths}) > 1:
            raise UserError(
                f"batch: got batches of several lengths, by rank {lengths} (0: like `example`), "
                "expected the same batch on every rank"
            )
        loop.begin()
        loop.next_step = self._next_step
        is_first = self._last is None
        result = self._last = loop.step(inputs)
        if is_first:
            self._programs_ran()
        self._next_step, self._first_microbatch = loop.next_step, 0
        failures = self._log_step(result)
        if training.skipped.why_stop:
            raise RunFailedError(training.skipped.why_stop)
        if training.remapping is not None and training.remapping.layout is not None:
            self._change_places(training, training.remapping, batch)
        step_s = max(report.took_s for report in result.reports)
        return StepMetrics(
            result.step,
            result.totals.loss,
            result.totals.grad_norm,
            result.updated,
            step_s,
            self.config.tokens_per_step / step_s,
            tuple(str(failure.link) for failure in failures),
            total_auxiliary(result.reports),
            any(each.stop_asked for each in [*result.parts_of(SaveRequest), *begun]),
        )

    def ask_to_stop(self) -> None:
        """Set `stopped` in a step's metrics on all ranks; save after that step, if the run saves.

        A call on one rank is enough, and a signal handler may make it. With checkpoints that step
        is the one in progress, otherwise the next one.
        """
        self._stop_asked = True

    def evaluate(self, batch: Sequence[Any]) -> float:
        """The mean loss of a batch with the current parameters; only forwards run.

        All ranks call it with the same batch, as for `step`, and get the same loss.

        Raises:
            UserError: As for `step`.
        """
        inputs = self._cut(batch)
        loop = self._begun(inputs).loop
        self._add_slots_for_forwards(loop.program)
        # A message carries its step and microbatch. Higher microbatch numbers keep these messages
        # apart from those of the next step.
        self._first_microbatch += self.config.microbatches
        program = forward_only(loop.program, self._first_microbatch)
        inputs = replace(inputs, first_microbatch=self._first_microbatch)
        return loop.runner.forwards(program, inputs, self._next_step).loss

    def _cut(self, batch: Sequence[Any]) -> StepInputs:
        return cut_batch(
            batch,
            self.config,
            self._run.rendezvous.rank,
            self._vocab_size,
            self._shapes,
            reads_extras=self._stage.reads_extras,
            replica=self._run.replicas.own,
        )

    def _longest(self, inputs: StepInputs) -> StepInputs:
        """The inputs, or zeros of the longest length if they are shorter: plans are made for it."""
        if self._shapes is None or inputs.length_index == 0:
            return inputs
        zeros, microbatches = self._shapes.zeros(), self.config.batch.microbatches
        return self._cut(
            jax.tree.map(
                lambda leaf: np.broadcast_to(leaf, (microbatches, *leaf.shape)),
                (zeros.inputs, zeros.targets, zeros.extras),
            )
        )

    def close(self) -> None:
        """Stop everything that the trainer has started; then a script may make another one.

        With `run.dir` all ranks wait for one another and for the save in progress.

        Raises:
            RunFailedError: On all ranks, if rank 0 can't write a file of the run, or if the last
                save has failed.
        """
        training, self._training = self._training, None
        recorded = None if self._run.checkpoints is None else training  # else no rank writes files
        try:
            if recorded is not None:
                recorded.recording.finish(self._run.replicas)
            failure = "" if training is None else training.finish()
            self._opened.close()
        except BaseException:
            leave()
            self._opened.__exit__(*sys.exc_info())  # given the error, nothing waits
            raise
        if recorded is not None:
            fail_together(self._rendezvous, recorded.recorder.unwritten, "", failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        leave()  # the other ranks then don't wait for this one
        self._training = None
        self._opened.__exit__(kind, error, trace)
        if isinstance(error, SystemExit):
            end_if_failed(error)

    def _open_stage(self) -> None:
        """Open this rank's stage: the first one, or the one at its next place in the mesh."""
        self.config, timeouts = self._run.of_all, self.config.timeouts
        with progress.within(timeouts.compile_s, "starts"):
            self._stage = self._opened_stage.enter_context(self._run.open_stage(self._moved))
        with progress.within(timeouts.restore_s, "restores the checkpoint"):
            self._run.restore(self._stage, self._moved)
        self.layers = tuple(self._run.own_layers)
        self._training: Training | None = None
        self._next_step, self._first_microbatch = self._run.first_step, 0
        self._has_slots_for: RankInstructions | None = None
        self._failed = FailedPaths()

    def _change_places(
        self, training: Training, remapping: Remapping, batch: Sequence[Any]
    ) -> None:
        """Go on at this rank's next place in the mesh; all ranks call this after the same step.

        Args:
            batch: The batch of that step.
        """
        training.recording.finish(self._run.replicas)
        if failure := training.finish():
            _log.warning("the last state could not be saved: %s", failure)
        self._moved = remapping.change_places(training.loop, training.skipped)
        self._opened_stage.close()
        fail_together(self._rendezvous, training.recorder.unwritten, "", "")
        self._run = self._load(self.config, moved=self._moved, cut=self._run.cut)
        self._open_stage()
        self._begun(self._cut(batch))

    def _find_start(self, directory: Path | None, resume: bool) -> RunStart | None:
        """How the run begins; None if nothing is written."""
        if directory is not None:
            return verified_script_start(self.config, self._rendezvous, resume=resume)
        if resume:
            expected = "run.dir in the configuration: where the run's checkpoints are"
            raise UserError(f"resume: got True, expected {expected}")
        return None

    def _open_directory(self, opening: ExitStack, start: RunStart) -> RunCheckpoints:
        """Open the run's directory on rank 0; all ranks learn where it is."""

        def open_it() -> FoundRun:
            record = opening.enter_context(start.open_record(Reporter()))
            self._take = record.take
            return FoundRun(str(record.directory.resolve()))

        found = found_by_rank_0(self._rendezvous, open_it)
        return RunCheckpoints(self.config, Path(found.directory), start.first_step)

    def _begun(self, inputs: StepInputs) -> Training:
        """On the first call, measure a few steps over a batch, plan, and begin training."""
        if self._training is None:
            with progress.within(self.config.timeouts.start_s, "measures steps and plans"):
                longest = self._longest(inputs)
                planned = plan_run(self._run, self._stage, longest, evaluates=True)
            self._training = self._opened_stage.enter_context(
                begin_training(
                    self._run,
                    self._stage,
                    planned,
                    self._receive,
                    "a script's batches",
                    num_steps=None,
                    trained_on=TrainedOn(),
                    compilations=self._compilations,
                    stop_asked=lambda: self._stop_asked,
                )
            )
            self._has_slots_for = self._training.loop.program
            if self._moved is not None and self._run.records:
                self._moved.report(self._training.recorder)
        return self._training

    def _receive(self, message: RunMessage) -> None:
        """Write and log rank 0's messages."""
        if self._take is not None:
            self._take(message)
        if isinstance(message, EventEmitted) and message.event.kind in _LOGGED:
            event = message.event
            _log.info("step %d: %s: %s", event.step, event.kind, event.detail)

    def _log_step(self, result: StepResult) -> Sequence[PathFailure]:
        """Log a step's events; returns the direct paths that failed in it."""
        for event in result.events:
            _log.info("rank %d, step %d: %s: %s", self.rank, result.step, event.kind, event.detail)
        joined = join_reports(result.parts_of(PathReport))
        self._failed, failures = self._failed.record(joined.failures)
        for failure in failures if self._run.leads else ():
            what = "is slow" if failure.is_handover else "failed"
            _log.warning("step %d: link %s %s: %s", result.step, failure.link, what, failure.detail)
        self._failed = self._failed.restore(joined.restored)
        return [failure for failure in failures if not failure.is_handover]

    def _add_slots_for_forwards(self, program: RankInstructions) -> None:
        """Allocate the slots that the forwards of a new plan need when no backward frees any.

        Where host memory is limited it adds none, and forwards wait for the plan's slots.
        """
        room = None if self._training is None else self._training.room
        if program is self._has_slots_for or (room is not None and room.rank_bytes is not None):
            return
        self._has_slots_for = program
        moves = (each for each in program.instructions if isinstance(each, Send | Receive))
        delegated = (each.transfer for each in moves if each.route == "delegated")
        most = power_of_two(self.config.microbatches)
        slots = {channel_of(each): most for each in delegated}
        add_slots(self._run.rendezvous, self._stage, slots)
        self._run.rendezvous.exchange({})  # no rank sends before both ends have them


def _check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise UserError(
            f"optimizer: got {optimizer!r}, expected an Optax transformation, such as "
            "optax.adam(1e-3), or None for the configuration's AdamW"
        )
