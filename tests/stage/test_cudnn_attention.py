"""Stages with cuDNN's attention: how their backward is split, and what they lower to for a GPU.

Nothing runs on a GPU: JAX's check of cuDNN's version is patched, and programs are only lowered.
"""

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmorph.models import attention, gpt2, llama
from jaxmorph.stage.activations import Boundary
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.stage_functions import StashPolicy, split_stage, total_bytes

BATCH, LENGTH, HEADS, WIDTH, LAYERS = 2, 64, 4, 64, 2
FORWARD, BACKWARD = "Softmax(", "SoftmaxBackward("
CALLS = {False: "__cudnn$fmha", True: "__cudnn$fmhaScaleBias"}  # by whether documents are packed
SEGMENTS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
SIZES: dict[str, Any] = {
    "preset": "tiny",
    "sequence_length": LENGTH,
    "vocab_size": 32,
    "width": WIDTH,
    "num_heads": HEADS,
    "num_layers": LAYERS,
    "compute_dtype": "bfloat16",
}


@pytest.fixture
def cudnn(monkeypatch):
    """Makes JAX believe that cuDNN is installed, the only check that it does before lowering."""
    # Follow the function's modules, because the check's module differs between JAX's versions.
    library = sys.modules[jax.nn.dot_product_attention.__module__]
    own = sys.modules[library.cudnn_dot_product_attention.__module__]
    monkeypatch.setattr(own, "check_cudnn_version", lambda: 91_200)
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: None)


def build(module, by):
    groups = {"num_key_value_heads": 2} if module is llama else {}
    return module.build(**SIZES, **groups, attention=by)


def split(model, stash: StashPolicy = "full", extras=None):
    """The functions of a middle stage, and the shapes of its arguments."""
    layer = jax.eval_shape(model.init_layer, jax.random.key(0))
    stack = lambda leaf: jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype)  # noqa: E731
    params = {"layers": jax.tree.map(stack, layer)}
    shapes = replace(MicrobatchShapes.of_text(BATCH, LENGTH), extras=extras or {})
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)
    return split_stage(model, params, shapes, Boundary(x, x), stash), params, x


def shapes_of(functions, params, x, extras=()):
    pool = (*jax.tree.leaves(params), *jax.eval_shape(functions.prepare, params))
    weights = tuple(pool[source] for source in functions.weight_sources(params))
    _, stash = jax.eval_shape(functions.forward, weights, x, extras)
    _, new = jax.eval_shape(functions.backward_input, weights, stash, x)
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    return weights, stash, (*(stash[i] for i in functions.passed_on), *new), sums


def lowered_for_cuda(function, *arguments):
    """The program as a stage lowers it, for a GPU."""
    whole = PartitionSpec()
    submesh = stage_submesh(make_mesh(1), 0)
    sharded = jax.shard_map(
        function, mesh=submesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(submesh, whole)
        ),
        arguments,
    )
    return jax.jit(sharded).trace(*placed).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("module", "packed"), [(gpt2, False), (llama, False), (gpt2, True)])
@pytest.mark.parametrize(
    ("stash", "forwards_in_b"), [("full", 0), ("recompute", 1)], ids=["full", "recompute"]
)
def test_cudnn_runs_its_forward_in_f_and_backward_in_b(module, packed, stash, forwards_in_b, cudnn):
    extras = {"segments": SEGMENTS} if packed else {}
    functions, params, x = split(build(module, "cudnn"), stash, extras)
    own = functions.with_extras(extras)
    weights, kept, weight_stash, sums = shapes_of(functions, params, x, own)
    programs = {
        "F": (functions.forward, weights, x, own),
        "B": (functions.backward_input, weights, kept, x),
        "W": (functions.backward_weight, weights, (weight_stash,), sums),
        "BW": (functions.backward, weights, kept, x, sums),
    }
    text = {name: lowered_for_cuda(*program) for name, program in programs.items()}
    by = CALLS[packed]
    calls = {name: (t.count(by + FORWARD), t.count(by + BACKWARD)) for name, t in text.items()}
    assert calls == {"F": (1, 0), "B": (forwards_in_b, 1), "W": (0, 0), "BW": (forwards_in_b, 1)}


def test_cudnn_keeps_no_attention_matrix(cudnn):
    kept = {by: total_bytes(shapes_of(*split(build(gpt2, by)))[1]) for by in ("cudnn", "xla")}
    squares = LAYERS * BATCH * HEADS * LENGTH * LENGTH * 2  # probabilities, in bfloat16
    sums = LAYERS * BATCH * HEADS * LENGTH * 4  # the logarithm of each row's sum, in float32
    assert kept["xla"] - kept["cudnn"] == squares - sums
    extras = {"segments": SEGMENTS}
    functions, params, x = split(build(gpt2, "cudnn"), extras=extras)
    _, packed, *_ = shapes_of(functions, params, x, functions.with_extras(extras))
    assert total_bytes(packed) - kept["cudnn"] == total_bytes([SEGMENTS])  # and no mask


def test_a_stage_without_cudnn_does_not_call_it():
    functions, params, x = split(build(gpt2, "auto"))
    weights, *_ = shapes_of(functions, params, x)
    assert "__cudnn" not in lowered_for_cuda(functions.forward, weights, x, ())
