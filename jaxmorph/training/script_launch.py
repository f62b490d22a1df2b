"""`jaxmorph launch`: runs a user's script on this machine, one process for each stage.

It imports no JAX: a process must know its launch arguments before JAX starts.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.output import write_stderr
from jaxmorph.runtime.launcher import RankFailedError, run_ranks
from jaxmorph.runtime.rank_process import RankArguments

_launched_with: list[RankArguments] = []  # at most one


def launch_script(
    script: Path, arguments: Sequence[str], num_stages: int, logs: Path | None = None
) -> None:
    """Run a script in one process for each stage, until all have ended.

    Rank 0's standard output appears here; everything else goes to the logs.

    Args:
        arguments: The rest of the script's `sys.argv`.
        logs: The folder for `rank_N.log`; None: a temporary one, kept only if the script fails.

    Raises:
        UserError: There is no such script, or it uses jaxmorph wrongly.
        RankFailedError: A process raised or died; all others have been ended.
    """
    if not script.is_file():
        raise UserError(f"{script}: no such file, expected a Python script")
    # As one word, so that no argument of the script is taken for one of the launcher's.
    packed = [json.dumps([str(script), *arguments])]
    with _log_folder(logs) as folder:
        run_ranks(
            "jaxmorph.training.script_rank",
            packed,
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
        is_kept = True  # the error names the rank's log
        raise
    except BaseException:
        is_kept = True  # Ctrl-C on a script that hangs: the logs show where
        write_stderr(f"logs: {folder}")
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def set_launch_arguments(arguments: RankArguments) -> None:
    """Keep the launcher's arguments for the `Trainer` that the script will make."""
    _launched_with[:] = [arguments]


def launch_arguments() -> RankArguments | None:
    """The launcher's arguments; None in a process that `jaxmorph launch` has not started."""
    return _launched_with[0] if _launched_with else None
