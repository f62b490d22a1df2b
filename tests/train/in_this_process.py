"""Runs the `jaxmorph` command in this process, which saves the import of JAX."""

import io
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from jaxmorph.cli.app import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """The output and the exit code of a command."""

    returncode: int
    stdout: str
    stderr: str


def jaxmorph(*words: object, cwd: Path = ROOT) -> Done:
    """Run a command to its end; its ranks are processes as usual."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())
