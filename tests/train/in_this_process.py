"""Runs the `jaxmorph` command in this process, which saves the import of JAX."""

import io
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxmorph.cli.app import main
from jaxmorph.messages import StepDone
from jaxmorph.runtime import launcher
from jaxmorph.runtime.started_rank import StartedRank
from jaxmorph.training.record import RunRecord

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


def on_each_step(patch: pytest.MonkeyPatch, react: Callable[[int, list[StartedRank]], None]):
    """Have each step that a run here reports, and all ranks started until then, passed on."""
    ranks: list[StartedRank] = []
    start, take = launcher.start_rank, RunRecord.take

    def start_and_record(*arguments, **options):
        ranks.append(start(*arguments, **options))
        return ranks[-1]

    def take_and_react(record, message):
        take(record, message)
        if isinstance(message, StepDone):
            react(message.record.step, ranks)

    patch.setattr(launcher, "start_rank", start_and_record)
    patch.setattr(RunRecord, "take", take_and_react)
