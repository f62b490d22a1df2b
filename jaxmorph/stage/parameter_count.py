"""How many parameters a model and its stages have, found without making them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxmorph.stage.model import PipelineModel
from jaxmorph.stage.parameters import leaf_at


@dataclass(frozen=True)
class _Counts:
    embed: int
    layer: int
    head: int
    tied: int


def parameter_count(model: PipelineModel) -> int:
    """The number of a model's parameters, a tied one counted once.

    Args:
        model: Any model; nothing is computed but shapes.

    Returns:
        Embedding, all layers and head together.
    """
    counts = _count(model)
    return counts.embed + model.num_layers * counts.layer + counts.head - counts.tied


def stage_parameter_counts(model: PipelineModel, layers: Sequence[range]) -> list[int]:
    """The number of parameters that each stage holds.

    Args:
        model: Any model; nothing is computed but shapes.

    Returns:
        One number per stage. A tied parameter counts on the first and on the last stage, which
        both hold it.
    """
    counts = _count(model)
    held = [len(part) * counts.layer for part in layers]
    held[0] += counts.embed
    held[-1] += counts.head
    return held


def _count(model: PipelineModel) -> _Counts:
    key = jax.eval_shape(jax.random.key, 0)
    embed = jax.eval_shape(model.init_embed, key)
    tied = sum(_size(leaf_at(embed, path)) for path, _ in model.tied)
    layer = jax.eval_shape(model.init_layer, key)
    return _Counts(_size(embed), _size(layer), _size(jax.eval_shape(model.init_head, key)), tied)


def _size(tree: object) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
