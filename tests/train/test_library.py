"""A user's own loop: `jaxmorph.Trainer` in one process, and under `jaxmorph launch`."""

import json
import re
import subprocess
import sys

import library_steps
import numpy as np
import pytest
from in_this_process import ROOT
from plain_loop import run_plain_loop

SINGLE = 1e-5  # relative, for float32
LIMIT_S = 150


@pytest.fixture(scope="module")
def plain():
    return run_plain_loop()


@pytest.fixture(scope="module")
def one_stage():
    """The metrics and parameters of a single rank, without a launcher."""
    return [library_steps.piped()]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The script's output with two stages, and its folder."""
    folder = tmp_path_factory.mktemp("two")
    done = subprocess.run(
        [sys.executable, "-m", "jaxmorph", "launch", "--stages", "2", "--logs", folder,
         library_steps.__file__, folder],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.fixture(scope="module")
def two_stages(launched):
    _, folder = launched
    return [
        (
            json.loads((folder / f"rank_{rank}.json").read_text()),
            dict(np.load(folder / f"rank_{rank}.npz")),
        )
        for rank in range(2)
    ]


@pytest.fixture(params=["one_stage", pytest.param("two_stages", marks=pytest.mark.multiprocess)])
def ranks(request):
    return request.getfixturevalue(request.param)


@pytest.mark.multiprocess
def test_the_documented_loop_learns(launched):
    printed, _ = launched
    shown = re.findall(r"^step (\d+): loss ([\d.]+) in", printed, re.MULTILINE)
    assert [int(step) for step, _ in shown] == [9, 19, 29, 39, 49]
    assert len(printed.splitlines()) == 5
    assert float(shown[-1][1]) < float(shown[0][1]) - 0.5


def test_losses_and_norms_equal_a_plain_loops(ranks, plain):
    assert min(plain.norms) > library_steps.CLIP_NORM
    for found, _ in ranks:
        losses, norms = zip(
            *((step["loss"], step["grad_norm"]) for step in found["metrics"]), strict=True
        )
        assert losses == pytest.approx(plain.losses, rel=SINGLE)
        assert norms == pytest.approx(plain.norms, rel=SINGLE)


def test_parameters_equal_a_plain_loops(ranks, plain):
    for found, params in ranks:
        for name, leaf in params.items():
            expected = plain.params[name]
            if name.startswith("['layers']"):
                expected = expected[np.array(found["layers"])]
            assert np.abs(leaf - expected).max() <= SINGLE * np.abs(expected).max(), name
    assert {name for _, params in ranks for name in params} == set(plain.params)


def test_evaluate_uses_current_parameters(ranks, plain):
    for found, _ in ranks:
        assert found["evaluated"] == pytest.approx(plain.initial_losses, rel=SINGLE)


def test_restored_state_repeats_the_same_bits(ranks):
    exact = ("step", "loss", "grad_norm", "updated")
    for found, _ in ranks:
        for before, again in zip(found["metrics"][2:], found["again"], strict=True):
            assert [before[name] for name in exact] == [again[name] for name in exact]
        assert found["same_params"]


@pytest.mark.multiprocess
def test_every_rank_learns_of_a_failed_link(two_stages):
    for found, _ in two_stages:
        failed = {step["step"]: step["failed_links"] for step in found["metrics"]}
        assert failed == {0: [], 1: [], library_steps.FAILS_IN: ["0-1"], 3: []}
        assert [step["failed_links"] for step in found["again"]] == [[], []]


def test_a_wrong_batch_is_refused_by_every_rank(ranks):
    for found, _ in ranks:
        assert found["refused"].startswith("batch: got tokens of shape [7, 12], expected [8, 12]")


def test_stages_have_the_same_metrics_and_plan(ranks):
    found = [metrics for metrics, _ in ranks]
    assert [rank["stages"] for rank in found] == [len(ranks)] * len(ranks)
    assert [layer for rank in found for layer in rank["layers"]] == [0, 1, 2, 3, 4]
    assert all(rank["metrics"] == found[0]["metrics"] for rank in found)
    assert all(rank["schedule"] == "zb-h1" for rank in found)
    assert [step["step"] for step in found[0]["metrics"]] == [0, 1, 2, 3]
    assert all(step["updated"] and step["step_s"] > 0 for step in found[0]["metrics"])
    assert found[0]["timed_ops"] == [12] * len(ranks)  # F, B and W of four microbatches
    assert all(rank["timed_ops"] is None for rank in found[1:])
