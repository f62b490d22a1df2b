import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmorph.runtime.copy_tiers import (
    AtOnceTier,
    choose_tier,
    control_words,
    host_callback_tiers,
    is_ready,
)
from jaxmorph.runtime.links import PayloadShape
from jaxmorph.runtime.payloads import SlotUse

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
LARGE_COPIES = Path(__file__).with_name("large_copies.py")


class Slot:
    """Memory that notes what it is told."""

    def __init__(self, sequence, num_bytes):
        self.sequence = sequence
        self.payload = np.zeros(num_bytes, np.uint8)
        self.address = self.payload.ctypes.data
        self.signal_address = 0
        self.is_posted = False
        self.said = []

    def post(self, num_bytes, tag):
        self.is_posted = True
        self.said.append(("post", num_bytes, tag, self.payload[:num_bytes].any()))

    def complete(self):
        self.said.append("complete")


class Broken:
    name = "broken"

    def compile(self, use, placement):
        raise NotImplementedError("no such device")


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


class Forgetful:
    """Says that it has copied, and hasn't."""

    name = "forgetful"

    def compile(self, use, placement):
        return self

    def start(self, value, part, slot, tag):
        slot.post(4 * len(part), tag)
        slot.complete()
        return jnp.zeros(1, jnp.uint32)


def test_control_words_are_three_addresses_the_signals_number_and_a_time():
    slot = Slot(0xFFFFFFFE, 8)
    slot.address = 0x1234_5678_9ABC_DEF0
    words = control_words(slot, signal_address=0xFFFF_FFFF_0000_0040, spin_us=7)
    assert words.dtype == np.uint32
    assert [hex(word) for word in words] == [
        "0x9abcdef0", "0x12345678", "0x40", "0xffffffff", "0x0", "0x0", "0xffffffff", "0x7",
    ]  # fmt: skip


@pytest.mark.parametrize("tier", host_callback_tiers(), ids=lambda tier: tier.name)
def test_a_message_is_posted_and_completed_once_its_payload_is_there(tier):
    use = SlotUse(PayloadShape((2, 3), jnp.dtype("float32")), 6)
    program = tier.compile(use, PLACEMENT)
    values = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    slots = [Slot(sequence, 24) for sequence in (0xFFFFFFFF, 0, 1)]
    tickets = [
        program.start(jnp.asarray(values + at), range(6), slot, (at, 9))
        for at, slot in enumerate(slots)
    ]
    assert [np.asarray(ticket).tolist() for ticket in tickets] == [[0], [1], [2]]
    for at, slot in enumerate(slots):
        assert slot.said == [("post", 24, (at, 9), True), "complete"]
        assert np.array_equal(slot.payload.view(np.float32).reshape(2, 3), values + at)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_threads", ["1", "4"])
def test_large_results_arrive_though_several_are_still_being_computed(num_threads):
    """A callback that waits for JAX's pool of threads hangs in its only one."""
    environment = {**os.environ, "NPROC": num_threads}
    done = subprocess.run(
        [sys.executable, str(LARGE_COPIES)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * len(host_callback_tiers())


def test_the_first_tier_that_really_copies_is_chosen_and_the_others_are_named(caplog):
    working = host_callback_tiers()[1]
    assert choose_tier(PLACEMENT, [Broken(), Forgetful(), working]) is working
    assert "copies by broken don't work here" in caplog.text
    assert "copies by forgetful don't work here" in caplog.text


def test_without_any_that_works_the_error_says_why_of_each():
    with pytest.raises(RuntimeError, match=r"broken: .*no such device.*; forgetful: .*bytes that"):
        choose_tier(PLACEMENT, [Broken(), Forgetful()])


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
