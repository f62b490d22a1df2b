"""A stopped and resumed run equals an uninterrupted one, and its model can be exported.

That holds for whole backwards, 1f1b's, as well: see `test_restart`.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from in_this_process import Run, jaxmorph, read_lines, states
from stopped_run import (
    ask_to_end_with_step,
    flip_a_byte,
    require_close,
    require_same_bits,
    stop_after_seven,
)

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import seal_of
from jaxmorph.stage.parameters import read_stage_params
from jaxmorph.training.resume import hold
from jaxmorph.training.saved_model import load_saved_model

pytestmark = pytest.mark.multiprocess


def run(*words):
    done = jaxmorph(*words)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def both(four_stages, tmp_path_factory):
    """The directories of a run of 20 steps, and of one that stopped after 7 and resumed."""
    _, whole = four_stages
    stopped = tmp_path_factory.mktemp("runs") / "stopped"
    stop_after_seven(whole, stopped)
    run("train", "--resume", stopped)
    return whole, stopped


def test_a_stopped_run_resumes_to_the_same_bits(both):
    require_same_bits(*both, last=20)
    counts = {int(part["optimizer"]["0"]["count"]) for part in states(both[0], 7)}
    assert counts == {7}  # a checkpoint holds its step's state


def test_saves_and_resumption_are_reported(both):
    whole, stopped = both
    saved = Run(stopped).events("checkpoint_saved")
    assert [event["step"] for event in saved] == [6, 13, 19]
    (resumed,) = Run(stopped).events("resumed")
    assert resumed["step"] == 7
    assert resumed["detail"].endswith(
        "checkpoints/step_7, the last that is whole by its checksums; it was made under zb-h2, "
        "warm-up forwards 7 5 3 1"
    )
    for directory in both:
        names = sorted(path.name for path in (directory / "checkpoints").iterdir())
        assert names == ["step_14", "step_20", "step_7"]
    assert (whole / "logs" / "rank_3.log").exists()
    assert (stopped / "logs" / "from_step_7" / "rank_3.log").exists()


def test_saving_compiles_nothing(both):
    for directory in both:
        lines = read_lines(directory / "metrics.jsonl")
        assert len({line["compilations"] for line in lines[7:]}) == 1


PACED = "emulation.accelerator={forward_ms: 5, backward_input_ms: 5, backward_weight_ms: 5}"


@pytest.mark.long
def test_other_stages_resume_from_the_checkpoint(four_stages, tmp_path, monkeypatch):
    """Four stages' checkpoint resumes with two, which SIGTERM stops, and then with one."""
    whole, run_dir = four_stages[1], tmp_path / "run"
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_20")
    damaged = flip_a_byte(run_dir / "checkpoints/step_14/virtual_stage_2")
    with monkeypatch.context() as patch:
        ask_to_end_with_step(7, patch)
        asked = jaxmorph("train", "--resume", run_dir, "parallelism.stages=2", PACED)
    assert asked.returncode == 143, asked.stderr
    assert "of 20 steps, saved: jaxmorph train --resume" in asked.stderr
    folder = CheckpointFolder(run_dir / "checkpoints")
    first, last = folder.steps()
    assert (first, folder.manifest(last).layers) == (7, (range(2), range(2, 4)))
    assert 7 < last < 20
    alone = ("parallelism.stages=1", "schedule.name=1f1b", "emulation.accelerator=null")
    run("train", "--resume", run_dir, *alone)
    require_close(whole, run_dir)
    (found,) = Run(run_dir).events("checkpoint_damaged")
    assert f"step_14.damaged: {damaged}: got " in found["detail"]
    resumed = [event["detail"] for event in Run(run_dir).events("resumed")]
    assert "step_7, the last that is whole by its checksums; layers 1 1 1 1 are cut" in resumed[0]
    assert f"step_{last}, the last that is whole by its checksums; layers 2 2 are" in resumed[1]


def resumed_after_three(folder, *words):
    """The directories of a run of six steps, and of one that has the first three and resumed."""
    whole, again = folder / "whole", folder / "again"
    run("train", *words, f"run.dir={whole}", "run.steps=6", "checkpoint={every_steps: 3}")
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/step_6")
    return whole, again


