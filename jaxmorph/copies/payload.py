"""What a message carries, and how it lies in the slots of a channel."""

import math
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp


@dataclass(frozen=True)
class PayloadShape:
    """What one message of a link carries, on one shard."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


@dataclass(frozen=True)
class SlotUse:
    """How a payload lies in slots.

    Attributes:
        payload: Its shape and type.
        part_elements: How many of its elements fit into a slot.
    """

    payload: PayloadShape
    part_elements: int

    @cached_property
    def num_elements(self) -> int:
        """Elements of a whole payload."""
        return math.prod(self.payload.shape)

    @cached_property
    def parts(self) -> list[range]:
        """The elements of each part, in the order in which they travel."""
        starts = range(0, self.num_elements, self.part_elements)
        return [range(at, min(at + self.part_elements, self.num_elements)) for at in starts]

    @property
    def slot_bytes(self) -> int:
        """The length of a slot."""
        return self.part_elements * self.payload.dtype.itemsize

    def slots_for(self, messages: int) -> int:
        """How many slots whole messages are given; two are enough for one in many parts.

        Args:
            messages: How many are under way at once, a power of two.
        """
        return messages if len(self.parts) == 1 else 2
