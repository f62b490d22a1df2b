"""A rank's parameters and optimizer state, as one part for each of its virtual stages, and back.

An Optax state holds some trees that are structured as the parameters are, such as Adam's moments,
beside numbers that belong to no parameter, such as its count. Of the first each part has its own
chunk's, of the others each has all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.errors import UserError

Tree = Any
PARAMS = "params"
_OPTIMIZER = "optimizer"


def stage_parts(params: tuple[Tree, ...], optimizer_state: Tree) -> tuple[Tree, ...]:
    """One tree of nested dictionaries for each chunk, with its part of Optax's state."""
    of_all_chunks = _is_like(params)
    return tuple(
        {PARAMS: own, _OPTIMIZER: _nested(_of_chunk(optimizer_state, chunk, of_all_chunks))}
        for chunk, own in enumerate(params)
    )


def from_parts(
    parts: Sequence[Tree], params: tuple[Tree, ...], optimizer_state: Tree
) -> tuple[tuple[Tree, ...], Tree]:
    """Parameters and optimizer state from what `stage_parts` made, in memory of their own.

    Args:
        parts: One for each chunk; numpy arrays.
        params: Parameters of the structure and the shapes that are expected.

    Raises:
        UserError: The parts are of another model, cut or optimizer, or no parts at all.
    """
    _require_parts(parts, len(params))
    of_all_chunks = _is_like(params)
    new_params = tuple(
        _filled(own, part[PARAMS], PARAMS) for own, part in zip(params, parts, strict=True)
    )
    states = [
        # What stores trees may leave out an empty branch, such as the state of plain SGD.
        _filled(_of_chunk(optimizer_state, chunk, of_all_chunks), part.get(_OPTIMIZER), _OPTIMIZER)
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


def _require_parts(parts: Sequence[Tree], num_chunks: int) -> None:
    """Refuse what isn't one tree for each chunk with the two branches that `stage_parts` makes."""
    if not isinstance(parts, Sequence) or len(parts) != num_chunks:
        got = f"{len(parts)} parts" if isinstance(parts, Sequence) else type(parts).__name__
        raise UserError(f"the state: got {got}, expected a sequence of {num_chunks}, one per chunk")
    for part in parts:
        keys = set(part) if isinstance(part, Mapping) else {type(part).__name__}
        if PARAMS not in keys or keys - {PARAMS, _OPTIMIZER}:
            got = ", ".join(sorted(map(str, keys))) or "nothing"
            raise UserError(f"the state: got a part of {got}, expected {_OPTIMIZER}, {PARAMS}")


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("",)


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


def _filled(expected: Tree, found: Tree, what: str) -> Tree:
    """A tree with the values of another one, which has leaves of the same names and forms."""
    values, due = _leaves(found), _leaves(expected)
    for names in [*due, *sorted(values.keys() - due.keys())]:
        got, wanted = _form(values.get(names)), _form(due.get(names))
        if got != wanted:
            where = "/".join([what, *names])
            raise UserError(
                f"the state's {where}: got {got}, expected {wanted}: are the model's code and the "
                "optimizer what they were?"
            )
    return jax.tree.map_with_path(lambda path, _: jnp.array(values[_names(path)]), expected)


def _leaves(tree: Tree) -> dict[tuple[str, ...], Any]:
    return {_names(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _form(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype} {list(leaf.shape)}"
