"""Runs the `jaxmorph` command in this process, which saves the import of JAX."""

import io
import json
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.recut import read_part
from jaxmorph.checkpoints.tree_files import TreeFiles
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


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def states(directory, step):
    """Parameters and optimizer state of each stage, saved after a step, of all replicas' parts."""
    folder, files = CheckpointFolder(directory / "checkpoints"), TreeFiles()
    manifest, checkpoint = folder.manifest(step), folder.finished(step)
    layers, shares = manifest.layers, manifest.config.num_optimizer_shares
    return [read_part(files, checkpoint, layers, own, shares) for own in layers]


def require_same_arrays(trees, others):
    """All arrays of some trees are those of others."""
    assert jax.tree.structure(trees) == jax.tree.structure(others)
    for leaf, other in zip(*map(jax.tree.leaves, (trees, others)), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    out: Path

    @property
    def steps(self):
        return read_lines(self.out / "metrics.jsonl")

    def events(self, *kinds):
        return [each for each in read_lines(self.out / "events.jsonl") if each["kind"] in kinds]

    def results(self):
        return [(line["loss"], line["grad_norm"]) for line in self.steps]


@dataclass(frozen=True)
class Finished(Run):
    """A run that has come to its end, and its output."""

    shown: str


def train(folder: Path, config: str, *overrides: object) -> Finished:
    """A run of a configuration in its own folder, from its start to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    (path := folder / "run.yaml").write_text(config)
    done = jaxmorph("train", path, f"run.dir={folder / 'out'}", *overrides)
    assert done.returncode == 0, done.stderr
    return Finished(folder / "out", done.stdout)


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
