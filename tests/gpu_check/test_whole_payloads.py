"""Torn messages, and copies that are never over, are found out."""

from dataclasses import replace

import numpy as np
import pytest
from wrong_tiers import (
    PLACEMENT,
    WrongLanding,
    WrongTier,
    never_signalled,
    over_unsignalled,
    rightly,
    signalled_early,
)

from jaxmorph.gpu_check.copied_bytes import spoil, what_is_wrong
from jaxmorph.gpu_check.copy_settings import COPIES_ON_CPU
from jaxmorph.gpu_check.lone_end import Site
from jaxmorph.gpu_check.tier_check import IncomingTier, OutgoingTier
from jaxmorph.gpu_check.whole_payloads import look_at_payloads

SITE = Site(PLACEMENT, None, patience_s=20.0)
SETTINGS = replace(COPIES_ON_CPU, num_small=12, small_bytes=(4, 1000))
TYPES = 3


def look_at(tier, site=SITE):
    return look_at_payloads(OutgoingTier(tier, site).messages, PLACEMENT, SETTINGS)


def test_messages_that_are_whole_are_right():
    found = look_at(WrongTier(rightly))
    assert found.is_whole
    assert (found.num_payloads, found.num_small) == (TYPES * len(SETTINGS.case_bytes), 12)


def test_a_signal_before_the_last_byte_is_seen_in_every_message():
    found = look_at(WrongTier(signalled_early))
    assert not found.is_whole
    assert len(found.wrong) == found.num_payloads
    assert (
        found.wrong[-1]
        == "uint8, 4.0 KiB: 1 of the last bytes (4096), the first at 4095 among them"
    )
    assert found.num_torn == 12
    assert found.first_torn.startswith("message 0, ")


def test_one_torn_message_among_many_is_found_and_named():
    count = iter(range(1000))
    torn_at = TYPES * len(SETTINGS.case_bytes) + 7

    def seldom(contents, memory, signal):
        return (signalled_early if next(count) == torn_at else rightly)(contents, memory, signal)

    found = look_at(WrongTier(seldom))
    assert (found.wrong, found.num_torn) == ([], 1)
    assert found.first_torn.startswith("message 7, ")


def test_a_signal_that_never_comes_is_waited_for_no_longer_than_it_may():
    with pytest.raises(TimeoutError, match=r"wrong has signalled nothing within 0.05 s"):
        look_at(WrongTier(never_signalled), replace(SITE, patience_s=0.05))


def test_a_copy_that_is_over_without_a_signal_is_not_waited_for():
    with pytest.raises(RuntimeError, match="has signalled nothing, and the copy is over"):
        look_at(WrongTier(over_unsignalled))


@pytest.mark.parametrize("too_early", [True, False])
def test_a_slot_that_is_released_before_it_has_been_read_is_found(too_early):
    tier = IncomingTier(WrongLanding(too_early=too_early), SITE)
    found = look_at_payloads(tier.messages, PLACEMENT, SETTINGS)
    assert found.is_whole != too_early
    assert found.num_torn == (12 if too_early else 0)


def test_the_end_of_a_payload_is_read_before_the_rest():
    class Filling(np.ndarray):
        """Memory whose last byte comes with the second look."""

        def __getitem__(self, at):
            seen = np.asarray(self)[at].copy()
            np.asarray(self)[-1] = 7
            return seen

    expected = np.full(10_000, 7, np.uint8)
    memory = expected.copy()
    memory[-1] = 0
    told = what_is_wrong(memory.view(Filling), expected)
    assert told == "1 of the last bytes (4096), the first at 4095 among them"
    assert what_is_wrong(memory, expected) == ""


def test_spoilt_memory_is_wrong_in_every_byte():
    expected = np.arange(256, dtype=np.uint8)
    memory = expected.copy()
    spoil(memory, expected)
    assert (memory != expected).all()
