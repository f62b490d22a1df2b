"""Parameters and optimizer state, in parts and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmorph.errors import UserError
from jaxmorph.runtime.optimizer import OptimizerSettings, StageOptimizer
from jaxmorph.runtime.stage_state import from_parts, stage_parts

SETTINGS = OptimizerSettings(learning_rate=1e-2, warmup_steps=2, total_steps=10)


def two_chunks():
    first = {
        "embed": {"token": jnp.arange(6.0).reshape(3, 2)},
        "layers": {"w": jnp.ones((2, 2, 2))},
    }
    return (first, {"layers": {"w": jnp.full((1, 2, 2), 3.0)}})


def gradients(params, step):
    return jax.tree.map(lambda leaf: jnp.sin(leaf + step), params)


def train(optimizer, params, state, steps):
    for step in steps:
        params, state, _ = optimizer.update(params, state, gradients(params, step), 1.0)
    return params, state


def as_numpy(tree):
    return jax.tree.map(np.array, tree)


def same_bits(one, other):
    pairs = zip(jax.tree.leaves(as_numpy(one)), jax.tree.leaves(as_numpy(other)), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize("how", [SETTINGS, optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
def test_training_goes_on_to_the_bit(how):
    optimizer = StageOptimizer(how, two_chunks())
    params, state = train(optimizer, two_chunks(), optimizer.initial_state, range(3))
    parts = as_numpy(stage_parts(params, state))
    expected = train(optimizer, params, state, range(3, 6))
    fresh = StageOptimizer(how, two_chunks())
    restored = from_parts(parts, two_chunks(), fresh.initial_state)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    assert same_bits(train(fresh, *restored, range(3, 6)), expected)


def test_each_part_has_its_own_chunks_moments_and_the_count():
    optimizer = StageOptimizer(SETTINGS, two_chunks())
    _, second = stage_parts(*train(optimizer, two_chunks(), optimizer.initial_state, range(3)))
    adam = second["optimizer"]["0"]
    assert adam.keys() == {"count", "mu", "nu"}
    assert int(adam["count"]) == 3
    assert adam["mu"]["layers"]["w"].shape == (1, 2, 2)
    assert second["params"].keys() == {"layers"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": {}}, "params/layers/w: got nothing, expected float32 [1, 2, 2]"),
        (
            {"layers": {"w": np.zeros((1, 3, 2), np.float32)}},
            "params/layers/w: got float32 [1, 3, 2], expected float32 [1, 2, 2]",
        ),
    ],
)
def test_another_models_part_is_refused_by_name(change, says):
    optimizer = StageOptimizer(SETTINGS, two_chunks())
    first, second = as_numpy(stage_parts(two_chunks(), optimizer.initial_state))
    with pytest.raises(UserError) as error:
        from_parts([first, second | {"params": change}], two_chunks(), optimizer.initial_state)
    assert says in str(error.value)
