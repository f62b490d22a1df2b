from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmorph.errors import UserError
from jaxmorph.runtime.optimizer import (
    OptimizerSettings,
    StageOptimizer,
    clip_scale,
    is_matrix,
    learning_rate_schedule,
    require_elementwise,
)

SETTINGS = OptimizerSettings(learning_rate=0.1, warmup_steps=4, total_steps=20, weight_decay=0.5)


def params():
    """Of two chunks, the second with a head."""
    layers = {"w": jnp.full((2, 3, 3), 2.0), "b": jnp.full((2, 3), 2.0)}
    head = {"copy": jnp.full((5, 3), 2.0), "scale": jnp.full((3,), 2.0)}
    return ({"layers": layers}, {"layers": jax.tree.map(jnp.copy, layers), "head": head})


def test_the_learning_rate_warms_up_and_decays():
    rate = learning_rate_schedule(SETTINGS)
    assert [np.asarray(rate(step)) for step in (0, 2, 4)] == pytest.approx([0.02, 0.06, 0.1])
    assert np.asarray(rate(20)) == pytest.approx(0.01)
    at_once = learning_rate_schedule(OptimizerSettings(0.1, warmup_steps=0, total_steps=10))
    assert np.asarray(at_once(0)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("norm", "clip_norm", "scale"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (4.0, None, 1.0)]
)
def test_gradients_are_never_scaled_up(norm, clip_norm, scale):
    assert clip_scale(norm, clip_norm) == scale


def test_the_norm_counts_a_tied_parameter_once():
    gradients = jax.tree.map(jnp.ones_like, params())
    everything = StageOptimizer(SETTINGS, params())
    without_copy = StageOptimizer(SETTINGS, params(), uncounted=((1, "head", "copy"),))
    assert float(everything.squared_norm(gradients)) == 2 * (18 + 6) + 15 + 3
    assert float(without_copy.squared_norm(gradients)) == 2 * (18 + 6) + 3


def test_only_matrices_decay():
    optimizer = StageOptimizer(SETTINGS, params())
    zeros = jax.tree.map(jnp.zeros_like, params())
    updated, _, _ = optimizer.update(params(), optimizer.initial_state(params()), zeros, 1.0)
    moved = jax.tree.map(lambda leaf: bool(np.any(np.asarray(leaf) != 2.0)), updated)
    layers = {"w": True, "b": False}
    assert moved == ({"layers": layers}, {"layers": layers, "head": {"copy": True, "scale": False}})


def test_an_update_zeroes_accumulators_and_donates_inputs():
    optimizer = StageOptimizer(SETTINGS, params())
    gradients = jax.tree.map(jnp.ones_like, params())
    _, _, zeroed = optimizer.update(params(), optimizer.initial_state(params()), gradients, 1.0)
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(zeroed))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(gradients))


def test_a_scale_that_is_not_finite_is_refused():
    optimizer = StageOptimizer(SETTINGS, params())
    with pytest.raises(ValueError, match="can't be scaled by nan"):
        optimizer.update(params(), optimizer.initial_state(params()), params(), float("nan"))


# Of one chunk; every leaf that could hide a norm or a product in its own shape is there.
PARAMS = (
    {
        "layers": {"w": jnp.ones((2, 3, 3)), "b": jnp.ones((2, 3))},
        "head": {"square": jnp.ones((4, 4)), "gain": jnp.ones(())},
    },
)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
        optax.adam(SCHEDULE),
        optax.adamw(SCHEDULE, weight_decay=0.1, mask=is_matrix),
        optax.lion(1e-4),
        optax.rmsprop(1e-3),
        optax.adagrad(1e-3),
        optax.radam(1e-3),
        optax.chain(optax.clip(1.0), optax.nadamw(1e-3), optax.ema(0.9)),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    ],
    ids=lambda optimizer: None,
)
def test_elementwise_optimizers_are_accepted(optimizer):
    require_elementwise(optimizer, PARAMS)


SQUARE = {"square": jnp.ones((4, 4))}


@pytest.mark.parametrize(
    ("optimizer", "params", "computes"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), PARAMS, "reduce_sum"),
        (optax.lamb(1e-3), PARAMS, "reduce_sum"),
        (optax.adafactor(1e-3), PARAMS, "reduce_"),
        (optax.apply_if_finite(optax.sgd(1e-3), 2), PARAMS, "reduce_"),
        (optax.contrib.muon(1e-3), PARAMS, "(reshape|dot_general|transpose|reduce_sum)"),
        (optax.stateless(lambda updates, _: jax.tree.map(jnp.cumsum, updates)), PARAMS, "cumsum"),
        # A product of squares keeps the shape.
        (optax.stateless(partial(jax.tree.map, jnp.matmul)), SQUARE, "dot_general"),
    ],
)
def test_other_optimizers_are_refused(optimizer, params, computes):
    message = rf"^optimizer: got one that computes {computes}.*clip_norm"
    with pytest.raises(UserError, match=message):
        require_elementwise(optimizer, params)
