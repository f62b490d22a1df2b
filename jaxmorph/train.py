"""A training run as one rank sees it, from its stage's parameters to the last step."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmorph.bookkeeping import Bookkeeper
from jaxmorph.checkpoints.saver import CheckpointError
from jaxmorph.config import Config, per_stage
from jaxmorph.data import Batches, ReadAhead, hold_out, load_tokens
from jaxmorph.data.digest import DataDigest, digest_of
from jaxmorph.evaluation import Evaluation, held_out_batches, with_room_to_evaluate
from jaxmorph.first_plan import plan_by_timings
from jaxmorph.layer_choice import choose_layers, measured_on_rank_0
from jaxmorph.link_settings import agree_on_origin_s, emulated_conditions, untimed
from jaxmorph.model_factory import build_model
from jaxmorph.open_stage import open_stage
from jaxmorph.planning import op_kinds, possible_routes
from jaxmorph.reporting.run_directory import RESUMED
from jaxmorph.run_checkpoints import RunCheckpoints
from jaxmorph.runtime.compilations import CompilationCounter
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.optimizer import OptimizerSettings, clip_scale
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import StepTotals, rank_report, total
from jaxmorph.runtime.stage_trainer import StageSettings, StageTrainer
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameter_count import parameter_count
from jaxmorph.stage.stored_weights import check_weights

Message = dict[str, Any]


def train(
    config: Config,
    rendezvous: Rendezvous,
    tell: Callable[[Message], None],
    directory: Path,
    first_step: int = 0,
) -> None:
    """Train as one rank of a run.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks; this process's rank is the one it names.
        tell: Takes what rank 0 has to say of the run: see `bookkeeping`.
        directory: The run's.
        first_step: The step to begin with: 0, or how many the checkpoint to go on from has done.

    Raises:
        UserError: If model, data and sizes don't fit one another.
        CheckpointError: If the last state could not be saved.
    """
    rank = rendezvous.rank
    compilations = CompilationCounter()
    checkpoints = RunCheckpoints(config, directory, first_step)
    config = checkpoints.starting_config
    parts = load_parts(config)
    checkpoints.require_shared(rendezvous)
    measure = partial(measured_on_rank_0, config, parts.model, parts.batches)
    cut = checkpoints.cut or choose_layers(config, rendezvous, parts.model.num_layers, measure)
    read = step_reader(config, parts.batches, rank)
    conditions, links = emulated_conditions(config), EmulatedLinks()
    settings = stage_settings(config, cut.layers, rank)
    num_tied = len(parts.model.tied)
    with (
        open_stage(config, rendezvous, parts.model, settings, links) as trainer,
        ReadAhead(read, first_step) as inputs,
    ):
        checkpoints.restore(trainer, settings.own_stages(rank))
        links.emulate(untimed(conditions))
        make_room = partial(with_room_to_evaluate, config)
        first = plan_by_timings(config, rendezvous, trainer, read(0), num_tied, make_room)
        in_force = first.in_force
        settle_garbage()
        trainer.events()  # those of the start
        rendezvous.limit(config.timeouts.step_s)
        links.emulate(conditions, agree_on_origin_s(rendezvous))
        programs = in_force.programs
        evaluation = Evaluation(config, rendezvous, trainer, programs, parts.held_out)
        with (
            Bookkeeper(
                config, in_force, first.profiler, tell, active=rank == 0, first_step=first_step
            ) as bookkeeper,
            checkpoints.saver(
                rendezvous,
                settings,
                bookkeeper.event,
                bookkeeper.told_so_far,
                vocab_size=parts.vocab_size,
                tied=parts.model.tied,
                data=parts.data,
            ) as saver,
        ):
            num_parameters = parameter_count(parts.model)
            bookkeeper.start(parts.source, num_parameters, cut.layers, cut.reason, first.equipped)
            if first_step > 0:
                bookkeeper.event(first_step, RESUMED, checkpoints.origin)
            barrier_s = time.monotonic()
            for step in range(first_step, config.run.steps):
                outcome = trainer.run(in_force.program, next(inputs), step)
                norm, compiled = trainer.squared_norm(), compilations.count
                report, timings = rank_report(outcome, norm, barrier_s, compiled, trainer.events())
                reports = rendezvous.exchange(report | saver.told(), timings)
                began_s, barrier_s = barrier_s, time.monotonic()
                totals = total(reports)
                apply_gradients(trainer, totals, config.optimizer.clip_norm)
                step_s, held_out = barrier_s - began_s, evaluation.after(step)
                barrier_s += held_out.took_s
                bookkeeper.note(step, totals, reports, step_s, held_out)
                saver.heed(reports)
                if config.checkpoint.is_due(step + 1, config.run.steps):
                    saver.save(step + 1, trainer.state)
            failure = saver.finish()
        if failure:
            rendezvous.exchange({})  # rank 0 has told of it, and no rank ends before
            raise CheckpointError(f"the last state could not be saved: {failure}")


@dataclass(frozen=True)
class RunParts:
    """What a configuration names, loaded and fitting together.

    Attributes:
        model: The model.
        batches: The data of every step.
        held_out: What is evaluated; None: nothing.
        source: Where the data comes from, in a few words.
        vocab_size: The data's, which the model is built for.
        data: What tells whether they are still the same data.
    """

    model: PipelineModel
    batches: Batches
    held_out: Batches | None
    source: str
    vocab_size: int
    data: DataDigest


def load_parts(config: Config) -> RunParts:
    """Load what a configuration names.

    Args:
        config: The run.

    Raises:
        UserError: If there is no such data or model, or sizes don't fit one another.
    """
    data, batch, cut = config.data, config.batch, config.parallelism
    whole = load_tokens(data.path, data.tokenizer, data.token_dtype, data.vocab_size)
    tokens, held_out = hold_out(whole, data.held_out_fraction)
    model = build_model(config, tokens.vocab_size)
    if config.model.weights is not None:
        check_weights(model, config.model.weights)
    batches = Batches(
        tokens,
        microbatches=batch.microbatches,
        microbatch_size=batch.microbatch_size,
        sequence_length=data.sequence_length,
        seed=config.run.seed,
    )
    cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)  # whether they fit
    held_out = held_out_batches(config, held_out)
    data_digest = digest_of(whole.ids)
    return RunParts(model, batches, held_out, tokens.source, tokens.vocab_size, data_digest)


def stage_settings(
    config: Config, layers: tuple[range, ...], rank: int, *, adapts: bool = False
) -> StageSettings:
    """What a rank's stage is built from.

    Args:
        config: The run.
        layers: The layers of each virtual stage.
        rank: The stage.
        adapts: Whether routes may change from plan to plan: both of every link are made ready.
    """
    optimizer = config.optimizer
    direct, delegated = possible_routes(config, adapts=adapts)
    return StageSettings(
        layers=layers,
        microbatch_size=config.batch.microbatch_size,
        sequence_length=config.data.sequence_length,
        seed=config.run.seed,
        kinds=op_kinds(config),
        optimizer=OptimizerSettings(
            learning_rate=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.run.steps,
            final_fraction=optimizer.final_learning_rate_fraction,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
        ),
        stash=config.stash,
        pace=stage_pace(config, rank),
        transfer_timeout_s=config.timeouts.step_s,
        num_chunks=config.parallelism.chunks,
        direct=direct,
        delegated=delegated,
        weights=config.model.weights,
    )


def stage_pace(config: Config, rank: int) -> Pace | None:
    """How long a stage's ops last on the emulated accelerator; None where none is emulated.

    The configured times are those of the whole stage: an op of one chunk lasts its share of them.
    """
    accelerator = config.emulation.accelerator
    if accelerator is None:
        return None
    stages = config.parallelism.stages
    durations = (
        accelerator.forward_ms,
        accelerator.backward_input_ms,
        accelerator.backward_weight_ms,
    )
    own_ms = (per_stage(value, stages)[rank] for value in durations)
    return Pace.of_stage(*own_ms, num_chunks=config.parallelism.chunks)


def apply_gradients(trainer: StageTrainer, totals: StepTotals, clip_norm: float | None) -> bool:
    """Update the stage's parameters, unless a gradient of any stage is not finite.

    Args:
        trainer: The stage, with its gradients.
        totals: The step's scalars, the same on every rank, so that all decide alike.
        clip_norm: Largest global norm; None: no clipping.

    Returns:
        Whether the parameters were updated.
    """
    if not math.isfinite(totals.grad_norm):
        trainer.discard()
        return False
    trainer.update(clip_scale(totals.grad_norm, clip_norm))
    return True


def step_reader(config: Config, batches: Batches, rank: int) -> Callable[[int], StepInputs]:
    """How a rank reads a step's data: tokens on the first stage, targets on the last.

    Args:
        config: The run.
        batches: The data of every step.
        rank: The stage.

    Returns:
        A function from a step's number to its inputs.
    """
    is_last = rank == config.parallelism.stages - 1

    def read(step: int) -> StepInputs:
        targets = batches.targets(step) if is_last else None
        counted = 1 if targets is None else int(np.count_nonzero(targets >= 0))
        return StepInputs(
            tokens=batches.inputs(step) if rank == 0 else None,
            targets=targets,
            loss_weight=1.0 / max(counted, 1),
        )

    return read


def settle_garbage() -> None:
    """Take what start-up made, which stays, out of the garbage collector's rounds.

    A full collection over JAX's and Flax's many objects takes tens of milliseconds, in the middle
    of a step, on every rank at another moment.
    """
    gc.collect()
    gc.freeze()
