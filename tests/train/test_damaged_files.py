"""No damaged file keeps a run from its last whole checkpoint, and none changes results in silence.

`python -m benchmarks.flipped_bits` flips single bits in all kinds of files.
"""

import os
import shutil
import signal
import time

import pytest
from in_this_process import jaxmorph, read_lines
from stopped_run import flip_a_byte, require_same_bits

from benchmarks.chaos.endings import CONFIG
from benchmarks.chaos.watched_run import WatchedRun
from jaxmorph.checkpoints.folder import CheckpointFolder

PATIENCE_S = 60.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]  # `make test` has each file's damage


def replace(path, before, after):
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


@pytest.fixture(scope="module")
def resumed(four_stages, tmp_path_factory):
    """The undisturbed run, and the directory of one that resumed with a bit of each file wrong."""
    whole, run = four_stages[1], tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints/step_20")
    flip_a_byte(run / "checkpoints/step_14/virtual_stage_2")
    replace(run / "metrics.jsonl", b'"step": 2, "loss": 5', b'"step": 2, "loss": 4')
    replace(run / "events.jsonl", b"plan_adopted", b"plan_\xe1dopted")
    replace(run / "profile.json", b"costs", b"cosps")
    replace(run / "recovery.json", b"{", b"[")
    replace(run / "config.yaml", b"batch:", b"bat\x03h:")
    flip_a_byte(run / "compilation_cache/rank_1")
    done = jaxmorph("train", "--resume", run)
    assert done.returncode == 0, done.stderr
    return whole, run


def test_damaged_files_change_no_result(resumed):
    require_same_bits(*resumed, last=20, lost=[2])


def test_damage_is_reported_once(resumed):
    _, run = resumed
    events = {event["kind"]: event for event in read_lines(run / "events.jsonl")}
    assert events["checkpoint_damaged"]["detail"].startswith("passed over, and now ")
    assert events["resumed"]["detail"].startswith(f"from {run}/checkpoints/step_7, the last that")
    damage = events["files_damaged"]
    assert damage["step"] == 7
    first, rest = damage["detail"].split("; that of the checkpoint is used; ")
    assert first == f"{run}/config.yaml: not YAML: character #x0003 is not allowed in YAML"
    assert rest == (
        "metrics.jsonl: 1 damaged line left out; metrics.jsonl lacks 1 of 7 steps, the first is 2; "
        "events.jsonl: 1 damaged line left out; profile.json is damaged, and removed; "
        "recovery.json is damaged, and removed"
    )
    log = (run / "logs/from_step_7/rank_1.log").read_text()
    assert "not those that were written; it is compiled again" in log
    assert not list(run.rglob("*.starts"))


def test_steps_are_recorded_while_the_launcher_stands_still(tmp_path):
    """It is stopped, then killed, and the ranks go on and save meanwhile."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    with WatchedRun(tmp_path / "of", config, ["checkpoint={every_steps: 4, keep: 2}"]) as run:
        run.wait_for_step(3, PATIENCE_S)
        os.kill(run.process.pid, signal.SIGSTOP)
        folder = CheckpointFolder(run.out / "checkpoints")
        last, until_s = run.last_step(), time.monotonic() + PATIENCE_S
        while max(folder.steps(), default=0) < last + 10:
            assert time.monotonic() < until_s, run.evidence()
            time.sleep(0.02)
        run.process.kill()
        run.finish(PATIENCE_S)
    steps = {record.step for record in run.steps()}
    assert steps >= set(range(max(folder.steps())))
