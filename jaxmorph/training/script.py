"""A user's script: how its processes find one another, what they read, how one ends by an error."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxmorph.config import Config, check_config, read_config
from jaxmorph.config.sections import Run
from jaxmorph.errors import UserError
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import (
    have_spare_device,
    have_threads,
    join_run,
    limit_collectives,
    rendezvous_of_joined,
)
from jaxmorph.runtime.launcher import threads_for
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank
from jaxmorph.training.cluster import join_cluster, num_tasks, started_by_cluster
from jaxmorph.training.script_launch import launch_told

_met: list[Rendezvous] = []  # this process's one, which several trainers may use in turn
_left: list[Rendezvous] = []  # the one that it has left for good
_ends_at_once: list[bool] = []


def join(*, start_timeout_s: float = 120.0, step_timeout_s: float = 60.0) -> None:
    """Find the script's other processes, for a script that has JAX compute before its trainer.

    A trainer that is made first does it by itself. JAX wants it done before its first computation.

    Args:
        start_timeout_s: How long to wait for the others.
        step_timeout_s: How long a transfer on CPU waits for its other end; what a trainer's
            configuration says of that comes too late.

    Raises:
        UserError: If JAX has already computed something, or finds this process no place in its job.
    """
    meet(start_timeout_s, step_timeout_s)


def meet(
    start_timeout_s: float,
    direct_timeout_s: float,
    least_threads: int = 1,
    fails_over: bool = False,
) -> Rendezvous:
    """The rendezvous of this script's processes: one made before, or a new one.

    They are those that `jaxmorph launch` has started, those that `jax.distributed` has joined, or
    the tasks of a cluster's job. A process that was started by itself is alone.

    Args:
        least_threads: How many threads XLA's pools need, of processes that `jaxmorph launch` has
            started.
        fails_over: Whether links may fail, and begin again over a spare device.

    Raises:
        UserError: If JAX has already computed something, or finds this process no place in its job,
            or the process has left its rendezvous.
    """
    if _left:
        raise UserError(
            "Trainer: an earlier trainer of this process ended with an error, and the others were "
            "told that it goes no further: start the script anew"
        )
    if not _met:
        _met.append(_join(start_timeout_s, direct_timeout_s, least_threads, fails_over))
    _met[0].limit(start_timeout_s)
    return _met[0]


def leave() -> None:
    """Close the rendezvous, by which the others learn that this process goes no further."""
    while _met:
        met = _met.pop()
        met.close()
        if met.num_ranks > 1:
            _left.append(met)


def _join(start_s: float, step_s: float, least_threads: int, fails_over: bool) -> Rendezvous:
    told = launch_told()
    try:
        if told is not None:
            have_threads(told, least_threads)
            return join_run(
                told, start_timeout_s=start_s, step_timeout_s=step_s, fails_over=fails_over
            )
        if jax.distributed.is_initialized():
            limit_collectives(step_s)
            if fails_over:
                have_spare_device()
            met = rendezvous_of_joined(start_s)
        elif started_by_cluster():
            otherwise = "`jaxmorph launch` starts a script's stages here"
            met = join_cluster(start_s, step_s, fails_over, otherwise)
        else:
            return SoleRank()
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise UserError(
            "Trainer: JAX has computed something already, expected the trainer to be made first, "
            "or jaxmorph.join() to be called: processes find one another before JAX begins"
        ) from error
    if met.num_ranks > 1:
        end_on_uncaught_errors()
    return met


def end_on_uncaught_errors() -> None:
    """From now on an uncaught error ends this process when it has been printed.

    Left to itself, Python would first clean up, and in that JAX waits for minutes for the other
    ranks. The cluster's launcher, and they by their connections, see at once that it is gone. The
    exit code is 2 for a `UserError`, else 1. `sys.exit` isn't seen here: see `end_if_failed`.
    """
    print_error = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_error(kind, error, trace)
        _end(2 if issubclass(kind, UserError) else 1)

    sys.excepthook = end
    _ends_at_once[:] = [True]


def end_if_failed(ending: SystemExit) -> None:
    """End this process now, if uncaught errors do and `sys.exit` was given a failure.

    Args:
        ending: What `sys.exit` has raised. Text is printed, and its exit code is 1.
    """
    code = ending.code
    if not _ends_at_once or code is None or code == 0:
        return
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    _end(code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_SOME_STAGES = 4

_OF_COMMAND = ("evaluation", "restart_policy")
_OF_RUN_DIRECTORY = ("checkpoint", "metrics", "trace")

Source = Config | Mapping[str, Any] | str | Path | None


def configure(source: Source) -> tuple[Config, Rendezvous]:
    """The configuration, and the processes that have found one another by it.

    Args:
        source: A mapping of sections, the path of a YAML file, a configuration, or all defaults.

    Returns:
        The configuration, with the number of processes for `parallelism.stages` where that isn't
        given, and the rendezvous of the processes.

    Raises:
        UserError: If a key is wrong, or asks for another number of processes than there are.
    """
    tree, name = _tree(source), _name(source)
    # First without the rest: what is given per stage can be checked when the processes are counted.
    first = check_config(_about_joining(tree), name)
    start_s, direct_s = first.timeouts.start_s, first.direct_timeout_s
    rendezvous = meet(start_s, direct_s, threads_for(first), first.fails_over)
    config = check_config(_with_stages(tree, rendezvous.num_ranks), name)
    stages, processes = config.parallelism.stages, rendezvous.num_ranks
    if stages != processes:
        raise UserError(
            f"parallelism.stages: got {stages}, expected the number of the script's processes, "
            f"{processes} (`jaxmorph launch --stages {stages} SCRIPT` starts {stages} here)"
        )
    return config, rendezvous


def script_directory(source: Source, config: Config) -> tuple[Path | None, Config]:
    """Where a script's run is written, and the run that is saved if that is asked for.

    Returns:
        The directory, None unless `run.dir` is named: the default that follows from a file's name
        doesn't count. The configuration; without a section `checkpoint` nothing is saved.
    """
    tree = _tree(source)
    run, default = tree.get("run"), None if isinstance(source, Mapping) else Run().dir
    if isinstance(source, str | Path):
        default = f"runs/{Path(source).stem}"
    if not isinstance(run, Mapping) or run.get("dir") in (None, default):
        return None, config
    if "checkpoint" not in tree:
        never = config.checkpoint.model_copy(update={"every_steps": 0})
        config = config.model_copy(update={"checkpoint": never})
    return Path(config.run.dir), config


def sections_without_effect(config: Config, directory: Path | None = None) -> list[str]:
    """The sections that ask for more than the defaults, of which a trainer does nothing.

    Args:
        directory: Where the run is written; None: nowhere.
    """
    names = _OF_COMMAND if directory else sorted(_OF_COMMAND + _OF_RUN_DIRECTORY)
    default = Config()
    return [name for name in names if getattr(config, name) != getattr(default, name)]


def _tree(source: Source) -> Mapping[str, Any]:
    """What is said of the configuration, without defaults."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return source
    if isinstance(source, Config):
        return source.model_dump(exclude_unset=True)
    if isinstance(source, str | Path):
        return read_config(source)
    got = type(source).__name__
    raise UserError(f"config: got {got}, expected a mapping of sections, a path or a Config")


