"""Nested dictionaries as one dictionary of their leaves, and back."""

from collections.abc import Mapping
from typing import Any

Names = tuple[str, ...]
"""The keys on the way to a leaf."""


def leaves_of(tree: Mapping[str, Any]) -> dict[Names, Any]:
    """The leaves by the names on their ways.

    Args:
        tree: Nested dictionaries with text as keys; those that are empty leave nothing.
    """
    leaves: dict[Names, Any] = {}
    for name, inner in tree.items():
        below = leaves_of(inner) if isinstance(inner, Mapping) else {(): inner}
        leaves |= {(name, *names): leaf for names, leaf in below.items()}
    return leaves


def nested(leaves: Mapping[Names, Any]) -> dict[str, Any]:
    """The nested dictionaries that have these leaves.

    Args:
        leaves: By the names on their ways; none of them is on another's.
    """
    tree: dict[str, Any] = {}
    for (*outer, name), leaf in leaves.items():
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = leaf
    return tree
