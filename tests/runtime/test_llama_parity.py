"""A second model gives one device's loss, gradients and parameters."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.one_jax]

SINGLE = 1e-5  # relative, float32


@pytest.fixture(scope="module")
def results(run_as_ranks):
    """What both ranks reported."""
    return run_as_ranks("llama_rank", 2)


def only(results, test, **case):
    chosen = [r for r in results if r["test"] == test and case.items() <= r.items()]
    assert {result["rank"] for result in chosen} == {0, 1}
    return chosen


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "adaptive"])
def test_loss_norm_and_gradients_match_one_device(results, schedule, tied):
    for result in only(results, "gradients", schedule=schedule, tied=tied):
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.parametrize("tied", [True, False])
def test_clipped_adamw_steps_match_one_device(results, tied):
    for result in only(results, "parameters", tied=tied):
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]
