from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from jaxmorph.models.gpt2 import build
from jaxmorph.stage.backward import ValueGraph, split_backward
from jaxmorph.stage.equations import size_bytes, trace_flat
from tests.stage.in_turn import num_of

FLOAT = jnp.float32
EXPENSIVE = ("dot_general", "scan", "sin", "cos", "exp", "tanh", "logistic", "rsqrt", "reduce_max")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), FLOAT)


def sine_mlp(params, x):
    return jnp.sin(x @ params["up"]) @ params["down"] + params["bias"]


def swiglu(params, x):
    normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * params["scale"]
    return x + (jax.nn.silu(normal @ params["gate"]) * (normal @ params["up"])) @ params["down"]


def recurrent(params, x):
    step = lambda h, x: (jnp.tanh(h @ params["hidden"] + x), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0] @ params["out"]


def branching(params, x):
    product = x @ params["w"]
    return jax.lax.cond(product.sum() > 0, jnp.sin, jnp.cos, product)


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.exp(x)


doubled_gradient.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (2 * g * jnp.exp(x),))


def custom(params, x):
    return doubled_gradient(x @ params["w"])


def rematerialised(params, x):
    return jax.checkpoint(sine_mlp)(params, x)


UP, DOWN = normal(1, 8, 32), normal(2, 32, 8)
SINE = {"up": UP, "down": DOWN, "bias": normal(3, 8)}
GATED = {"scale": normal(4, 8), "gate": UP, "up": normal(5, 8, 32), "down": DOWN}
SQUARE, X = normal(6, 8, 8), normal(7, 3, 5, 8)
FUNCTIONS = {
    "sine": (sine_mlp, SINE),
    "swiglu": (swiglu, GATED),
    "recurrent": (recurrent, {"hidden": SQUARE * 0.1, "out": SQUARE}),
    "branching": (branching, {"w": SQUARE}),
    "custom": (custom, {"w": SQUARE * 0.1}),
    "rematerialised": (rematerialised, SINE),
}


@pytest.fixture(scope="module", params=FUNCTIONS)
def case(request):
    function, params = FUNCTIONS[request.param]
    return function, params, split_backward(function, params, X)


def test_parts_give_the_gradients_of_the_whole(case):
    function, params, split = case
    output, pullback = jax.vjp(function, params, X)
    gradient = normal(8, *output.shape)
    expected_params, expected_input = pullback(gradient)
    weights = weights_of(split, params)
    got, *stash = split.forward(*weights, X)
    got_input, *new = split.backward_input(*weights, *stash, gradient)
    passed_on = [stash[i] for i in split.passed_on]
    got_params = split.backward_weight(*weights, *passed_on, *new)
    both_input, *both_params = split.backward(*weights, *stash, gradient)
    close(got, output)
    for each in (got_input, both_input):
        close(each, expected_input)
    for each in (got_params, both_params):
        jax.tree.map(close, list(each), jax.tree.leaves(expected_params))


def test_stash_holds_nothing_that_depends_on_weights_alone(case):
    split = case[2]
    depends = set(split.forward.inputs[split.num_weights :])
    for eqn in split.forward.equations:
        if not depends.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
            depends.update(eqn.outvars)
    assert split.num_stash > 0
    assert depends.issuperset(split.forward.outputs[1:])


@pytest.mark.parametrize(
    ("name", "forward", "backward_input", "backward_weight"),
    [
        ("sine", {"dot_general": 2, "sin": 1}, {"dot_general": 2, "cos": 1}, {"dot_general": 2}),
        (
            "swiglu",
            {"dot_general": 3, "logistic": 1, "rsqrt": 1},
            {"dot_general": 3},
            {"dot_general": 3},
        ),
        ("custom", {"dot_general": 1, "exp": 1}, {"dot_general": 1, "exp": 1}, {"dot_general": 1}),
        (
            "rematerialised",
            {"dot_general": 2, "sin": 1},
            # The function's own checkpoint is obeyed: up @ x again for the cosine and the sine.
            {"dot_general": 3, "cos": 1},
            {"dot_general": 2, "sin": 1},
        ),
    ],
)
def test_no_part_repeats_expensive_work(name, forward, backward_input, backward_weight):
    split = split_backward(*FUNCTIONS[name], X)
    assert expensive(split.forward) == forward
    assert expensive(split.backward_input) == backward_input
    assert expensive(split.backward_weight) == backward_weight


