"""A second model through two processes gives one device's loss, gradients and parameters too."""

import os
from pathlib import Path

import pytest

from jaxmorph.runtime.launcher import run_ranks

pytestmark = pytest.mark.multiprocess

SINGLE = 1e-5  # relative, float32
HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """Not here: these stages are compiled as in users' runs."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both ranks told."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        path = f"{HERE}:{HERE.parent.parent}:{os.environ.get('PYTHONPATH', '')}"
        patch.setenv("PYTHONPATH", path)
        run_ranks("llama_rank", [], 2, tmp_path_factory.mktemp("logs"), found.append)
    assert {result["rank"] for result in found} == {0, 1}
    return found


def only(results, test, **case):
    chosen = [r for r in results if r["test"] == test and case.items() <= r.items()]
    assert {result["rank"] for result in chosen} == {0, 1}
    return chosen


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "adaptive"])
def test_loss_norm_and_every_gradient_are_one_devices(results, schedule, tied):
    for result in only(results, "gradients", schedule=schedule, tied=tied):
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_after_three_clipped_adamw_steps_are_one_devices(results, tied):
    for result in only(results, "parameters", tied=tied):
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]
