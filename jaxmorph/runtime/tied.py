"""Tied parameters: the first and the last stage each hold a copy of one parameter.

Each copy accumulates the gradient of its own use. At the end of a step both are replaced by their
sum, added in stage order at both ends, so the copies get bitwise equal updates and stay equal.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmorph.stage.model import Path
from jaxmorph.stage.parameters import LeafPath, leaf_at, with_leaf

Tree = Any
EMBED, HEAD = "embed", "head"


class TiedGradients:
    """Sums the gradients of tied parameters on a stage that holds a copy.

    Args:
        tied: Pairs of paths, in the embedding's and in the head's parameters.
        accumulators: The accumulators of each chunk, or their shapes. The first chunk of the
            first stage has the embedding, the last chunk of the last stage the head.
    """

    def __init__(self, tied: Sequence[tuple[Path, Path]], accumulators: Tree) -> None:
        self._has_embed = EMBED in accumulators[0]
        last = len(accumulators) - 1
        self._paths: list[tuple[LeafPath, LeafPath]] = [
            ((0, EMBED, *embed), (last, HEAD, *head)) for embed, head in tied
        ]
        self._add = jax.jit(jax.numpy.add)

    def _own_path(self, index: int) -> LeafPath:
        in_embed, in_head = self._paths[index]
        return in_embed if self._has_embed else in_head

    def own_copy(self, accumulators: Tree, index: int) -> jax.Array:
        """The gradient that this rank's copy has accumulated."""
        return leaf_at(accumulators, self._own_path(index))

    def combine(self, accumulators: Tree, index: int, peer: ArrayLike | None) -> Tree:
        """New accumulators, with the embedding's gradient plus the head's in place of each copy's.

        Args:
            peer: The gradient of the peer's copy; on CPUs it may be a numpy array. None where this
                rank holds both copies.
        """
        in_embed, in_head = self._paths[index]
        if peer is None:
            total = self._add(leaf_at(accumulators, in_embed), leaf_at(accumulators, in_head))
            # Two buffers, because each is donated later.
            both = with_leaf(accumulators, in_embed, total)
            return with_leaf(both, in_head, jax.numpy.copy(total))
        own = self.own_copy(accumulators, index)
        total = self._add(own, peer) if self._has_embed else self._add(peer, own)
        return with_leaf(accumulators, self._own_path(index), total)