def test_a_scan_is_not_split():
    split = split_backward(*FUNCTIONS["recurrent"], X)
    parts = (split.forward, split.backward_input, split.backward_weight)
    assert [num_of(part, "scan") for part in parts] == [1, 1, 0]


def test_b_and_w_together_do_the_work_of_bw(case):
    split = case[2]
    apart, whole = {}, expensive(split.backward)
    for part in (split.backward_input, split.backward_weight):
        for name, count in expensive(part).items():
            apart[name] = apart.get(name, 0) + count
    assert apart == whole


def test_normalisation_keeps_its_input_and_a_number_per_row():
    def normalised(scale, x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True)) * scale

    split = split_backward(normalised, normal(1, 8), X)
    row_bytes = X.size // 8 * 4
    assert stash_bytes(split) <= X.nbytes + 2 * row_bytes


def test_a_checkpointed_function_keeps_only_its_input():
    split = split_backward(rematerialised, SINE, X)
    assert stash_bytes(split) == X.nbytes


def test_converted_weights_are_prepared_but_views_are_not():
    def function(params, x):
        small = params["w"].astype(jnp.bfloat16)
        bias = jnp.broadcast_to(params["b"], x.shape).astype(jnp.bfloat16)
        return x @ small.T + (x + bias) @ params["w"].astype(jnp.bfloat16)

    params = {"b": normal(1, 8), "w": SQUARE}
    split = split_backward(function, params, X.astype(jnp.bfloat16))
    prepared = split.prepare(*jax.tree.leaves(params))
    assert [(a.shape, a.dtype) for a in prepared] == [((8, 8), jnp.bfloat16)]
    assert split.weight_sources == (2, 0) or split.weight_sources == (0, 2)


def test_an_unused_parameter_has_a_zero_gradient():
    split = split_backward(lambda params, x: x * params["a"], {"a": 2 * SQUARE, "b": UP}, X[0, :1])
    weights = weights_of(split, {"a": 2 * SQUARE, "b": UP})
    _, *stash = split.forward(*weights, X[0, :1])
    _, *new = split.backward_input(*weights, *stash, normal(1, 8, 8))
    passed_on = [stash[i] for i in split.passed_on]
    _, unused = split.backward_weight(*weights, *passed_on, *new)
    assert unused.shape == UP.shape
    assert not unused.any()


def test_what_b_adds_for_w_comes_in_one_order():
    """Else another process would have other programs, and find none of those that are kept."""

    def function(params, x):
        return [x @ weight for weight in params]

    split = split_backward(function, [SQUARE + i for i in range(16)], X)
    gradients = split.backward_input.inputs[split.num_weights + split.num_stash :]
    assert list(split.backward_input.outputs[split.num_input_gradients :]) == list(gradients)


def test_sources_of_large_values_are_found_once():
    def function(params, x):
        large = jnp.broadcast_to(params["b"], (64, 8))
        for _ in range(64):
            large = large + large
        return x @ large.T

    split = split_backward(function, {"b": normal(1, 8)}, X)
    assert not split.prepare.outputs
    assert split.weight_sources == (0,)


class TestGPT2Layer:
    B, T, W, H = 2, 16, 32, 4

    def split(self, dtype="float32", wrap=lambda layer: layer):
        model = build(
            preset="tiny",
            sequence_length=self.T,
            vocab_size=50,
            compute_dtype=dtype,
            width=self.W,
            num_heads=self.H,
        )
        params = jax.eval_shape(model.init_layer, jax.random.key(0))
        x = jax.ShapeDtypeStruct((self.B, self.T, self.W), dtype)
        return split_backward(wrap(model.layer), params, x)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_matrix_products_of_each_part(self, dtype):
        # F: qkv, scores, context, out, expand, contract. B: one for each, and a second for
        # scores and context, which have two inputs. W: one for each of the four weights.
        split = self.split(dtype)
        parts = (split.forward, split.backward_input, split.backward_weight, split.backward)
        assert [num_of(part, "dot_general") for part in parts] == [6, 8, 4, 12]

    def test_recompute_repeats_the_forward_in_b_alone(self):
        # The last product of the layer is not needed again.
        split = self.split(wrap=jax.checkpoint)
        parts = (split.forward, split.backward_input, split.backward_weight)
        assert [num_of(part, "dot_general") for part in parts] == [6, 8 + 5, 4]
        assert [num_of(part, "tanh") for part in parts] == [1, 1, 0]
        assert stash_bytes(split) == self.B * self.T * self.W * 4

    def test_recompute_prepares_no_more_weights(self):
        count = lambda split: len(split.prepare.outputs)  # noqa: E731
        assert count(self.split("bfloat16", jax.checkpoint)) == count(self.split("bfloat16")) == 4

    def test_stash_is_what_a_backward_by_hand_keeps(self):
        # Input, q, k, v, context, the middle of the residual stream, the MLP's hidden layer before
        # its activation and the activation's tanh; probabilities; two numbers per normalised row.
        wide, rows = self.B * self.T * self.W, self.B * self.T
        probabilities = self.B * self.H * self.T**2
        expected = 4 * (wide * (1 + 3 + 1 + 1 + 4 + 4) + probabilities + 4 * rows)
        assert stash_bytes(self.split()) == expected

    def test_weight_stash_is_operands_and_gradients_of_the_four_products(self):
        split = self.split()
        wide = self.B * self.T * self.W
        operands, gradients = wide * (1 + 1 + 1 + 4), wide * (3 + 1 + 4 + 1)
        norms = 4 * self.W
        weights = split.backward_weight.inputs[: split.num_weights]
        stash = set(split.backward_weight.inputs) - set(weights)
        assert sum(map(size_bytes, stash)) == 4 * (operands + gradients + norms)

    def test_bfloat16_halves_the_stash(self):
        assert stash_bytes(self.split("bfloat16")) < 0.55 * stash_bytes(self.split())


