"""The steps of `library_steps.py` without a pipeline: one device, the whole batch at once."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from library_steps import CLIP_NORM, OPTIMIZER, SEED, batches, build_model, named_leaves


@dataclass(frozen=True)
class PlainLoop:
    """Every batch's loss at first, each step's loss and norm, and the parameters in the end."""

    initial_losses: list[float]
    losses: list[float]
    norms: list[float]
    params: dict[str, Any]


def run_plain_loop():
    model = build_model()
    mean_loss = partial(_mean_loss, model)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), OPTIMIZER)

    @jax.jit
    def step(params, state, tokens, targets):
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(gradients)

    params = jax.jit(partial(_initial_params, model))()
    state, results = jax.jit(optimizer.init)(params), []
    initial = [float(step(params, state, *batch)[2]) for batch in batches()]
    for tokens, targets in batches():
        params, state, loss, norm = step(params, state, tokens, targets)
        results.append((float(loss), float(norm)))
    losses, norms = (list(column) for column in zip(*results, strict=True))
    return PlainLoop(initial, losses, norms, named_leaves(_with_copy(params)))


def _mean_loss(model, params, tokens, targets):
    params = _with_copy(params)  # the tied table is one parameter
    x = model.embed(params["embed"], tokens)
    x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
    return model.head(params["head"], x, targets) / (targets >= 0).sum()


def _with_copy(params):
    return {**params, "head": {**params["head"], "output": {"table": params["embed"]["table"]}}}


def _initial_params(model):
    """Made as stages make theirs, but without their code, and without the tied copy."""
    embed, layers, head = (jax.random.fold_in(jax.random.key(SEED), part) for part in range(3))
    each = [model.init_layer(jax.random.fold_in(layers, at)) for at in range(model.num_layers)]
    return {
        "embed": model.init_embed(embed),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *each),
        "head": {"gain": model.init_head(head)["gain"]},
    }
