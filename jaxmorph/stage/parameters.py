"""A stage's parameters: their structure, and their initial values."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxmorph.stage.compiling import compiled
from jaxmorph.stage.model import Params, PipelineModel

LeafPath = tuple[str | int, ...]
"""Where a leaf is found in a tree of dictionaries, or in a tuple of one tree per chunk."""


def init_stage_params(
    model: PipelineModel, key: jax.Array, layers: range, is_first: bool, is_last: bool
) -> Params:
    """Returns a stage's initial parameters, the same ones however the model is cut.

    Args:
      key: one key for the whole model; each layer folds in its own index.
      is_last: whether the stage has the head.

    Returns:
      {"embed": (first stage), "layers": leaves stacked over the stage's layers, "head": (last
      stage)}. A tied parameter has the same value in both places.
    """
    build = partial(_init, model, is_first=is_first, is_last=is_last)
    return jax.jit(build)(key, jnp.array(layers))


def compile_init(
    model: PipelineModel, key: jax.Array, num_layers: int, is_first: bool, is_last: bool
) -> Compiled:
    """Returns `init_stage_params` for all stages of a kind: compiled, of the key and the layers.

    Args:
      key: any key of the type of the one that it will be called with.
      num_layers: how many layers the stage has; it is called with their numbers, int32.
      is_last: whether the stage has the head.
    """
    build = partial(_init, model, is_first=is_first, is_last=is_last)
    return compiled(jax.jit(build).lower(key, jax.ShapeDtypeStruct((num_layers,), jnp.int32)))


def _init(
    model: PipelineModel, key: jax.Array, layers: jax.Array, is_first: bool, is_last: bool
) -> Params:
    embed_key, layers_key, head_key = (jax.random.fold_in(key, part) for part in range(3))
    params = {}
    if is_first:
        params["embed"] = model.init_embed(embed_key)
    # One layer after the other, so that no value depends on how many there are.
    layer_keys = jax.vmap(partial(jax.random.fold_in, layers_key))(layers)
    params["layers"] = jax.lax.map(model.init_layer, layer_keys)
    if is_last:
        params["head"] = _tie(model, model.init_head(head_key), embed_key)
    return params


def _tie(model: PipelineModel, head: Params, embed_key: jax.Array) -> Params:
    embed = model.init_embed(embed_key) if model.tied else {}
    for embed_path, head_path in model.tied:
        head = with_leaf(head, head_path, leaf_at(embed, embed_path))
    return head


def leaf_at(tree: Any, path: LeafPath) -> Any:
    """Returns the leaf of a tree of dictionaries, or of a tuple of them, at a path of keys."""
    for name in path:
        tree = tree[name]
    return tree


def with_leaf(tree: Any, path: LeafPath, leaf: Any) -> Any:
    """Returns the same tree of dictionaries, or tuple of them, with one leaf replaced."""
    name, *rest = path
    inner = with_leaf(tree[name], tuple(rest), leaf) if rest else leaf
    if isinstance(tree, tuple):
        return tuple(inner if at == name else part for at, part in enumerate(tree))
    return {**tree, name: inner}
