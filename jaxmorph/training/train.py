"""One rank of `jaxmorph train`: loads the model and data, plans, and runs the loop.

The launcher starts each rank as `python -m jaxmorph.training.train`.
"""

import time
from collections.abc import Callable
from pathlib import Path

from jaxmorph.config import Config, load_config
from jaxmorph.data import read_ahead
from jaxmorph.errors import UserError
from jaxmorph.messages import PhaseEnded, RunMessage
from jaxmorph.plain_json import tagged
from jaxmorph.progress import progress
from jaxmorph.records import COMPILE, PLAN, RESTORE, START
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.kept_programs import CompilationCounter, keep_compiled
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stop_signals import signals_ask
from jaxmorph.training.first_plan import settle_garbage
from jaxmorph.training.layer_choice import LayerChoice
from jaxmorph.training.remap import Moved
from jaxmorph.training.run import (
    Run,
    begin_training,
    fail_together,
    load_run,
    plan_run,
)
from jaxmorph.training.run_checkpoints import RunCheckpoints, TrainedOn
from jaxmorph.training.run_parts import RunParts, load_parts, require_same_data, step_reader


def train(
    config: Config,
    rendezvous: Rendezvous,
    send: Callable[[RunMessage], None],
    directory: Path,
    first_step: int = 0,
    *,
    restarts: int = 0,
    stop_asked: Callable[[], bool] = lambda: False,
) -> bool:
    """Train as one rank of a run.

    Args:
        send: Takes rank 0's messages, and from every rank the phases of its start.
        first_step: 0, or the number of steps done at the checkpoint.
        stop_asked: Whether this process has been asked to save and end.

    Returns:
        Whether the last step is done; if not, some rank was asked to end.

    Raises:
        UserError: Model, data and sizes don't fit each other.
        CheckpointError: The last state could not be saved.
        RunFailedError: Too many steps in a row were not finite, or a record can't be written.
    """
    compilations, timeouts = CompilationCounter(), config.timeouts
    progress.phase("loads the model and the data", timeouts.compile_s)
    checkpoints = RunCheckpoints(config, directory, first_step)
    config = checkpoints.starting_config
    try:
        parts = load_parts(config)
    except UserError as error:
        # An earlier start could read the file: its storage may be back at the next restart.
        if restarts > 0 and isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
    require_same_data(config, rendezvous, parts.data)
    moved: Moved | None = None
    cut: LayerChoice | None = None
    while True:  # once, unless ranks change places
        run = load_run(
            config,
            rendezvous,
            parts.model,
            checkpoints,
            microbatch=parts.microbatch,
            shapes=parts.shapes,
            restarts=restarts,
            moved=moved,
            cut=cut,
        )
        config, cut = run.of_all, run.cut
        is_done, moved = _train_at(run, parts, send, compilations, stop_asked, moved, directory)
        if moved is None:
            break
    progress.phase("ends", 0.0)
    return is_done


def _train_at(
    run: Run,
    parts: RunParts,
    send: Callable[[RunMessage], None],
    compilations: CompilationCounter,
    stop_asked: Callable[[], bool],
    moved: Moved | None,
    directory: Path,
) -> tuple[bool, Moved | None]:
    """Open the stage, measure, plan, and take steps until the loop ends.

    Args:
        moved: How this rank came to its place; None: it starts or resumes.

    Returns:
        Whether the last step is done, and how ranks change places, if that is why the loop ended.
    """
    config, rank = run.config, run.rendezvous.rank
    timeouts = config.timeouts
    started = send if moved is None else lambda message: None
    _send_end_of(START, started)
    progress.phase("starts", timeouts.compile_s)
    with (
        keep_compiled(config, directory, run.replicas.all_ranks.rank) as programs_ran,
        run.open_stage(moved) as stage,
        read_ahead(
            read := step_reader(config, parts.batches, rank, stage, run.replicas.own),
            run.first_step,
        ) as inputs,
    ):
        _send_end_of(COMPILE, started)
        progress.phase("restores the checkpoint", timeouts.restore_s)
        run.restore(stage, moved)
        _send_end_of(RESTORE, started)
        progress.phase("measures steps and plans", timeouts.start_s)
        longest = read(parts.longest_step)
        evaluates = config.evaluation.every_steps is not None
        planned = plan_run(run, stage, longest, evaluates=evaluates)
        settle_garbage()
        stage.events()  # drop those of the start
        _send_end_of(PLAN, started)
        progress.phase("between steps", timeouts.step_s)
        with begin_training(
            run,
            stage,
            planned,
            send,
            parts.source,
            num_steps=config.run.steps,
            trained_on=TrainedOn(parts.vocab_size, parts.data),
            held_out=parts.held_out,
            compilations=compilations,
            stop_asked=stop_asked,
        ) as training:
            if moved is not None and run.records:
                moved.report(training.recorder)
            training.loop.run(inputs, run.first_step + 1)
            programs_ran()
            is_done = training.loop.run(inputs, config.run.steps)
            training.recording.finish(run.replicas)
            progress.phase("waits for the last save", timeouts.step_s)
            failure = training.finish()
            why_stop, remapping, moves = training.skipped.why_stop, training.remapping, None
            if remapping is not None and remapping.layout is not None and not why_stop:
                progress.phase("changes places", timeouts.restore_s)  # until the next start
                moves = remapping.change_places(training.loop, training.skipped)
                failure = ""  # the next loop saves again
    fail_together(run.replicas.all_ranks, training.recorder.unwritten, why_stop, failure)
    return is_done, moves


def _send_end_of(phase: str, send: Callable[[RunMessage], None]) -> None:
    send(PhaseEnded(phase, time.monotonic()))  # for the phases of a recovery (`ledger`)


def _run_rank(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    config_path, first_step, restarts = rest
    config, directory = load_config(Path(config_path)), Path(config_path).parent
    progress.phase("joins the other ranks", config.timeouts.start_s)
    rendezvous = join_run(arguments, Joining.of(config))
    # Signals act as in a task of a job, but a terminal's Ctrl-C reaches only the launcher.
    with signals_ask(config.checkpoint.stop_within_s, link.stop_asked):
        train(
            config,
            rendezvous,
            lambda message: link.send(tagged(message)),
            directory,
            int(first_step),
            restarts=int(restarts),
            stop_asked=link.stop_asked.is_set,
        )


if __name__ == "__main__":
    run_rank(_run_rank)
