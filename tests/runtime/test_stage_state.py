"""Parameters and optimizer state: split into parts and restored."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmorph.errors import UserError
from jaxmorph.progress import progress
from jaxmorph.runtime import stage_state
from jaxmorph.runtime.optimizer import OptimizerSettings, StageOptimizer
from jaxmorph.runtime.stage_state import from_parts, receive_state, send_state, stage_parts

SETTINGS = OptimizerSettings(learning_rate=1e-2, warmup_steps=2, total_steps=10)


def two_chunks():
    first = {
        "embed": {"token": jnp.arange(6.0).reshape(3, 2), "mlp/~/linear_0": jnp.ones(3)},
        "layers": {"w": jnp.ones((2, 2, 2))},
    }
    return (first, {"layers": {"w": jnp.full((1, 2, 2), 3.0)}})


def begun(how):
    """An optimizer, with its first state."""
    optimizer = StageOptimizer(how, two_chunks())
    return optimizer, optimizer.initial_state(two_chunks())


def train(optimizer, params, state, steps):
    for step in steps:
        gradients = jax.tree.map(lambda leaf, step=step: jnp.sin(leaf + step), params)
        params, state, _ = optimizer.update(params, state, gradients, 1.0)
    return params, state


def as_numpy(tree):
    return jax.tree.map(np.array, tree)


def bits(tree):
    return [leaf.tobytes() for leaf in jax.tree.leaves(as_numpy(tree))]


@pytest.mark.parametrize("how", [SETTINGS, optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
def test_training_goes_on_to_the_bit(how):
    optimizer, state = begun(how)
    params, state = train(optimizer, two_chunks(), state, range(3))
    parts = as_numpy(stage_parts(params, state))
    expected = train(optimizer, params, state, range(3, 6))
    fresh, empty = begun(how)
    restored = from_parts(parts, two_chunks(), empty)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    assert bits(train(fresh, *restored, range(3, 6))) == bits(expected)


def test_each_part_has_its_moments_and_the_count():
    optimizer, state = begun(SETTINGS)
    _, second = stage_parts(*train(optimizer, two_chunks(), state, range(3)))
    adam = second["optimizer"]["0"]
    assert adam.keys() == {"count", "mu", "nu"}
    assert int(adam["count"]) == 3
    assert adam["mu"]["layers"]["w"].shape == (1, 2, 2)
    assert second["params"].keys() == {"layers"}


def refusal(parts, how=SETTINGS):
    with pytest.raises(UserError) as error:
        from_parts(parts, two_chunks(), begun(how)[1])
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "params/layers/w: got nothing, expected float32 [1, 2, 2]"),
        (
            {"w": np.zeros((1, 3, 2), np.float32)},
            "params/layers/w: got float32 [1, 3, 2], expected float32 [1, 2, 2]",
        ),
        (
            {"w": np.zeros((1, 2, 2), np.float32), "b": np.zeros(2, np.int8)},
            "params/layers/b: got int8 [2], expected nothing",
        ),
        ({"w": {"v": 1}}, "params/layers/w: got nothing, expected float32 [1, 2, 2]"),
        ({"w": 1.0}, "params/layers/w: got float, expected float32 [1, 2, 2]"),
    ],
)
def test_another_models_part_is_refused_by_name(change, message):
    first, second = as_numpy(stage_parts(two_chunks(), begun(SETTINGS)[1]))
    assert message in refusal([first, second | {"params": {"layers": change}}])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (two_chunks(), "the state: got a part of embed, layers, expected optimizer, params"),
        (two_chunks()[:1], "the state: got 1 parts, expected a sequence of 2, one per chunk"),
        ([{}, {}], "the state: got a part of nothing, expected optimizer, params"),
        ([3, 4], "the state: got a part of int, expected optimizer, params"),
        ({"params": {}}, "the state: got dict, expected a sequence of 2, one per chunk"),
    ],
)
def test_a_malformed_state_is_one_line(parts, message):
    assert refusal(parts) == message


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (SETTINGS, optax.sgd(0.1), "optimizer/0/count: got int32 [], expected nothing"),
        (optax.sgd(0.1), SETTINGS, "optimizer/0/count: got nothing, expected int32 []"),
    ],
)
def test_another_optimizers_state_is_refused(was, now, message):
    assert message in refusal(as_numpy(stage_parts(two_chunks(), begun(was)[1])), now)


def test_a_state_without_a_leaf_needs_no_branch():
    _, none = begun(optax.sgd(0.1))
    parts = [{"params": own} for own in as_numpy(two_chunks())]
    assert bits(from_parts(parts, two_chunks(), none)) == bits((two_chunks(), none))


def test_each_piece_of_a_sent_state_is_progress(monkeypatch):
    monkeypatch.setattr(stage_state, "_PIECE_BYTES", 8)
    sent: list[bytes] = []
    connection: Any = SimpleNamespace(send=sent.append, receive=lambda: sent.pop(0))
    parts = ({"params": {"w": jnp.arange(10, dtype=jnp.float32)}},)
    stamps = [progress.stamps]
    send_state(connection, parts)
    stamps.append(progress.stamps)
    np.testing.assert_equal(receive_state(connection), parts)
    stamps.append(progress.stamps)
    assert [after - before for before, after in pairwise(stamps)] == [5, 5]


def test_a_state_is_copied_to_the_host_array_by_array(monkeypatch):
    done, copy = [], stage_state.copied_to_host

    def copied(array):
        done.append("copy")
        return copy(array)

    monkeypatch.setattr(stage_state, "copied_to_host", copied)
    connection: Any = SimpleNamespace(send=lambda message: done.append("send"))
    send_state(connection, ({"params": {"w": jnp.ones(3), "x": jnp.ones(4)}},))
    assert done == ["send", "copy", "send", "copy", "send"]
