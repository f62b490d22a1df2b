"""FLOPs of a model's products: by hand for one of each kind, and by a formula for GPT-2."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxmorph.models import gpt2, llama
from jaxmorph.stage.equations import trace_flat
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.model_flops import (
    DeviceWork,
    microbatch_flops,
    peak_tflops,
    product_flops,
)
from tests.stage.test_cudnn_attention import (
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    SEGMENTS,
    WIDTH,
    build,
    cudnn,  # noqa: F401
)

VOCABULARY, TOKENS = 32, BATCH * LENGTH
SHAPES = MicrobatchShapes.of_text(BATCH, LENGTH)
A, B = jnp.zeros((3, 4)), jnp.zeros((4, 5))
PRODUCT = 2 * 3 * 4 * 5


def flops(function, *arguments):
    return product_flops(trace_flat(function, *arguments).equations)


def scanned(a, b):
    return jax.lax.scan(lambda carry, _: (carry + (a @ b).sum(), None), 0.0, length=7)


def chosen(a, b):
    return jax.lax.cond(a[0, 0] > 0, lambda: (a @ b) @ b.T, lambda: a + 1)


def convolved(image, kernel):
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda a, b: a @ b + 1, (A, B), PRODUCT),
        (jax.jit(lambda a, b: a @ b), (A, B), PRODUCT),
        (jax.checkpoint(lambda a, b: jnp.sin(a @ b)), (A, B), PRODUCT),
        (scanned, (A, B), 7 * PRODUCT),
        (chosen, (A, B), 2 * PRODUCT),  # the longer branch
        (lambda a: jnp.einsum("bij,bjk->bik", a, a), (jnp.zeros((6, 3, 3)),), 6 * 2 * 27),
        (convolved, (jnp.zeros((2, 3, 8, 8)), jnp.zeros((5, 3, 3, 3))), 2 * (2 * 5 * 64) * 27),
        (
            lambda rows, groups: jax.lax.ragged_dot(rows, groups, jnp.array([2, 4])),
            (jnp.zeros((6, 3)), jnp.zeros((2, 3, 5))),
            6 * 2 * 3 * 5,
        ),
        (jnp.sort, (A,), 0),
    ],
)
def test_products_are_counted_as_often_as_they_run(function, arguments, expected):
    assert flops(function, *arguments) == expected


def expected_of_gpt2(positions):
    """By the formula in docs/reference/gpu-check.md, and the head's scores of each token.

    Args:
        positions: How many a token attends to, as counted.
    """
    layer = TOKENS * (2 * 12 * WIDTH**2 + 2 * 2 * positions * WIDTH)
    return 3 * (LAYERS * layer + TOKENS * 2 * WIDTH * VOCABULARY)


def test_gpt2_computes_what_its_formula_says():
    assert microbatch_flops(build(gpt2, "xla"), SHAPES) == expected_of_gpt2(LENGTH)


def test_cudnns_attention_counts_what_the_mask_shows(cudnn):  # noqa: F811
    assert microbatch_flops(build(gpt2, "cudnn"), SHAPES) == expected_of_gpt2((LENGTH + 1) / 2)
    by_cudnn, by_xla = (microbatch_flops(build(llama, by), SHAPES) for by in ("cudnn", "xla"))
    hidden = LENGTH - (LENGTH + 1) / 2
    assert by_xla - by_cudnn == 3 * LAYERS * TOKENS * 2 * 2 * hidden * WIDTH
    assert HEADS > 2  # llama's keys have fewer heads


def test_extras_are_known_by_their_shapes():
    packed = replace(SHAPES, extras={"segments": SEGMENTS})
    assert microbatch_flops(build(gpt2, "xla"), packed) == expected_of_gpt2(LENGTH)


def test_devices_share_a_steps_work():
    model = build(gpt2, "xla")
    work = DeviceWork.of(model, SHAPES, num_microbatches=8, devices=4)
    assert work == DeviceWork(2 * microbatch_flops(model, SHAPES) / 1e12, None)
    assert work.rates(0.5) == {"tflops_per_device": 2 * work.tflop, "mfu": None}
    assert DeviceWork(400.0, 989.0).rates(2.0)["mfu"] == pytest.approx(200 / 989)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("cpu", None)],
)
def test_a_peak_is_that_of_the_device(kind, tflops):
    assert peak_tflops(kind) == tflops
