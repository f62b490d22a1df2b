"""Messages in either direction, looked at and timed in the same way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.copies.programs import is_ready
from jaxmorph.gpu_check.copied_bytes import spoil, what_is_wrong
from jaxmorph.gpu_check.lone_receiver import LoneReceiver
from jaxmorph.gpu_check.lone_sender import LoneSender


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        program: What copies it, from `Messages.compile`.
        on_device: Gives the payload on the device, where it may still be being computed.
    """

    program: Any
    contents: np.ndarray
    on_device: Callable[[], jax.Array]

    @property
    def expected(self) -> np.ndarray:
        """The payload's bytes."""
        return self.contents.view(np.uint8)


class Messages(Protocol):
    """What a tier does with messages in one direction."""

    num_early: int | None

    def compile(self, payload: PayloadShape) -> Any:
        """What copies payloads of a shape."""
        ...

    def look_at(self, burst: Sequence[Message]) -> list[str]:
        """Copy messages, begun one right after another; what is wrong with each, or nothing."""
        ...

    def time_s(self, message: Message) -> tuple[float, float]:
        """Seconds until the call that copies returns, and until the copy is known to be over."""
        ...

    def spare(self) -> np.ndarray:
        """The memory of a slot that is free while nothing is under way."""
        ...


class OutgoingMessages:
    """Into slots: looked at the moment that their signals are seen.

    Args:
        sender: With room for a burst.

    Attributes:
        num_early: Messages whose copy was asked for before they had been computed.
    """

    def __init__(self, sender: LoneSender) -> None:
        self._sender = sender
        self.num_early: int | None = 0

    def compile(self, payload: PayloadShape) -> Any:
        """What copies payloads of a shape."""
        return self._sender.compile(payload)

    def look_at(self, burst: Sequence[Message]) -> list[str]:
        """Copy messages, begun one right after another; what is wrong with each, or nothing."""
        slots = [self._sender.reserve() for _ in burst]
        for message, slot in zip(burst, slots, strict=True):
            spoil(slot.payload[: len(message.expected)], message.expected)
        under_way = []
        for message, slot in zip(burst, slots, strict=True):
            value = message.on_device()
            self.num_early = (self.num_early or 0) + (not is_ready(value))
            under_way.append(self._sender.start(message.program, value, slot))
        found = []
        for message, sent in zip(burst, under_way, strict=True):
            self._sender.wait(sent)
            got = sent.slot.payload[: len(message.expected)]
            found.append(what_is_wrong(got, message.expected))
        for sent in under_way:
            self._sender.finish(sent)
        return found

    def time_s(self, message: Message) -> tuple[float, float]:
        """Seconds until the call that copies returns, and until the signal is seen."""
        value, slot = jax.block_until_ready(message.on_device()), self._sender.reserve()
        began_s = time.perf_counter()
        sent = self._sender.start(message.program, value, slot)
        called_s = time.perf_counter() - began_s
        self._sender.wait(sent)
        over_s = time.perf_counter() - began_s
        self._sender.finish(sent)
        return called_s, over_s

    def spare(self) -> np.ndarray:
        """The memory of a slot that is free while nothing is under way."""
        return self._sender.end.slots.payload(self._sender.end.slots.entered)


class IncomingMessages:
    """Out of slots: a slot is written over as soon as it is released.

    Args:
        receiver: With room for a burst.
    """

    def __init__(self, receiver: LoneReceiver) -> None:
        self._receiver = receiver
        self.num_early: int | None = None

    def compile(self, payload: PayloadShape) -> Any:
        """What copies payloads of a shape."""
        return self._receiver.compile(payload)

    def look_at(self, burst: Sequence[Message]) -> list[str]:
        """Copy messages, begun one right after another; what is wrong with each, or nothing."""
        receiver, under_way = self._receiver, []
        for message in burst:
            slot = receiver.deliver(len(message.expected), message.expected)
            value = receiver.land(message.program, slot, message.contents.size)
            under_way.append((message, slot.sequence, value))
        for message, sequence, _ in under_way:
            receiver.wait_for_release(sequence)
            spoil(self._memory(sequence, message), message.expected)
        found = []
        for message, _, value in under_way:
            receiver.wait(value)
            got = np.asarray(value).reshape(-1).view(np.uint8)
            found.append(what_is_wrong(got, message.expected))
        receiver.settle()
        return found

    def _memory(self, sequence: int, message: Message) -> np.ndarray:
        return self._receiver.end.slots.payload(sequence)[: len(message.expected)]

    def time_s(self, message: Message) -> tuple[float, float]:
        """Seconds until the call that copies returns, and until the device has the payload."""
        receiver = self._receiver
        slot = receiver.deliver(len(message.expected))
        began_s = time.perf_counter()
        value = receiver.land(message.program, slot, message.contents.size)
        called_s = time.perf_counter() - began_s
        receiver.wait(value)
        over_s = time.perf_counter() - began_s
        receiver.wait_for_release(slot.sequence)
        receiver.settle()
        return called_s, over_s

    def spare(self) -> np.ndarray:
        """The memory of a slot that is free while nothing is under way."""
        return self._receiver.end.slots.payload(self._receiver.end.slots.entered)
