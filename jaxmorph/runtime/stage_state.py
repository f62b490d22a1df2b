"""Splits a rank's parameters and optimizer state into a part for each virtual stage, and back.

An Optax state holds trees with the structure of the parameters, such as Adam's moments, and numbers
that belong to no parameter, such as its count. A part gets its own chunk's share of the trees, and
all of the numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmorph.errors import UserError
from jaxmorph.stage.sharding import placed

Tree = Any
PARAMS = "params"
_OPTIMIZER = "optimizer"


def stage_parts(params: tuple[Tree, ...], optimizer_state: Tree) -> tuple[Tree, ...]:
    """A tree of nested dictionaries for each chunk: its parameters and its optimizer state."""
    of_all_chunks = _is_like(params)
    return tuple(
        {PARAMS: own, _OPTIMIZER: nested(_leaves(_of_chunk(optimizer_state, chunk, of_all_chunks)))}
        for chunk, own in enumerate(params)
    )


def from_parts(
    parts: Sequence[Tree], params: tuple[Tree, ...], optimizer_state: Tree
) -> tuple[tuple[Tree, ...], Tree]:
    """New parameters and optimizer state from the parts that `stage_parts` made.

    Args:
        parts: One for each chunk; numpy arrays.
        params: The expected structure and shapes, with shardings, as for `optimizer_state`.

    Raises:
        UserError: The parts belong to another model, cut or optimizer, or are no parts.
    """
    _require_parts(parts, len(params))
    of_all_chunks = _is_like(params)
    new_params = tuple(
        _filled(own, part[PARAMS], PARAMS) for own, part in zip(params, parts, strict=True)
    )
    states = [
        # A checkpoint library may leave out an empty branch, such as the state of plain SGD.
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
    """The state with one chunk's tree in place of each tuple of all chunks' trees."""
    return jax.tree.map(
        lambda node: node[chunk] if of_all_chunks(node) else node, state, is_leaf=of_all_chunks
    )


def _require_parts(parts: Sequence[Tree], num_chunks: int) -> None:
    """Refuse parts that don't have the form that `stage_parts` makes."""
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


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Leaves in nested dictionaries, by the keys that lead to them."""
    tree: dict[str, Any] = {}
    for (*outer, name), leaf in leaves.items():
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = leaf
    return tree


def _filled(expected: Tree, found: Tree, what: str) -> Tree:
    """The expected tree with the values of `found`, whose leaves must match in name and form."""
    values, due = _leaves(found), _leaves(expected)
    for names in [*due, *sorted(values.keys() - due.keys())]:
        got, wanted = _form(values.get(names)), _form(due.get(names))
        if got != wanted:
            where = "/".join([what, *names])
            raise UserError(
                f"the state's {where}: got {got}, expected {wanted}: are the model's code and the "
                "optimizer what they were?"
            )
    return jax.tree.map_with_path(
        lambda path, leaf: placed(values[_names(path)], leaf.sharding), expected
    )


def _leaves(tree: Tree) -> dict[tuple[str, ...], Any]:
    return {_names(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _form(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype} {list(leaf.shape)}"
