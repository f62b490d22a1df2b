"""Shares of the parameters: divided, updated and put together, they are the whole, to the bit."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.placement import Replica
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.optimizer import OptimizerSettings, StageOptimizer, is_matrix
from jaxmorph.runtime.shares import WHOLE, Shares, joined, rows_of
from jaxmorph.runtime.stage_state import own_parts, stage_parts, stored_parts

SETTINGS = OptimizerSettings(learning_rate=0.1, warmup_steps=1, total_steps=9)
OPTIMIZERS = {
    "adamw": SETTINGS,
    "plain sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "masked": optax.masked(optax.adamw(0.1), is_matrix),
    "two kinds": optax.multi_transform({True: optax.lion(0.1), False: optax.adam(0.1)}, is_matrix),
}


def chunks():
    """Of two chunks; the layers' axis, another or none is a multiple of two."""
    layers = {"w": jnp.arange(36.0).reshape(2, 3, 6), "odd": jnp.ones((3, 3))}
    embed = {"token": jnp.arange(20.0).reshape(5, 4), "scale": jnp.ones(5)}
    return ({"embed": embed, "layers": layers}, {"layers": {"w": jnp.full((3, 3, 4), 2.0)}})


def shares_of(count):
    return [Shares.of(chunks(), Replica(index, count)) for index in range(count)]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_an_array_is_divided_along_its_first_even_axis():
    first, second = shares_of(2)[0].axes
    assert first == {
        "embed": {"token": 1, "scale": WHOLE},
        "layers": {"w": 0, "odd": WHOLE},
    }
    assert second == {"layers": {"w": 2}}


def test_no_axis_is_divided_that_devices_split():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    split = NamedSharding(mesh, PartitionSpec("tensor"))
    params = [jax.device_put(jnp.ones(shape), split) for shape in ((4, 6), (4,))]
    assert Shares.of(params, Replica(0, 2)).axes == [1, WHOLE]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_shares_together_are_the_whole(axis):
    whole = np.arange(4 * 4 * 8).reshape(4, 4, 8)
    rows = np.stack(np.split(whole, 4, axis))
    assert np.array_equal(joined(rows, axis), whole)
    assert np.array_equal(rows_of(whole, axis, 4), rows)


def gathered(trees, axes):
    """The whole arrays of all replicas' shares."""

    def whole(axis, *leaves):
        return leaves[0] if axis == WHOLE else joined(jnp.stack(leaves), axis)

    return jax.tree.map(whole, axes, *trees)


def trained(how, count):
    """Each replica's optimizer and state, and all parameters, after three updates."""
    params, shares = chunks(), shares_of(count)
    optimizers = [StageOptimizer(how, params, shares=each) for each in shares]
    states = [each.initial_state(params) for each in optimizers]
    for step in range(3):
        own = []
        for at, optimizer in enumerate(optimizers):
            gradients = jax.tree.map(lambda leaf, step=step: jnp.sin(leaf + step), params)
            new, states[at], zeros = optimizer.update(
                params, states[at], shares[at].take(gradients), 0.5
            )
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(zeros))
            own.append(new)
        params = gathered(own, shares[0].axes)
    return optimizers, states, params


def trained_alone(how):
    optimizer, params = StageOptimizer(how, chunks()), chunks()
    state = optimizer.initial_state(params)
    for step in range(3):
        gradients = jax.tree.map(lambda leaf, step=step: jnp.sin(leaf + step), params)
        params, state, _ = optimizer.update(params, state, gradients, 0.5)
    return params, state


@pytest.mark.parametrize("how", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("count", [2, 3])
def test_updates_of_shares_are_those_of_the_whole(how, count):
    optimizers, states, params = trained(how, count)
    expected, state = trained_alone(how)
    assert bits(params) == bits(expected)
    assert bits(gathered(states, optimizers[0].state_axes)) == bits(state)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(each)) for each in (states[0], state)]
    assert sizes[0] < sizes[1] or sizes[1] == 0


def test_squares_of_all_shares_add_up_to_those_of_the_whole():
    tied = ((0, "embed", "scale"),)
    of_whole = StageOptimizer(SETTINGS, chunks(), tied).squared_norm(chunks())
    of_shares = [
        StageOptimizer(SETTINGS, chunks(), tied, each).squared_norm(each.take(chunks()))
        for each in shares_of(2)
    ]
    np.testing.assert_allclose(sum(of_shares), of_whole, rtol=1e-6)
    assert min(of_shares) > 0


@pytest.mark.parametrize("how", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_replica_takes_its_share_of_a_whole_state(how):
    optimizers, states, params = trained(how, 2)
    whole = jax.device_get(stage_parts(*trained_alone(how)))
    for shares, optimizer, state in zip(shares_of(2), optimizers, states, strict=True):
        axes = stage_parts(shares.axes, optimizer.state_axes)
        own = own_parts(whole, axes, shares.own)
        assert bits(own) == bits(stage_parts(params, state))


def test_replicas_store_their_shares_and_the_first_the_rest():
    optimizers, states, params = trained(SETTINGS, 2)
    first, second = (
        stored_parts(
            stage_parts(params, states[index]),
            stage_parts(shares_of(2)[index].axes, optimizers[index].state_axes),
            index,
        )
        for index in range(2)
    )
    assert [*map(set, first)] == [
        {"params", "optimizer", "shares_along_0", "shares_along_1"},
        {"params", "optimizer", "shares_along_2"},
    ]
    assert [*map(set, second)] == [{"shares_along_0", "shares_along_1"}, {"shares_along_2"}]
    assert first[1]["shares_along_2"]["0"]["mu"]["layers"]["w"].shape == (3, 3, 2)


class Replicas:
    """All replicas' answers to a question, of which the test knows those of the others."""

    def __init__(self, *others):
        self.others, self.own = others, Replica(0, 2)

    def of_stage(self, kind, own):
        assert kind is bool
        return [own, *self.others]


class Program:
    """A collective that works, or fails."""

    def __init__(self, fails):
        self.fails = fails

    def run(self, arrays, step):
        assert step == 3
        if self.fails:
            raise jax.errors.JaxRuntimeError("no answer")
        return f"whole {arrays}"


def completed(others_have, fails):
    """The parameters of a stage after an exchange of shares, and what the sum is by then."""
    found: list[Any] = []
    stage: Any = SimpleNamespace(params="shares", shares=SimpleNamespace(), complete=found.append)
    delegated: Any = SimpleNamespace(gather=lambda shares, step: f"delegated {shares} {step}")
    program: Any = Program(fails)
    replicas: Any = Replicas(others_have)
    gradient_sum = GradientSum(replicas, program, delegated, gather=program)
    gradient_sum.complete(stage, 3)
    return found, gradient_sum


def test_shares_are_exchanged_directly_where_all_succeed():
    found, gradient_sum = completed(others_have=True, fails=False)
    assert found == ["whole shares"]
    assert gradient_sum.direct is not None


@pytest.mark.parametrize(("others_have", "fails"), [(True, True), (False, False)])
def test_shares_are_exchanged_by_hosts_where_one_replica_fails(others_have, fails):
    found, gradient_sum = completed(others_have, fails)
    assert found == ["delegated shares 3"]
    assert gradient_sum.direct is None
    (event,) = gradient_sum.take_events()
    assert ("no answer" in event.detail) == fails
    stage: Any = SimpleNamespace(params="shares", shares=SimpleNamespace(), complete=found.append)
    gradient_sum.complete(stage, 4)  # asks no one again
    assert found[1:] == ["delegated shares 4"]
