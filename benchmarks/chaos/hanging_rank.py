"""`jaxmorph train` with ranks whose queues hang on request: `-m benchmarks.chaos.hanging_rank`.

An item that its accelerator never ends can't be made from outside of a process.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jaxmorph.runtime.executor import Executor
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.training import start, train

FOLDER = "JAXMORPH_CHAOS_FOLDER"


def request(folder: Path, rank: int) -> Path:
    """The file that has a rank's next op never end; the rank removes it."""
    return folder / f"queue_{rank}_hangs"


class _NeverReady:
    def block_until_ready(self) -> None:
        threading.Event().wait()


def _run_rank(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    asked, run = request(Path(os.environ[FOLDER]), arguments.rank), Executor._run

    def run_or_hang(executor: Executor, op: Any, state: Any) -> Any:
        done = run(executor, op, state)
        try:
            asked.unlink()
        except FileNotFoundError:
            return done
        return _NeverReady()

    with patch.object(Executor, "_run", run_or_hang):
        train._run_rank(arguments, link, rest)


def _launch_itself(module: str, *arguments: Any, **options: Any) -> Any:
    return _launch("benchmarks.chaos.hanging_rank", *arguments, **options)


if __name__ == "__main__":
    _launch = start.run_ranks
    if any(word.startswith("--rank=") for word in sys.argv):
        run_rank(_run_rank)
    else:
        from jaxmorph.cli.app import main  # which ranks do not need

        with patch.object(start, "run_ranks", _launch_itself):
            main()
