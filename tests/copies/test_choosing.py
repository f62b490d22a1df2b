import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.choosing import choose_tier
from jaxmorph.copies.host_callbacks import host_callback_tiers

PLACEMENT = SingleDeviceSharding(jax.devices()[0])


class Broken:
    name = "broken"

    def compile(self, use, placement):
        raise NotImplementedError("no such device")


class Forgetful:
    """Says that it has copied, and hasn't."""

    name = "forgetful"

    def compile(self, use, placement):
        return self

    def start(self, value, part, slot, tag):
        slot.post(4 * len(part), tag)
        slot.complete()
        return jnp.zeros(1, jnp.uint32)


def test_the_first_tier_that_really_copies_is_chosen_and_the_others_are_named(caplog):
    working = host_callback_tiers()[1]
    assert choose_tier(PLACEMENT, [Broken(), Forgetful(), working]) is working
    assert "copies into slots by broken don't work here: NotImpl" in caplog.text
    assert "copies into slots by forgetful don't work here: RuntimeError" in caplog.text


def test_without_any_that_works_the_error_says_why_of_each():
    with pytest.raises(RuntimeError, match=r"broken: .*no such device.*; forgetful: .*bytes that"):
        choose_tier(PLACEMENT, [Broken(), Forgetful()])
