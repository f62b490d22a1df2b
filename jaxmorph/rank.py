"""One rank of a run that `jaxmorph train` started on this machine: `python -m jaxmorph.rank`."""

from pathlib import Path

from jaxmorph.config import load_config
from jaxmorph.runtime.join import join_as_told
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.train import train


def _train(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    config_path, first_step = rest
    config = load_config(Path(config_path))
    rendezvous = join_as_told(
        arguments,
        start_timeout_s=config.timeouts.start_s,
        step_timeout_s=config.timeouts.step_s,
    )
    directory, stop_asked = Path(config_path).parent, link.stop_asked.is_set
    train(config, rendezvous, link.send, directory, int(first_step), stop_asked)


if __name__ == "__main__":
    run_rank(_train)
