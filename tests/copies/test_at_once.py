from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from slot_memory import Slot

from jaxmorph.copies.at_once import AtOnceTier
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.programs import is_ready

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
TICKET = jnp.zeros(1, jnp.uint32)


class Counting:
    """Counts what it is asked to copy."""

    name = "counting"

    def __init__(self):
        self.started = 0

    def compile(self, use, placement):
        return self

    def start(self, value, part, slot, tag):
        self.started += 1
        return TICKET


class NotReady:
    """An array that is still being computed."""

    def is_ready(self):
        return False


def test_what_lies_computed_in_host_memory_is_copied_by_no_program():
    use = SlotUse(PayloadShape((2, 3), jnp.dtype("float32")), 4)
    program = AtOnceTier(Counting()).compile(use, PLACEMENT)
    values = jax.block_until_ready(jnp.arange(6, dtype=jnp.float32).reshape(2, 3))
    slots = [Slot(sequence, 16) for sequence in (0, 1)]
    for slot, part in zip(slots, use.parts, strict=True):
        assert is_ready(program.start(values, part, slot, (7,)))
    assert [slot.said for slot in slots] == [
        [("post", 16, (7,), np.True_), "complete"],
        [("post", 8, (7,), np.True_), "complete"],
    ]
    arrived = np.concatenate([slot.payload.view(np.float32) for slot in slots])[:6]
    assert arrived.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_being_computed_is_left_to_the_program_behind_it():
    use = SlotUse(PayloadShape((2,), jnp.dtype("float32")), 2)
    behind = Counting()
    program = AtOnceTier(behind).compile(use, PLACEMENT)
    slot = Slot(0, 8)
    value: Any = NotReady()
    assert program.start(value, range(2), slot, (7,)) is TICKET
    assert (behind.started, slot.said) == (1, [])
