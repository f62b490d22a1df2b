"""How many parameters a model has, found without making them."""

import math

import jax

from jaxmorph.stage.model import PipelineModel


def parameter_count(model: PipelineModel) -> int:
    """The number of parameters, a tied one counted once.

    Args:
        model: Any model; nothing is computed but shapes.

    Returns:
        Embedding, all layers and head together.
    """
    key = jax.eval_shape(jax.random.key, 0)
    embed = jax.eval_shape(model.init_embed, key)
    layer = jax.eval_shape(model.init_layer, key)
    head = jax.eval_shape(model.init_head, key)
    for _, path in model.tied:
        head = _without(head, path)
    return _size(embed) + model.num_layers * _size(layer) + _size(head)


def _size(tree: object) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _without(tree: dict, path: tuple[str, ...]) -> dict:
    name, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != name}
    return {**tree, name: _without(tree[name], tuple(rest))}
