"""Copies by way of JAX's pinned memory, which CPUs have too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from slot_memory import Slot

from jaxmorph.copies import pinned_host
from jaxmorph.copies.payload import PayloadShape, SlotUse
from jaxmorph.copies.pinned_host import PinnedHostTier
from jaxmorph.copies.programs import is_ready
from jaxmorph.copies.trial import try_tier

PLACEMENT = SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def tier():
    tier = PinnedHostTier()
    yield tier
    tier.close()


def test_it_passes_its_trial(tier):
    try_tier(tier, PLACEMENT)


def test_a_payload_in_parts_goes_to_host_memory_once(tier, monkeypatch):
    placed, place = [], jax.device_put

    def device_put(value, where):
        placed.append(where.memory_kind)
        return place(value, where)

    monkeypatch.setattr(pinned_host.jax, "device_put", device_put)
    use = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 7)
    program = tier.compile(use, PLACEMENT)
    for seed in range(2):
        value = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 5)), jnp.float32)
        slots = [Slot(index, use.slot_bytes) for index in range(3)]
        tickets = [
            program.start(value, part, slot, (seed,))
            for part, slot in zip(use.parts, slots, strict=True)
        ]
        jax.block_until_ready(tickets)
        arrived = np.concatenate([slot.payload.view(np.float32) for slot in slots])[:15]
        assert np.array_equal(arrived, np.asarray(value).reshape(-1))
        assert [slot.said[0][:3] for slot in slots] == [
            ("post", 28, (seed,)),
            ("post", 28, (seed,)),
            ("post", 4, (seed,)),
        ]
    assert placed == ["pinned_host"] * 2


def test_a_copy_that_fails_is_an_error_of_its_ticket(tier):
    use = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 15)
    slot = Slot(0, 59)
    ticket = tier.compile(use, PLACEMENT).start(jnp.ones((3, 5)), range(15), slot, (0,))
    with pytest.raises(ValueError, match="60 bytes, expected at most 59"):
        jax.block_until_ready(ticket)
    assert is_ready(ticket)
    assert slot.said == []
