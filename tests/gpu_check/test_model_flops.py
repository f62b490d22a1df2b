"""FLOPs by formula against the matrix products that are really in the programs."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

from jaxmorph.gpu_check.model_flops import model_flops, peak_tflops
from jaxmorph.gpu_check.settings import Sizes, build_gpt2
from jaxmorph.stage.backward import split_backward
from jaxmorph.stage.equations import walk

SIZES = Sizes(width=24, num_heads=3, num_layers=1, sequence_length=10, microbatch_size=2)


def product_flops(part):
    """Two for each pair of elements that is multiplied and added in a part's matrix products."""
    return sum(
        2 * size_of(eqn.outvars[0]) * contracted_size(eqn)
        for eqn in walk(part.equations)
        if eqn.primitive.name == "dot_general"
    )


def size_of(variable):
    return prod(variable.aval.shape)


def contracted_size(eqn):
    (axes, _), _ = eqn.params["dimension_numbers"]
    return prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def test_the_formula_counts_the_matrix_products_of_each_program():
    model = build_gpt2(SIZES, "bfloat16")
    params = jax.eval_shape(model.init_layer, jax.random.key(0))
    shape = (SIZES.microbatch_size, SIZES.sequence_length, SIZES.width)
    layer = split_backward(model.layer, params, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    flops = model_flops(SIZES)
    assert flops["F"] == product_flops(layer.forward)
    assert flops["B"] == product_flops(layer.backward_input)
    assert flops["W"] == product_flops(layer.backward_weight)
    assert flops["BW"] == product_flops(layer.backward)
    assert flops["plain"] == flops["F"] + flops["BW"]


def test_cudnns_attention_counts_pairs_of_a_token_and_what_it_sees():
    whole, seen = model_flops(SIZES), model_flops(SIZES, "cudnn")
    length = SIZES.sequence_length
    hidden = sum(length - position for position in range(1, length + 1))
    left_out = SIZES.microbatch_size * hidden * 2 * 2 * SIZES.width * SIZES.num_layers
    assert {name: whole[name] - seen[name] for name in whole} == {
        "F": left_out, "B": 2 * left_out, "W": 0, "BW": 2 * left_out, "plain": 3 * left_out
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_known_by_the_devices_name(device_kind, peak):
    assert peak_tflops(device_kind) == peak
