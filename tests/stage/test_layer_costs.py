import math
from dataclasses import astuple

import jax
import numpy as np
import pytest

from jaxmorph.models.gpt2 import build
from jaxmorph.stage.layer_costs import measure_layer_costs
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes

SIZES = {"preset": "tiny", "sequence_length": 8, "width": 16, "num_heads": 2, "num_layers": 3}


def measured(vocab_size, **settings):
    tokens, targets = np.random.default_rng(1).integers(vocab_size, size=(2, 2, 8), dtype=np.int32)
    submesh = stage_submesh(make_mesh(1), 0)
    return measure_layer_costs(
        build(vocab_size=vocab_size, **SIZES),
        submesh,
        MicrobatchShapes(tokens, targets),
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "num_ops"),
    [
        pytest.param({}, 3, id="split"),
        pytest.param({"kinds": ("F", "BW")}, 2, id="full", marks=pytest.mark.one_jax),
        pytest.param(
            {"stash": "recompute"}, 3, id="recompute", marks=[pytest.mark.long, pytest.mark.one_jax]
        ),
    ],
)
def test_parts_take_time_and_leave_no_arrays_behind(settings, num_ops):
    before = {id(array) for array in jax.live_arrays()}
    costs = astuple(measured(32, **settings))
    assert {id(array) for array in jax.live_arrays()} <= before
    assert [len(of_ops_ms) for of_ops_ms in costs] == [num_ops] * 3
    assert all(math.isfinite(cost_ms) and cost_ms > 0 for each in costs for cost_ms in each)


@pytest.mark.long
@pytest.mark.in_ci
@pytest.mark.one_jax
def test_a_head_with_a_large_vocabulary_costs_more():
    costs = measured(20_000)
    assert sum(costs.head_ms) > 2 * sum(costs.layer_ms)
