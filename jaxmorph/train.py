"""A training run as one rank sees it, from its stage's parameters to the last step."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxmorph.adapting.adaptation import Adaptation, open_control_loop
from jaxmorph.checkpoints.saver import CheckpointError
from jaxmorph.config import Config
from jaxmorph.data import ReadAhead
from jaxmorph.emulation.link_settings import agree_on_origin_s, emulated_conditions, untimed
from jaxmorph.planning.device_budget import with_device_budget
from jaxmorph.planning.first_plan import plan_by_timings, settle_garbage
from jaxmorph.planning.layer_choice import choose_layers, measured_on_rank_0
from jaxmorph.reporting.run_directory import RESUMED
from jaxmorph.runtime.compilations import CompilationCounter
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import rank_report, total
from jaxmorph.stage.parameter_count import parameter_count
from jaxmorph.training.bookkeeping import Bookkeeper
from jaxmorph.training.evaluation import Evaluation, with_room_to_evaluate
from jaxmorph.training.gradients import apply_gradients
from jaxmorph.training.open_stage import open_stage
from jaxmorph.training.run_checkpoints import RunCheckpoints
from jaxmorph.training.run_parts import load_parts, step_reader
from jaxmorph.training.stage_settings import stage_settings

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
    settings = stage_settings(config, cut.layers, rank, adapts=config.adapts)
    num_tied = len(parts.model.tied)
    with (
        open_stage(config, rendezvous, parts.model, settings, links) as trainer,
        ReadAhead(read, first_step) as inputs,
    ):
        checkpoints.restore(trainer, settings.own_stages(rank))
        config = with_device_budget(config, rendezvous, trainer)
        links.emulate(untimed(conditions))
        make_room = partial(with_room_to_evaluate, config)
        first = plan_by_timings(config, rendezvous, trainer, read(0), num_tied, make_room)
        in_force = first.in_force
        settle_garbage()
        trainer.events()  # those of the start
        rendezvous.limit(config.timeouts.step_s)
        links.emulate(conditions, agree_on_origin_s(rendezvous))
        program = in_force.program
        evaluation = Evaluation(config, rendezvous, trainer, in_force.programs, parts.held_out)
        with (
            open_control_loop(config, first, num_tied, active=rank == 0) as loop,
            Bookkeeper(
                config,
                in_force,
                first.profiler,
                tell,
                active=rank == 0,
                first_step=first_step,
                loop=loop,
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
            last_step = config.run.steps - 1
            adaptation = Adaptation(rendezvous, trainer, bookkeeper, loop, last_step)
            barrier_s = time.monotonic()
            for step in range(first_step, config.run.steps):
                outcome = trainer.run(program, next(inputs), step)
                norm, compiled = trainer.squared_norm(), compilations.count
                report, timings = rank_report(outcome, norm, barrier_s, compiled, trainer.events())
                told = report | saver.told() | adaptation.told(step)
                reports = rendezvous.exchange(told, timings | adaptation.probed())
                began_s, barrier_s = barrier_s, time.monotonic()
                totals = total(reports)
                apply_gradients(trainer, totals, config.optimizer.clip_norm)
                step_s, held_out = barrier_s - began_s, evaluation.after(step)
                barrier_s += held_out.took_s
                bookkeeper.note(step, totals, reports, step_s, held_out)
                saver.heed(reports)
                if config.checkpoint.is_due(step + 1, config.run.steps):
                    saver.save(step + 1, trainer.state)
                if (morphed := adaptation.heed(step, reports)) is not None:
                    program = morphed
                    evaluation.adopt(program)
            failure = saver.finish()
        if failure:
            rendezvous.exchange({})  # rank 0 has told of it, and no rank ends before
            raise CheckpointError(f"the last state could not be saved: {failure}")
