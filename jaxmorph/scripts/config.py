"""The configuration of a user's script: given in Python, with as many stages as processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmorph.config import Config, check_config, read_config
from jaxmorph.errors import UserError
from jaxmorph.runtime.launcher import OFFLOADING_THREADS
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.scripts.launched import launch_told
from jaxmorph.scripts.meeting import meet
from jaxmorph.training.cluster import num_tasks

_SOME_STAGES = 4

_OF_RUNS = ("checkpoint", "evaluation", "metrics", "restart_policy", "trace")

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
    threads = OFFLOADING_THREADS if first.offload.enabled else 1
    rendezvous = meet(first.timeouts.start_s, first.direct_timeout_s, threads)
    config = check_config(_with_stages(tree, rendezvous.num_ranks), name)
    stages, processes = config.parallelism.stages, rendezvous.num_ranks
    if stages != processes:
        raise UserError(
            f"parallelism.stages: got {stages}, expected the number of the script's processes, "
            f"{processes} (`jaxmorph launch --stages {stages} SCRIPT` starts {stages} here)"
        )
    return config, rendezvous


def sections_without_effect(config: Config) -> list[str]:
    """The sections that say what only `jaxmorph train` does, and say more than the defaults."""
    default = Config()
    return [name for name in _OF_RUNS if getattr(config, name) != getattr(default, name)]


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
    about = {name: tree.get(name) for name in ("timeouts", "failover", "offload")}
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
