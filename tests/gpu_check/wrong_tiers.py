"""Ways of copying that don't do what they should, and one that does."""

import jax
import numpy as np


class Over:
    """A ticket of a copy that is over."""

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self):
        return self


class NeverOver(Over):
    """A ticket of a copy that hangs."""

    def is_ready(self) -> bool:
        return False


class WrongTier:
    """Copies into slots by a function of a payload's bytes, its slot and what ends the message."""

    name = "wrong"

    def __init__(self, copy):
        self._copy = copy

    def compile(self, use, placement):
        return self

    def start(self, value, part, slot, tag):
        contents = np.asarray(value).reshape(-1)[part.start : part.stop].view(np.uint8)

        def signal():
            slot.post(len(contents), tag)
            slot.complete()

        return self._copy(contents, slot.payload[: len(contents)], signal) or Over()


def rightly(contents, memory, signal):
    memory[:] = contents
    signal()


def signalled_early(contents, memory, signal):
    """The last byte follows the signal, as on a device whose copy isn't over yet."""
    memory[:-1] = contents[:-1]
    signal()

    class Late(Over):
        def block_until_ready(self):
            memory[-1:] = contents[-1:]
            return self

    return Late()


def never_signalled(contents, memory, signal):
    return NeverOver()


def over_unsignalled(contents, memory, signal):
    memory[:] = contents


class WrongLanding:
    """Copies out of slots; releases each before or after its bytes have been read."""

    name = "wrong"

    def __init__(self, *, too_early):
        self._too_early = too_early
        self._shown = []

    def compile(self, use, placement):
        self._dtype = use.payload.dtype
        return self

    def begin(self):
        return self

    def add(self, part, slot):
        memory = slot.payload
        self._value = memory.view(self._dtype) if self._too_early else memory.copy()
        slot.release()

    def value(self):
        return self._value.view(self._dtype)

    def settle(self):
        pass


PLACEMENT = jax.sharding.SingleDeviceSharding(jax.devices()[0])
