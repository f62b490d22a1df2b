"""Replicas of the pipeline give one device's gradients and parameters, on all routes the same bits.

One launch per number of stages, replicas and devices runs all schedules.
"""

from functools import cache
from itertools import product

import pytest

SINGLE = 1e-5  # relative, as for one replica
SCHEDULES = {"gpipe", "1f1b", "zb-h2", "adaptive", "zb-v"}
LONG = [pytest.mark.long, pytest.mark.one_jax]
# Each test waits for all that the ranks of its launch compile: minutes on a busy machine.
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1200)]
# Stages, replicas and devices of a stage, and models; and marks.
LAUNCHES = [
    ((1, 2, 1, "tied"), []),
    ((1, 2, 1, "untied", "random"), LONG),
    ((2, 2, 1, "tied"), [*LONG, pytest.mark.in_ci]),
    ((2, 2, 1, "untied", "random"), LONG),
    ((1, 2, 2, "tied"), [*LONG, pytest.mark.in_ci]),
    ((1, 2, 2, "untied"), LONG),
    ((2, 2, 2, "tied", "untied"), LONG),
]


@pytest.fixture(scope="module")
def launch(run_as_ranks):
    """The reports of ranks; each launch is made once."""

    @cache
    def launched(stages, replicas, devices, *models):
        return run_as_ranks(
            "replicas_rank", stages * replicas, [f"{replicas}", f"{devices}", *models]
        )

    return launched


@pytest.fixture(
    params=[
        pytest.param(each, id="-".join(map(str, each)), marks=marks) for each, marks in LAUNCHES
    ]
)
def launched(request, launch):
    """A launch's models, and all reports."""
    return request.param[3:], launch(*request.param)


def of_test(results, *tests):
    return [each for each in results if each["test"] in tests]


def test_loss_norm_and_gradients_match_one_device(launched):
    models, results = launched
    found = of_test(results, "gradients", "random")
    cases = {
        ("random" if each["test"] == "random" else each["tied"], each["schedule"]) for each in found
    }
    expected = {"tied": True, "untied": False, "random": "random"}
    wanted = product((expected[model] for model in models), SCHEDULES)
    assert cases == {case for case in wanted if case != ("random", "zb-v")}
    for each in found:
        errors = each["loss_error"], each["norm_error"], each["worst_leaf"][0]
        assert max(errors) <= SINGLE, each


def test_clipped_adamw_steps_match_one_device(launched):
    models, results = launched
    found = of_test(results, "parameters")
    assert {each["placement"] for each in found} == {"wrap", "v"} if "tied" in models else True
    for each in found:
        assert each["worst_leaf"][0] <= SINGLE, each


def test_all_routes_of_sums_and_links_give_all_replicas_the_same_bits(launched):
    _, results = launched
    found = of_test(results, "bits", "trained bits")
    assert {each["test"] for each in found} == {"bits", "trained bits"}
    for each in found:
        assert each.get("same", True), each
        assert each["in_replicas"] == 1, each
