import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.runtime.optimizer import (
    OptimizerSettings,
    StageOptimizer,
    clip_scale,
    learning_rate_schedule,
)

SETTINGS = OptimizerSettings(learning_rate=0.1, warmup_steps=4, total_steps=20, weight_decay=0.5)


def params():
    """Of two chunks, the second with a head."""
    layers = {"w": jnp.full((2, 3, 3), 2.0), "b": jnp.full((2, 3), 2.0)}
    head = {"copy": jnp.full((5, 3), 2.0), "scale": jnp.full((3,), 2.0)}
    return ({"layers": layers}, {"layers": jax.tree.map(jnp.copy, layers), "head": head})


def test_the_learning_rate_warms_up_from_the_first_step_and_ends_at_its_fraction():
    rate = learning_rate_schedule(SETTINGS)
    assert [np.asarray(rate(step)) for step in (0, 2, 4)] == pytest.approx([0.02, 0.06, 0.1])
    assert np.asarray(rate(20)) == pytest.approx(0.01)


def test_without_a_warm_up_the_first_step_has_the_full_rate():
    rate = learning_rate_schedule(OptimizerSettings(0.1, warmup_steps=0, total_steps=10))
    assert np.asarray(rate(0)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("norm", "clip_norm", "scale"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (4.0, None, 1.0)]
)
def test_gradients_are_scaled_down_to_the_clip_norm_and_never_up(norm, clip_norm, scale):
    assert clip_scale(norm, clip_norm) == scale


def test_the_norm_counts_a_tied_parameter_once():
    gradients = jax.tree.map(jnp.ones_like, params())
    everything = StageOptimizer(SETTINGS, params())
    without_copy = StageOptimizer(SETTINGS, params(), uncounted=((1, "head", "copy"),))
    assert float(everything.squared_norm(gradients)) == 2 * (18 + 6) + 15 + 3
    assert float(without_copy.squared_norm(gradients)) == 2 * (18 + 6) + 3


def test_only_matrices_decay_and_stacked_biases_are_not_matrices():
    optimizer = StageOptimizer(SETTINGS, params())
    zeros = jax.tree.map(jnp.zeros_like, params())
    updated, _, _ = optimizer.update(params(), optimizer.initial_state(params()), zeros, 1.0)
    moved = jax.tree.map(lambda leaf: bool(np.any(np.asarray(leaf) != 2.0)), updated)
    layers = {"w": True, "b": False}
    assert moved == ({"layers": layers}, {"layers": layers, "head": {"copy": True, "scale": False}})


def test_an_update_gives_back_zeroed_accumulators_and_takes_its_inputs():
    optimizer = StageOptimizer(SETTINGS, params())
    gradients = jax.tree.map(jnp.ones_like, params())
    _, _, zeroed = optimizer.update(params(), optimizer.initial_state(params()), gradients, 1.0)
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(zeroed))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(gradients))


def test_a_scale_that_is_not_finite_is_refused():
    optimizer = StageOptimizer(SETTINGS, params())
    with pytest.raises(ValueError, match="can't be scaled by nan"):
        optimizer.update(params(), optimizer.initial_state(params()), params(), float("nan"))
