"""A stage's parameters: structure, number, and initial values, drawn or read from files.

The model itself reads and writes the files (`read_weights`, `write_weights`).
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxmorph.errors import UserError
from jaxmorph.stage.compiling import compiled
from jaxmorph.stage.model import Params, PipelineModel

LeafPath = tuple[str | int, ...]
"""The keys that lead to a leaf of nested dictionaries, or of a tuple with one tree per chunk."""


def init_stage_params(
    model: PipelineModel, key: jax.Array, layers: range, is_first: bool, is_last: bool
) -> Params:
    """Draws a stage's initial parameters, the same ones however the model is cut.

    Args:
      key: one key for the whole model; each layer folds in its own index.

    Returns:
      {"embed": (first stage), "layers": leaves stacked over the stage's layers, "head": (last
      stage)}. Both copies of a tied parameter have the same value.
    """
    build = partial(_init, model, is_first=is_first, is_last=is_last)
    return jax.jit(build)(key, jnp.array(layers))


def compile_init(
    model: PipelineModel,
    key: jax.Array,
    num_layers: int,
    is_first: bool,
    is_last: bool,
    shardings: Any = None,
) -> Compiled:
    """Compiles `init_stage_params` for stages of one shape.

    The program takes a key of the same type as `key`, and the layers' indices, int32.

    Args:
      shardings: of "embed", "layers" and "head"; None: one device has all of them.
    """
    build = partial(_init, model, is_first=is_first, is_last=is_last)
    layers = jax.ShapeDtypeStruct((num_layers,), jnp.int32)
    if shardings is not None:
        has = {"embed": is_first, "layers": True, "head": is_last}
        shardings = {name: each for name, each in shardings.items() if has[name]}
    return compiled(jax.jit(build, out_shardings=shardings).lower(key, layers))


def _init(
    model: PipelineModel, key: jax.Array, layers: jax.Array, is_first: bool, is_last: bool
) -> Params:
    embed_key, layers_key, head_key = (jax.random.fold_in(key, part) for part in range(3))
    params = {}
    if is_first:
        params["embed"] = model.init_embed(embed_key)
    # Layer by layer: batched by `vmap`, keys and values could depend on the number of layers.
    layer_keys = jax.lax.map(partial(jax.random.fold_in, layers_key), layers)
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
    """Returns the leaf at a path."""
    for name in path:
        tree = tree[name]
    return tree


def with_leaf(tree: Any, path: LeafPath, leaf: Any) -> Any:
    """Returns the tree with one leaf replaced."""
    name, *rest = path
    inner = with_leaf(tree[name], tuple(rest), leaf) if rest else leaf
    if isinstance(tree, tuple):
        return tuple(inner if at == name else part for at, part in enumerate(tree))
    return {**tree, name: inner}


def parameter_count(model: PipelineModel) -> int:
    """Counts a model's parameters from their shapes, tied ones once."""
    embed, layer, head, tied = _count(model)
    return embed + model.num_layers * layer + head - tied


def stage_parameter_counts(model: PipelineModel, layers: Sequence[range]) -> list[int]:
    """Counts each stage's parameters; a tied one counts on both stages that hold it."""
    embed, layer, head, _ = _count(model)
    held = [len(part) * layer for part in layers]
    held[0] += embed
    held[-1] += head
    return held


def _count(model: PipelineModel) -> tuple[int, int, int, int]:
    """The parameters of the embedding, of a layer, of the head, and those that are tied."""
    key = jax.eval_shape(jax.random.key, 0)
    inits = model.init_embed, model.init_layer, model.init_head
    embed, layer, head = (jax.eval_shape(init, key) for init in inits)
    tied = sum(_size(leaf_at(embed, path)) for path, _ in model.tied)
    return _size(embed), _size(layer), _size(head), tied


def _size(tree: object) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


class ReadsWeights(PipelineModel, Protocol):
    """A model whose parameters can start from files."""

    def read_weights(self, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
        """Returns a stage's parameters, float32, structured as `init_stage_params` returns them.

        It should load nothing else. With no layers, and neither first nor last, it only checks that
        the files are there and fit the model.

        Raises:
          ValueError: the files don't; says what was got and what was expected.
        """
        ...


class WritesWeights(PipelineModel, Protocol):
    """A model whose parameters can be written to files that others read."""

    def write_weights(self, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
        """Writes the whole model: each stage's layers and parameters, in any order."""
        ...


def read_stage_params(
    model: PipelineModel, path: str, layers: range, is_first: bool, is_last: bool
) -> Params:
    """Reads a stage's parameters from files, as numpy arrays.

    Raises:
      UserError: the model reads no weights, or not these files.
    """
    params = _read(model, path, layers, is_first, is_last)
    _check_structure(model, params, layers, is_first, is_last)
    return params


def check_weights(model: PipelineModel, path: str) -> None:
    """Checks the files without loading them, before any process starts.

    Raises:
      UserError: the model reads no weights, or not these files.
    """
    _read(model, path, range(0), is_first=False, is_last=False)


def write_model(model: PipelineModel, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
    """Writes the weights of a whole model to a folder, which is made if needed.

    Args:
      stages: each virtual stage's layers and parameters, in any order.

    Raises:
      UserError: the model writes no weights, or cannot write there.
    """
    if not _writes(model):
        raise UserError(_lacks(model, "write_weights"))
    try:
        model.write_weights(folder, stages)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _read(model: PipelineModel, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
    if not _reads(model):
        raise UserError(f"model.weights: got {path!r}, but {_lacks(model, 'read_weights')}")
    try:
        return model.read_weights(path, layers, is_first, is_last)
    except (OSError, ValueError) as error:
        raise UserError(f"model.weights: {error}") from error


def _reads(model: PipelineModel) -> TypeGuard[ReadsWeights]:
    return hasattr(model, "read_weights")


def _writes(model: PipelineModel) -> TypeGuard[WritesWeights]:
    return hasattr(model, "write_weights")


def _lacks(model: PipelineModel, function: str) -> str:
    return f"the model {type(model).__name__} has no {function}, expected one that has"


def _check_structure(
    model: PipelineModel, params: Params, layers: range, is_first: bool, is_last: bool
) -> None:
    """Checks that what the model's own reader returned fits the stage's programs."""
    expected = jax.eval_shape(
        lambda key: init_stage_params(model, key, layers, is_first, is_last), jax.random.key(0)
    )
    got, wanted = _shapes(params), _shapes(expected)
    for name in sorted(got.keys() | wanted.keys()):
        if got.get(name) != wanted.get(name):
            raise UserError(
                f"model.weights: {name}: the model's read_weights returned "
                f"{got.get(name, 'nothing')}, expected {wanted.get(name, 'nothing')}"
            )


def _shapes(tree: Any) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): f"{jnp.dtype(leaf.dtype)} {list(leaf.shape)}"
        for path, leaf in leaves
    }
