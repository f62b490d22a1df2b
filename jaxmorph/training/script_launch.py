"""Starts a script of the user's on this machine, once for each stage: `jaxmorph launch`.

It imports no JAX, so that a process can note what it was told before it does.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.runtime.launcher import RankFailedError, run_ranks
from jaxmorph.runtime.rank_process import RankArguments

_told: list[RankArguments] = []


def launch_script(
    script: Path, arguments: Sequence[str], num_stages: int, logs: Path | None = None
) -> None:
    """Run a script in one process for each stage until all are done.

    Rank 0 prints to this process's standard output. Everything else goes to logs.

    Args:
        arguments: What the script finds in `sys.argv` after its name.
        logs: Where `rank_N.log` are written; None: a folder of their own, kept where the script
            fails or is stopped.

    Raises:
        UserError: If there is no such script, or the script makes a mistake in using jaxmorph.
        RankFailedError: If a process raised or died; all others have been ended.
    """
    if not script.is_file():
        raise UserError(f"{script}: no such file, expected a Python script")
    told = [json.dumps([str(script), *arguments])]  # one word: none may pass for the launcher's own
    with _log_folder(logs) as folder:
        run_ranks(
            "jaxmorph.training.script_rank",
            told,
            num_stages,
            folder,
            lambda message: None,
            shows_rank_0=True,
        )


@contextmanager
def _log_folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        yield wanted
        return
    folder, is_kept = Path(tempfile.mkdtemp(prefix="jaxmorph-")), False
    try:
        yield folder
    except UserError:
        raise
    except RankFailedError:
        is_kept = True  # the error says where its rank's log is
        raise
    except BaseException:
        is_kept = True  # whoever stops a script that hangs wants to know where
        print(f"logs: {folder}", file=sys.stderr, flush=True)  # noqa: T201
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def note_launch(arguments: RankArguments) -> None:
    """Keep what the launcher said."""
    _told[:] = [arguments]


def launch_told() -> RankArguments | None:
    """What the launcher said; None where no launcher of jaxmorph's has started this process."""
    return _told[0] if _told else None
