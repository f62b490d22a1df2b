"""What a microbatch keeps on a stage between its ops, in bytes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class StashMemory:
    """The bytes that one live microbatch holds on one stage.

    Attributes:
      after_backward_input_bytes: from B until W, with those arrays of the first that W needs too.
    """

    after_forward_bytes: int
    after_backward_input_bytes: int


def total_bytes(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of these arrays together."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
