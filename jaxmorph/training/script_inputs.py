"""What a user's script gives: the configuration, with as many stages as processes, and batches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmorph.config import Config, check_config, read_config
from jaxmorph.config.sections import Run
from jaxmorph.errors import UserError
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.launcher import threads_for
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.training.cluster import num_tasks
from jaxmorph.training.script_launch import launch_told
from jaxmorph.training.script_meeting import meet

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
