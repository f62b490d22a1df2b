"""One rank of a run that `jaxmorph train` started on this machine: `python -m jaxmorph.rank`."""

from pathlib import Path

from jaxmorph.config import Config, load_config
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.train import train


def join_as_told(config: Config, arguments: RankArguments) -> Rendezvous:
    """Join the run that a launcher on this machine has started.

    Args:
        config: The run's configuration, for its deadlines.
        arguments: The launcher's.

    Returns:
        The rendezvous with the other ranks.
    """
    return join_run(
        start_timeout_s=config.timeouts.start_s,
        step_timeout_s=config.timeouts.step_s,
        coordinator=arguments.coordinator,
        num_ranks=arguments.num_ranks,
        rank=arguments.rank,
    )


def _train(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    (config_path,) = rest
    config = load_config(Path(config_path))
    train(config, join_as_told(config, arguments), link.send)


if __name__ == "__main__":
    run_rank(_train)
