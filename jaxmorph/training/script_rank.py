"""One process of a user's script: `python -m jaxmorph.training.script_rank`."""

import json
import os
import runpy
import sys
from pathlib import Path

from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.training.script_launch import set_launch_arguments


def _run_script(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """Run the script as `python SCRIPT ...` would."""
    del link  # a script sends the launcher no messages
    (packed,) = rest
    script, *words = json.loads(packed)
    set_launch_arguments(arguments)
    _leave_standard_output_to_python()
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise


def _leave_standard_output_to_python() -> None:
    """Send the output of native libraries to the log, such as Gloo's when it connects."""
    shown = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(shown, "w", buffering=1, encoding=sys.stdout.encoding)


if __name__ == "__main__":
    run_rank(_run_script)
