"""Runs whose stages have two devices or chunks: they learn, fail over and resume as others do."""

import numpy as np
import pytest
from in_this_process import Run, jaxmorph, train

from jaxmorph.config import load_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.in_ci]

CONFIG = """
run: {steps: 6, seed: 5}
model: {preset: tiny, width: 16, num_layers: 4, num_heads: 2, tied: true, dropout: 0.1}
data: {sequence_length: 8, held_out_fraction: 0.05}
parallelism: {stages: 1}
batch: {microbatches: 4, microbatch_size: 2}
schedule: {name: zb-h2}
checkpoint: {every_steps: 3}
evaluation: {every_steps: 3}
trace: {every_steps: 0}
timeouts: {direct_s: 4}
restart_policy: {max_restarts: 0}
"""
SPLIT = ("parallelism.stages=2", "parallelism.tensor=2")
CARD_FAILS = (
    "failover.enabled=true",
    "emulation.links=[{between: [0, 1], cut: true, route: direct, from_step: 2}]",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on one device, and one on two stages of two whose direct path fails in step 2."""
    folder = tmp_path_factory.mktemp("several devices")
    alone = train(folder / "alone", CONFIG)
    split = train(folder / "split", CONFIG, *SPLIT, *CARD_FAILS, "model.sequence_parallel=true")
    return alone, split


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_losses_are_those_of_one_device(runs):
    alone, split = runs
    close(split.results(), alone.results())
    of_alone, of_split = (
        [step["held_out_loss"] for step in each.steps if "held_out_loss" in step] for each in runs
    )
    assert len(of_alone) == 2
    close(of_split, of_alone)


def test_a_failed_path_goes_on_delegated(runs):
    routes = [step["routes"]["0-1"] for step in runs[1].steps]
    assert (routes[0], routes[-1]) == ("direct", "delegated")


def test_it_resumes_with_other_numbers_of_devices(runs):
    alone, split = runs
    for directory, overrides in (
        (alone.out, ()),
        (split.out, ("parallelism={stages: 2, chunks: 2}", "schedule.name=zb-v", "emulation={}")),
    ):
        done = jaxmorph("train", "--resume", directory, "run.steps=8", *overrides)
        assert done.returncode == 0, done.stderr
    ours, theirs = (Run(each.out).results()[6:] for each in (split, alone))
    assert len(ours) == 2
    close(ours, theirs)


def test_a_placement_is_chosen_once(runs, tmp_path):
    """In the order of zb-v, which is shorter, and still after it resumes as it was started."""
    left_open = ("schedule={name: adaptive, placement: auto}", "parallelism={stages: 2}")
    paced = "emulation.accelerator={forward_ms: 2, backward_input_ms: 2, backward_weight_ms: 2}"
    run = train(tmp_path / "run", CONFIG, *left_open, paced)
    assert load_config(run.out / "config.yaml").schedule.name == "zb-v"
    done = jaxmorph("train", "--resume", run.out, "run.steps=8", *left_open)
    assert done.returncode == 0, done.stderr
    assert load_config(run.out / "config.yaml").schedule.name == "zb-v"
    close(Run(run.out).results()[:6], runs[0].results()[:6])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallelism.tensor=3"],
            "got 3, but model.vocab_size: got 256, expected a multiple of 3",
        ),
        (["parallelism.tensor=4"], "got 4, but model.num_heads: got 2, expected a multiple of 4"),
        (
            ["parallelism.tensor=2", "model.sequence_parallel=true", "data.sequence_length=9"],
            "got an axis of 9, such as the sequence, expected a multiple of 2",
        ),
    ],
)
def test_sizes_that_cannot_be_split_are_one_line(tmp_path, overrides, message):
    (tmp_path / "run.yaml").write_text(CONFIG)
    for words in (["train", tmp_path / "run.yaml", "--dry-run"], ["train", tmp_path / "run.yaml"]):
        done = jaxmorph(*words, f"run.dir={tmp_path / 'out'}", *overrides)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
