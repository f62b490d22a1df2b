"""A training run as one rank sees it, from its stage's parameters to the last step."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxmorph.bookkeeping import Bookkeeper
from jaxmorph.config import Config, per_stage
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.data import Batches, ReadAhead, load_tokens
from jaxmorph.layer_choice import choose_layers, measured_on_rank_0
from jaxmorph.link_settings import agree_on_origin_s, emulated_conditions, untimed
from jaxmorph.model_factory import build_model
from jaxmorph.open_stage import adopt_plan, open_stage
from jaxmorph.planning import (
    agree_on_plan,
    agree_on_stash,
    op_kinds,
    possible_routes,
    unmeasured_profile,
)
from jaxmorph.runtime.compilations import CompilationCounter
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.optimizer import OptimizerSettings, clip_scale
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import StepTotals, measured_timeline, rank_report, total
from jaxmorph.runtime.stage_trainer import StageSettings, StageTrainer
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameter_count import parameter_count
from jaxmorph.stage.stored_weights import check_weights

_WARM_UP_STEPS = 3  # the first of them also connects the links, and doesn't count

Message = dict[str, Any]


def train(config: Config, rendezvous: Rendezvous, tell: Callable[[Message], None]) -> None:
    """Train as one rank of a run.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks; this process's rank is the one it names.
        tell: Takes what rank 0 has to say of the run: see `bookkeeping`.

    Raises:
        UserError: If model, data and sizes don't fit one another.
    """
    rank = rendezvous.rank
    compilations = CompilationCounter()
    parts = load_parts(config)
    measure = partial(measured_on_rank_0, config, parts.model, parts.batches)
    cut = choose_layers(config, rendezvous, parts.model.num_layers, measure)
    read = step_reader(config, parts.batches, rank)
    conditions, links = emulated_conditions(config), EmulatedLinks()
    settings = stage_settings(config, cut.layers, rank)
    num_tied = len(parts.model.tied)
    with (
        open_stage(config, rendezvous, parts.model, settings, links) as trainer,
        ReadAhead(read) as inputs,
    ):
        links.emulate(untimed(conditions))
        stash_bytes = agree_on_stash(rendezvous, trainer.stash_memory)
        profiler = warm_up(config, rendezvous, trainer, read(0), num_tied, stash_bytes)
        told = _as_told(config, profiler.profile())
        in_force = agree_on_plan(config, rendezvous, told, num_tied)
        equipped = adopt_plan(rendezvous, trainer, in_force)
        settle_garbage()
        trainer.events()  # those of the start
        rendezvous.limit(config.timeouts.step_s)
        links.emulate(conditions, agree_on_origin_s(rendezvous))
        with Bookkeeper(config, in_force, profiler, tell, active=rank == 0) as bookkeeper:
            num_parameters = parameter_count(parts.model)
            bookkeeper.start(parts.source, num_parameters, cut.layers, cut.reason, equipped)
            barrier_s = time.monotonic()
            for step in range(config.run.steps):
                outcome = trainer.run(in_force.program, next(inputs), step)
                norm, compiled = trainer.squared_norm(), compilations.count
                report = rank_report(outcome, norm, barrier_s, compiled, trainer.events())
                reports = rendezvous.exchange(*report)
                began_s, barrier_s = barrier_s, time.monotonic()
                totals = total(reports)
                apply_gradients(trainer, totals, config.optimizer.clip_norm)
                bookkeeper.note(step, totals, reports, barrier_s - began_s)


@dataclass(frozen=True)
class RunParts:
    """What a configuration names, loaded and fitting together.

    Attributes:
        model: The model.
        batches: The data of every step.
        source: Where the data comes from, in a few words.
    """

    model: PipelineModel
    batches: Batches
    source: str


def load_parts(config: Config) -> RunParts:
    """Load what a configuration names.

    Args:
        config: The run.

    Raises:
        UserError: If there is no such data or model, or sizes don't fit one another.
    """
    data, batch, cut = config.data, config.batch, config.parallelism
    tokens = load_tokens(data.path, data.tokenizer, data.token_dtype, data.vocab_size)
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
    return RunParts(model, batches, tokens.source)


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


def _as_told(config: Config, profile: Profile) -> Profile:
    """What planning is told: what was measured, but for the links that the configuration names."""
    return replace(profile, links=config.schedule.links_told(profile.links))


def settle_garbage() -> None:
    """Take what start-up made, which stays, out of the garbage collector's rounds.

    A full collection over JAX's and Flax's many objects takes tens of milliseconds, in the middle
    of a step, on every rank at another moment.
    """
    gc.collect()
    gc.freeze()


def warm_up(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    stash_bytes: StashBytes,
) -> Profiler:
    """Run a few steps for their timings alone, in the order that equal costs would give.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks.
        trainer: This rank's stage.
        inputs: The data of every one of these steps.
        num_tied: How many tied parameters the first and the last stage hold copies of.
        stash_bytes: What one microbatch keeps on each stage.

    Returns:
        What was measured, on rank 0.
    """
    profiler = Profiler(config.parallelism.stages, stash_bytes)
    unmeasured = unmeasured_profile(config, stash_bytes)
    in_force = agree_on_plan(config, rendezvous, unmeasured, num_tied)
    adopt_plan(rendezvous, trainer, in_force)
    for step in range(_WARM_UP_STEPS):
        began_s = time.monotonic()
        # Numbered before training's first step: no message may pass for one of another step.
        outcome = trainer.run(in_force.program, inputs, step - _WARM_UP_STEPS)
        trainer.discard()
        reports = rendezvous.exchange(*rank_report(outcome, 0.0, began_s, 0))
        if step > 0 and rendezvous.rank == 0:
            profiler.observe(measured_timeline(reports))
    return profiler
