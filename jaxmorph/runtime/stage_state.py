"""A rank's parameters and optimizer state, as one part for each of its virtual stages, and back.

An Optax state holds some trees that are structured as the parameters are, such as Adam's moments,
beside numbers that belong to no parameter, such as its count. Of the first each part has its own
chunk's, of the others each has all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.errors import UserError

Tree = Any
PARAMS = "params"
_OPTIMIZER = "optimizer"


def stage_parts(params: tuple[Tree, ...], optimizer_state: Tree) -> tuple[Tree, ...]:
    """One tree of nested dictionaries for each chunk.

    Args:
        params: Each chunk's.
        optimizer_state: Optax's, of all of them.
    """
    of_all_chunks = _is_like(params)
    return tuple(
        {PARAMS: own, _OPTIMIZER: _nested(_of_chunk(optimizer_state, chunk, of_all_chunks))}
        for chunk, own in enumerate(params)
    )


def from_parts(
    parts: Sequence[Tree], params: tuple[Tree, ...], optimizer_state: Tree
) -> tuple[tuple[Tree, ...], Tree]:
    """Parameters and optimizer state from what `stage_parts` made.

    Args:
        parts: One for each chunk; numpy arrays.
        params: Parameters of the structure and the shapes that are expected.
        optimizer_state: Likewise.

    Returns:
        Both, in memory of their own, as training donates them.

    Raises:
        UserError: The parts are of another model or optimizer.
    """
    of_all_chunks = _is_like(params)
    new_params = tuple(
        _filled(own, part[PARAMS], PARAMS) for own, part in zip(params, parts, strict=True)
    )
    states = [
        _filled(_of_chunk(optimizer_state, chunk, of_all_chunks), part[_OPTIMIZER], _OPTIMIZER)
        for chunk, part in enumerate(parts)
    ]

    def joined(node: Tree, *of_chunks: Tree) -> Tree:
        return of_chunks if of_all_chunks(node) else of_chunks[0]

    return new_params, jax.tree.map(joined, optimizer_state, *states, is_leaf=of_all_chunks)


def _is_like(params: tuple[Tree, ...]) -> Callable[[Tree], bool]:
    structure = jax.tree.structure(params)
    return lambda node: jax.tree.structure(node) == structure


def _of_chunk(state: Tree, chunk: int, of_all_chunks: Callable[[Tree], bool]) -> Tree:
    """The state with one chunk's trees in the place of those of all chunks."""
    return jax.tree.map(
        lambda node: node[chunk] if of_all_chunks(node) else node, state, is_leaf=of_all_chunks
    )


def _names(path: tuple[Any, ...]) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _nested(tree: Tree) -> Tree:
    """The leaves of any tree in dictionaries of dictionaries, by the names on their paths."""
    nested: Tree = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        *outer, name = _names(path)
        inner = nested
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = leaf
    return nested


def _filled(expected: Tree, nested: Tree, what: str) -> Tree:
    """A tree with the values that `_nested` put into dictionaries."""

    def value_at(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = _names(path)
        found = nested
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        got = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        wanted = f"{leaf.dtype} {list(leaf.shape)}"
        if got != wanted:
            raise UserError(
                f"the checkpoint's {what}/{'/'.join(names)}: got {got}, expected {wanted}: is the "
                "model's code what it was?"
            )
        return jnp.array(found)

    return jax.tree_util.tree_map_with_path(value_at, expected)