@pytest.mark.long
@pytest.mark.parametrize("example", ["moe_decoder", "patch_encoder"])
def test_examples_resume_to_the_same_bits_and_on_another_cut(tmp_path, example):
    """With auxiliary losses, and with data of one's own, of two lengths."""
    whole, again = resumed_after_three(tmp_path, f"docs/examples/{example}.yaml")
    other = shutil.copytree(again, tmp_path / "other")
    run("train", "--resume", again)
    require_same_bits(whole, again, last=6, arrays=4)
    run("train", "--resume", other, "parallelism.layers=[1, 3]")
    require_close(whole, other)


@pytest.mark.long
def test_dropout_in_packed_documents_resumes_on_another_cut(tmp_path):
    (tmp_path / "text").write_bytes(b"\0".join(b"ab" * (n % 23) for n in range(400)))
    whole, again = resumed_after_three(
        tmp_path, "configs/demo.yaml",
        "model={width: 32, num_layers: 4, num_heads: 2, dropout: 0.2}",
        f"data={{path: {tmp_path / 'text'}, packing: segments, sequence_length: 16}}",
        "batch={microbatches: 2, microbatch_size: 2}", "parallelism={stages: 2}",
        "emulation.accelerator=null",
    )  # fmt: skip
    run("train", "--resume", again, "parallelism.layers=[1, 3]")
    require_close(whole, again)


def test_a_run_starts_from_an_exported_model(both, tmp_path):
    _, stopped = both
    done = run("export", stopped, "--to", tmp_path / "model")
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("gpt2 tiny after 20 steps: ")
    saved = load_saved_model(stopped)
    assert (saved.step, saved.config.run.seed) == (20, 5)
    assert [layers for layers, _ in saved.stages] == [range(n, n + 1) for n in range(4)]
    for number, (layers, params) in enumerate(saved.stages):
        read = read_stage_params(
            saved.model, str(tmp_path / "model"), layers, number == 0, number == 3
        )
        assert jax.tree.structure(read) == jax.tree.structure(params)
        for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
            assert np.asarray(one).tobytes() == other.tobytes()


def test_a_step_without_a_checkpoint_is_one_line(both):
    done = jaxmorph("export", both[0], "--step", "8")
    assert done.returncode == 2
    assert "--step: got 8, expected a checkpoint in " in done.stderr
    assert done.stderr.endswith("checkpoints: 7, 14, 20\n")


def test_resuming_a_finished_run_does_nothing(both):
    whole, _ = both
    before = [path.read_bytes() for path in (whole / "metrics.jsonl", whole / "events.jsonl")]
    done = run("train", "--resume", whole)
    assert done.stdout == (
        f"{whole} has done its 20 steps: nothing is left to do (run.steps=N continues to step N)\n"
    )
    after = [path.read_bytes() for path in (whole / "metrics.jsonl", whole / "events.jsonl")]
    assert after == before


def test_a_run_in_use_is_refused(both):
    stopped = both[1]
    names = ("config.yaml", "metrics.jsonl", "events.jsonl")
    before = [(stopped / name).read_bytes() for name in names]
    with hold([stopped]):
        done = jaxmorph("train", "--resume", stopped, "run.steps=30")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{stopped}: in use by another run" in done.stderr
    assert [(stopped / name).read_bytes() for name in names] == before


def test_other_data_are_refused(both):
    manifest = both[1] / "checkpoints" / "step_20" / "manifest.json"
    seal, original = manifest.with_suffix(".seal"), manifest.read_bytes()
    other = json.dumps(json.loads(original) | {"data": {"num_tokens": 9, "digest": "a"}}).encode()
    manifest.write_bytes(other)
    seal.write_bytes(seal_of(other))
    done = jaxmorph("train", "--resume", both[1], "run.steps=30")
    manifest.write_bytes(original)
    seal.write_bytes(seal_of(original))
    assert done.returncode == 2
    assert "tokens, expected the 9 that the checkpoint was trained on" in done.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train"], "train: got no configuration, expected a YAML file, or --resume RUN_DIR"),
        (["train", "--resume", "runs/none"], "--resume: got runs/none, expected a run's directory"),
        (["export", "runs/none"], "run: got runs/none, expected a run's directory, with a config"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(words, line):
    done = jaxmorph(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