def _about_joining(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What says how long processes wait for each other, and how many threads they need.

    How many there are is known before they have met where that is given, or by their launcher.
    """
    told = launch_told()
    about = {name: tree.get(name) for name in ("timeouts", "failover", "offload", "adaptation")}
    about["parallelism"] = {"stages": told.num_ranks if told else _given_stages(tree)}
    return about


def _given_stages(tree: Mapping[str, Any]) -> int:
    given = tree.get("parallelism")
    stages = given.get("stages") if isinstance(given, Mapping) else None
    return stages if isinstance(stages, int) and stages > 0 else num_tasks() or _SOME_STAGES


def _name(source: Source) -> str:
    """What errors call the configuration."""
    return str(source) if isinstance(source, str | Path) else "config"


def _with_stages(tree: Mapping[str, Any], num_stages: int) -> dict[str, Any]:
    given = tree.get("parallelism") or {}
    if not isinstance(given, Mapping):
        return dict(tree)  # for the check to complain of
    return {**tree, "parallelism": {"stages": num_stages, **given}}


def cut_batch(batch: Sequence[Any], config: Config, rank: int) -> StepInputs:
    """What one rank feeds into a step: tokens on the first stage, targets on the last.

    Args:
        batch: Tokens and targets, whole numbers [batch, sequence] each, or already cut:
            [microbatches, microbatch size, sequence]. Targets below 0 don't count.

    Returns:
        The microbatches, int32; the loss is the mean over the targets that count.
    """
    try:
        tokens, targets = batch
    except (TypeError, ValueError) as error:
        got = type(batch).__name__
        raise UserError(f"batch: got {got}, expected a pair of tokens and targets") from error
    tokens, targets = (
        _microbatches("tokens", tokens, config),
        _microbatches("targets", targets, config),
    )
    is_last = rank == config.parallelism.stages - 1
    return StepInputs(
        tokens=tokens if rank == 0 else None,
        targets=targets if is_last else None,
        loss_weight=1.0 / max(1, np.count_nonzero(targets >= 0)),
    )


def _microbatches(name: str, values: Any, config: Config) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise UserError(f"batch: got {name} of {array.dtype}, expected whole numbers")
    sizes, length = config.batch, config.data.sequence_length
    cut = (sizes.microbatches, sizes.microbatch_size, length)
    whole = (sizes.microbatches * sizes.microbatch_size, length)
    if array.shape not in (whole, cut):
        raise UserError(
            f"batch: got {name} of shape {list(array.shape)}, expected {list(whole)}: "
            "batch.microbatches times batch.microbatch_size, and data.sequence_length"
        )
    return array.astype(np.int32).reshape(cut)
