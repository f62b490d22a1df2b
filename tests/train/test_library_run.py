"""`jaxmorph.Trainer` adapts, saves and resumes, with the bits of an undisturbed run."""

import json
import re
import shutil
import subprocess
import sys

import library_run
import pytest
from in_this_process import ROOT, Run, jaxmorph

STAGES, LIMIT_S = 3, 150
EXAMPLE = ROOT / "docs" / "examples" / "resumed_loop.py"

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def launch(stages, *words, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmorph", "launch", "--stages", str(stages), *map(str, words)],
        cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a plain run, of one that adapted and stopped, and of its resumption."""
    folder = tmp_path_factory.mktemp("library")
    launch(STAGES, library_run.__file__, folder, "plain", "begin")
    launch(STAGES, library_run.__file__, folder, "resume")
    return folder


def found(folder, what):
    return [json.loads((folder / f"{what}_rank_{rank}.json").read_text()) for rank in range(STAGES)]


def bits(metrics):
    return [(each["step"], each["loss"], each["grad_norm"]) for each in metrics]


def test_an_adapting_run_has_the_bits_of_a_static_one(folder):
    plain, begun = found(folder, "plain"), found(folder, "begin")
    for one, other in zip(plain, begun, strict=True):
        assert bits(other["metrics"]) == bits(one["metrics"])[: library_run.ENDED_AFTER]
        assert other["evaluated"] == one["evaluated"]


def test_the_slow_link_is_delegated(folder):
    run = Run(folder / "run")
    assert run.events("plan_changed")[0]["step"] > library_run.SLOW_FROM
    routes = [each["routes"]["1-2"] for each in run.steps]
    assert (routes[0], routes[-1]) == ("direct", "delegated")


def test_a_resumed_run_has_the_same_bits(folder):
    plain, resumed = found(folder, "plain"), found(folder, "resume")
    saved = library_run.ENDED_AFTER // library_run.SAVED_EVERY * library_run.SAVED_EVERY
    for one, other in zip(plain, resumed, strict=True):
        assert other["first"] == saved
        assert bits(other["metrics"]) == bits(one["metrics"])[saved:]


def test_run_files_have_every_step_once(folder):
    run = Run(folder / "run")
    assert [each["step"] for each in run.steps] == [*range(library_run.STEPS)]
    for kind in ("plan_adopted", "checkpoint_saved", "resumed", "straggler_detected"):
        assert run.events(kind)


def test_the_model_of_a_script_is_not_exported(folder):
    done = jaxmorph("export", folder / "run")
    assert done.returncode == 2
    assert "got a script's run, whose model only the script knows" in done.stderr


def test_the_documented_script_resumes(tmp_path):
    shown = launch(2, EXAMPLE, cwd=tmp_path)
    assert re.findall(r"^step (\d+): loss", shown, re.MULTILINE) == ["9", "19", "29", "39"]
    assert launch(2, EXAMPLE, cwd=tmp_path) == ""
    shutil.rmtree(tmp_path / "runs" / "resumed_loop" / "checkpoints" / "step_40")
    again = launch(2, EXAMPLE, cwd=tmp_path)
    assert [line.partition(" in ")[0] for line in again.splitlines()] == [
        shown.splitlines()[-1].partition(" in ")[0]
    ]
