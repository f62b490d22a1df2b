"""Initial parameters from files, and parameters to files, by the model's own hooks."""

from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp

from jaxmorph.errors import UserError
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import init_stage_params


class ReadsWeights(PipelineModel, Protocol):
    """A model whose parameters can start from files."""

    def read_weights(self, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
        """Returns a stage's parameters, float32, structured as `init_stage_params` returns them.

        Only the stage's own should be loaded. Without layers, and neither first nor last, the call
        asks whether the files are there and are this model's.

        Raises:
          ValueError: they are not; what was got and what was expected.
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
    """Returns a stage's parameters from files, in place of `init_stage_params`.

    Args:
      path: where its weights are, as the model understands it.
      is_last: whether the stage has the head.

    Returns:
      What `init_stage_params` returns, with the files' values, on the default device.

    Raises:
      UserError: the model reads no weights, or not these; in one line.
    """
    params = _read(model, path, layers, is_first, is_last)
    _check_structure(model, params, layers, is_first, is_last)
    return jax.tree.map(jnp.array, params)  # copies: training overwrites them in place


def check_weights(model: PipelineModel, path: str) -> None:
    """Looks at the files without loading them: a mistake shows before processes are started.

    Raises:
      UserError: the model reads no weights, or not these; in one line.
    """
    _read(model, path, range(0), is_first=False, is_last=False)


def write_model(model: PipelineModel, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
    """Writes the weights of a whole model.

    Args:
      folder: where to; made if it does not exist.
      stages: each stage's layers and parameters, those of chunks one by one, in any order.

    Raises:
      UserError: the model writes no weights, or cannot write there; in one line.
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
    """A model's own reader may be wrong; what it returned must fit the stage's programs."""
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
