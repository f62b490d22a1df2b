"""One rank of a run that `jaxmorph train` started: `python -m jaxmorph.training.rank`."""

from pathlib import Path

from jaxmorph.config import load_config
from jaxmorph.messages import tagged
from jaxmorph.runtime.join import join_as_told
from jaxmorph.runtime.kept_programs import keep_compiled
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.training.train import train


def _train(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    config_path, first_step, restarts = rest
    config, directory = load_config(Path(config_path)), Path(config_path).parent
    keep_compiled(config, directory, arguments.rank)
    rendezvous = join_as_told(
        arguments,
        start_timeout_s=config.timeouts.start_s,
        step_timeout_s=config.direct_timeout_s,
        fails_over=config.fails_over,
    )
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
    run_rank(_train)