def weights_of(split, params):
    leaves = jax.tree.leaves(params)
    pool = (*leaves, *split.prepare(*leaves))
    return [pool[source] for source in split.weight_sources]


def stash_bytes(split):
    return sum(map(size_bytes, split.forward.outputs[1:]))


def expensive(part):
    return {name: count for name in EXPENSIVE if (count := num_of(part, name))}


def close(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    scale = np.abs(expected).max() + 1e-30
    np.testing.assert_allclose(got / scale, expected / scale, atol=1e-5)


def test_of_equal_prices_the_earlier_value_is_kept():
    assert chain({"a": 2, "b": 2}).cheapest_cut() == ["a"]


def test_the_cut_weighs_the_cost_of_making_values_late():
    graph = chain({"a": 2, "b": 4})
    graph.made_early("b", otherwise=3)
    assert graph.cheapest_cut() == ["b"]


def test_values_made_together_stay_in_one_half():
    graph = chain({"a": 10, "b": 1})
    graph.add("c", 100)
    graph.depends("c", "a")
    graph.together("b", "c")
    graph.used_late("c")
    assert graph.cheapest_cut() == ["a"]


def test_a_value_without_a_limit_is_refused():
    graph = ValueGraph()
    graph.add("a", float("inf"))
    graph.made_early("a")
    graph.used_late("a")
    with pytest.raises(ValueError, match="no price"):
        graph.cheapest_cut()


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_cut_agrees_with_brute_force(seed):
    random = np.random.default_rng(seed)
    prices = {i: int(random.integers(1, 20)) for i in range(8)}
    operands = {i: [j for j in range(i) if random.random() < 0.4] for i in prices}
    early = {i for i in prices if not operands[i] or random.random() < 0.2}
    late = {i for i in prices if random.random() < 0.3} | {7}
    graph = ValueGraph()
    for value, price in prices.items():
        graph.add(value, price)
        graph.depends(value, *operands[value])
        if value in early:
            graph.made_early(value)
    graph.used_late(*late)
    cut = graph.cheapest_cut()
    assert reaches(cut, operands, early, late)
    choices = (c for n in range(9) for c in combinations(prices, n))
    best = min(
        sum(prices[v] for v in choice)
        for choice in choices
        if reaches(choice, operands, early, late)
    )
    assert sum(prices[v] for v in cut) == best


def chain(prices):
    graph = ValueGraph()
    names = list(prices)
    for name, price in prices.items():
        graph.add(name, price)
    for operand, value in pairwise(names):
        graph.depends(value, operand)
    graph.made_early(names[0])
    graph.used_late(names[-1])
    return graph


def reaches(kept, operands, early, late):
    """Whether every value used late is kept, or can be made from what is kept."""

    def available(value):
        return value in kept or (value not in early and all(map(available, operands[value])))

    return all(map(available, late))


def test_temporary_bytes_are_those_of_results_until_their_last_use():
    trace = trace_flat(lambda x: jnp.sin(jnp.cos(jnp.exp(x))), jnp.zeros(8, jnp.float32))
    assert trace.part(trace.inputs, trace.outputs).temporary_bytes() == 2 * 32
