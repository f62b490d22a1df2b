"""What a model prints, or calls back, happens once for each microbatch: in F."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmorph.stage.build import build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StashPolicy
from tests.stage.in_turn import largest_error

WIDTH, VOCAB, LAYERS = 8, 16, 3
TOKENS = np.arange(8, dtype=np.int32).reshape(2, 4)


def reporting_model(seen) -> Any:
    def report(name, value):
        jax.debug.callback(lambda _: seen.append(name), value)

    def embed(params, tokens):
        report("inputs alone", tokens.sum())
        return params["table"][tokens]

    def layer(params, x):
        report("layer", x.sum())
        report("parameters alone", params["weight"].astype(jnp.bfloat16).sum())

        def in_loop(x, _):
            report("loop", x.sum())
            return jnp.sin(x), None

        def in_branch(x):
            report("branch", x.sum())
            return 2 * x

        x, _ = lax.scan(in_loop, x @ params["weight"], None, length=2)
        return lax.cond(x.sum() > -jnp.inf, in_branch, lambda x: x, x)

    def head(params, x, targets):
        report("head", x.sum())
        scores = jax.nn.log_softmax(x @ params["output"])
        return -jnp.take_along_axis(scores, targets[..., None], -1).sum()

    return SimpleNamespace(
        num_layers=LAYERS,
        tied=(),
        init_embed=lambda key: {"table": jax.random.normal(key, (VOCAB, WIDTH))},
        init_layer=lambda key: {"weight": jax.random.normal(key, (WIDTH, WIDTH))},
        init_head=lambda key: {"output": jax.random.normal(key, (WIDTH, VOCAB))},
        embed=embed,
        layer=layer,
        head=head,
    )


@pytest.mark.parametrize("stash", get_args(StashPolicy))
def test_effects_happen_once_and_gradients_stay(stash):
    seen = []
    model = reporting_model(seen)
    stage = build_stage(
        model,
        stage_submesh(make_mesh(1), 0),
        num_layers=LAYERS,
        is_first=True,
        is_last=True,
        shapes=MicrobatchShapes.of_text(*TOKENS.shape),
        stash=stash,
        kinds=("F", "B", "W"),
    )
    params = init_stage_params(model, jax.random.key(0), range(LAYERS), True, True)
    weights = stage.prepare(params)
    assert taken(seen) == {}
    _, kept, *_ = stage.forward(weights, TOKENS, TOKENS)
    assert taken(seen) == {
        "inputs alone": 1,
        "layer": LAYERS,
        "parameters alone": LAYERS,
        "loop": 2 * LAYERS,
        "branch": LAYERS,
        "head": 1,
    }
    _, weight_stash, _ = stage.backward_input(weights, kept, np.float32(1))
    sums, _ = stage.backward_weight(weights, (weight_stash,), stage.zero_accumulators())
    assert taken(seen) == {}

    def loss(params):
        x = model.embed(params["embed"], TOKENS)
        for at in range(LAYERS):
            x = model.layer(jax.tree.map(lambda leaf: leaf[at], params["layers"]), x)  # noqa: B023
        return model.head(params["head"], x, TOKENS)

    assert largest_error(sums, jax.grad(loss)(params)) < 1e-5


def taken(seen):
    """How often each was seen since the last call."""
    jax.effects_barrier()
    counts = dict(Counter(seen))
    seen.clear()
    return counts
