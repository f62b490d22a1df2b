"""Channel ends with nothing behind them, for one copy backend at a time.

These ends do a sidecar's work on the slots step by step. So they can spoil a slot before a copy and
read it once its signal is seen, or spoil it as soon as it is released.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import PayloadShape, SlotUse, Ticket, is_ready
from jaxmorph.copies.cuda_driver import RegisteredMemory
from jaxmorph.copies.trial import try_receive, try_send
from jaxmorph.transport.names import HALF, TAG_WORDS, WRAP, ChannelName, add, distance
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd, OutgoingEnd, OutgoingSlot
from jaxmorph.transport.slots import NO_TIME_NS, MessageInfo

_LOOK_S = 1e-3  # between looks at whether a copy has failed
_END, _EVERY = 4096, 4093

UnderWay = TypeVar("UnderWay")


@dataclass(frozen=True)
class Site:
    """Where copies are looked at.

    Attributes:
        placement: Where payloads are kept.
        memory: Registers the slots; None: not needed.
        patience_s: For how long any one message is waited for.
    """

    placement: Sharding
    memory: RegisteredMemory | None = None
    patience_s: float = 15.0


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        program: What copies it, from an end's `compile`.
        expected: The payload's bytes.
        on_device: Gives the payload on the device, where it may still be being computed.
    """

    program: Any
    expected: np.ndarray
    num_elements: int
    on_device: Callable[[], jax.Array]


class _End(Generic[UnderWay]):
    """What both directions have in common.

    Args:
        first: The number of the first message; by default its signal's wraps.
    """

    def __init__(
        self, backend: Any, site: Site, slot_bytes: int, num_slots: int, first: int = WRAP - 1
    ) -> None:
        self._backend, self._site = backend, site
        spec = ChannelSpec(ChannelName(0, 0, 1), slot_bytes, num_slots)
        self._end = self._open(spec, first)
        if site.memory is not None:
            self._end.report_memory(site.memory)
            if site.memory.error is not None:  # else backends would quietly fall back
                self.close()
                raise site.memory.error
        self._under_way: deque[UnderWay] = deque()

    def close(self) -> None:
        """Give the slots back."""
        self._end.close()

    def compile(self, payload: PayloadShape) -> Any:
        """What copies payloads of a shape, each whole in a slot."""
        return self._backend.compile(SlotUse(payload, payload.shape[0]), self._site.placement)

    def look_at(self, burst: Sequence[Message]) -> list[str]:
        """Copy messages, begun one right after another; what is wrong with each, or nothing."""
        under_way = [self._start(message, is_compared=True) for message in burst]
        for message, each in zip(burst, under_way, strict=True):
            self._spoil_released(message, each)
        found = [
            what_is_wrong(self._received(each, message), message.expected)
            for message, each in zip(burst, under_way, strict=True)
        ]
        for each in under_way:
            self._finish(each)
        self._settle()
        return found

    def time_s(self, message: Message) -> tuple[float, float]:
        """Seconds until the call that copies returns, and until the copy is known to be over."""
        began_s = time.perf_counter()
        each = self._start(message)
        called_s = time.perf_counter() - began_s
        self._wait(each)
        over_s = time.perf_counter() - began_s
        self._finish(each)
        self._settle()
        return called_s, over_s

    def begin(self, message: Message) -> bool:
        """Begin a message unless no slot is free; returns without waiting for it."""
        while self._under_way and self._is_over(self._under_way[0]):
            self._finish(self._under_way.popleft())
        if has_room := self._has_room():
            self._under_way.append(self._start(message))
        return has_room

    def drain(self) -> None:
        """Wait until all that was begun is over."""
        while self._under_way:
            self._wait(self._under_way[0])
            self._finish(self._under_way.popleft())
        self._settle()

    def _open(self, spec: ChannelSpec, first: int) -> Any:
        raise NotImplementedError

    def _has_room(self) -> bool:
        raise NotImplementedError

    def _start(self, message: Message, *, is_compared: bool = False) -> UnderWay:
        """Ask for a copy; where bytes are compared, no right byte is there before it."""
        raise NotImplementedError

    def _is_over(self, each: UnderWay) -> bool:
        raise NotImplementedError

    def _wait(self, each: UnderWay) -> None:
        """Return at once when a payload is there; raise if it never will be."""
        raise NotImplementedError

    def _spoil_released(self, message: Message, each: UnderWay) -> None:
        """Write over a slot as soon as it is released; into slots none is before `_finish`."""

    def _received(self, each: UnderWay, message: Message) -> np.ndarray:
        """The bytes that came, at the moment that they are said to be there."""
        raise NotImplementedError

    def _finish(self, each: UnderWay) -> None:
        """Wait until nothing of a message is left, in the order in which they began."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Raise the error of any copy whose message did not report it."""


@dataclass(frozen=True, eq=False)
class _Sent:
    """A message whose copy into its slot has been asked for; what it needs is kept with it."""

    slot: OutgoingSlot
    value: jax.Array
    ticket: Ticket | jax.Array


class Outgoing(_End[_Sent]):
    """A backend that copies into slots, out of which nothing takes the messages.

    Attributes:
        num_early: Messages whose copy was asked for before they had been computed.
    """

    num_early = 0

    @staticmethod
    def try_it(backend: Any, site: Site) -> None:
        """Raise why it doesn't work, as when a rank starts."""
        try_send(backend, site.placement, site.memory)

    def _open(self, spec: ChannelSpec, first: int) -> OutgoingEnd:
        return OutgoingEnd(spec, first, lambda: None)

    def _has_room(self) -> bool:
        return self._end.has_free_slot()

    def _start(self, message: Message, *, is_compared: bool = False) -> _Sent:
        slot = self._end.reserve(0.0)
        if is_compared:
            spoil(slot.payload[: len(message.expected)], message.expected)
        value = message.on_device()
        self.num_early += not is_ready(value)
        tag = (slot.sequence,)
        return _Sent(slot, value, message.program(value, range(value.size), slot, tag))

    def _has_come(self, sent: _Sent) -> bool:
        return self._end.slots.is_complete(sent.slot.sequence)

    def _is_over(self, each: _Sent) -> bool:
        return self._has_come(each) and is_ready(each.ticket)

    def _wait(self, each: _Sent) -> None:
        look_s = time.monotonic() + _LOOK_S

        def has_come_or_never_will() -> bool:
            nonlocal look_s
            if self._has_come(each):
                return True
            if (now_s := time.monotonic()) < look_s:
                return False
            look_s = now_s + _LOOK_S
            return is_ready(each.ticket)

        nothing = f"message {each.slot.sequence}: {self._backend.name} has signalled nothing"
        wait_until(has_come_or_never_will, self._site.patience_s, nothing)
        if not self._has_come(each):
            jax.block_until_ready(each.ticket)
            if not self._has_come(each):
                raise RuntimeError(f"{nothing}, and the copy is over")

    def _received(self, each: _Sent, message: Message) -> np.ndarray:
        self._wait(each)
        return each.slot.payload[: len(message.expected)]

    def _finish(self, each: _Sent) -> None:
        """Wait until a copy is over, see how it was announced, and free its slot."""
        slot, slots = each.slot, self._end.slots
        what = f"message {slot.sequence}: {self._backend.name}'s copy isn't over"
        wait_until(lambda: is_ready(each.ticket), self._site.patience_s, what)
        jax.block_until_ready(each.ticket)
        about = slots.read_info(slot.sequence)
        announced = (slot.is_posted, about.num_bytes, about.tag[0])
        if announced != (expected := (True, each.value.nbytes, slot.sequence)):
            raise RuntimeError(f"announced as {announced}, expected {expected}")
        slots.consumed = add(slot.sequence, 1)


@dataclass(frozen=True, eq=False)
class _Taken:
    """A message that has been taken out of its slot; the device may not have it yet."""

    sequence: int
    value: Any


class Incoming(_End[_Taken]):
    """A backend that copies out of slots, into which messages are put by hand."""

    num_early = None

    @staticmethod
    def try_it(backend: Any, site: Site) -> None:
        """Raise why it doesn't work, as when a rank starts."""
        try_receive(backend, site.placement, site.memory)

    def _open(self, spec: ChannelSpec, first: int) -> IncomingEnd:
        return IncomingEnd(spec, first, lambda: None)

    def _has_room(self) -> bool:
        slots = self._end.slots
        return distance(slots.produced, slots.consumed) < slots.num_slots

    def _start(self, message: Message, *, is_compared: bool = False) -> _Taken:
        """Have a message come into a free slot, as a sidecar does, and have it copied out."""
        what = f"{self._backend.name} has released no slot"
        wait_until(self._has_room, self._site.patience_s, what)
        slots, sequence = self._end.slots, self._end.slots.produced
        num_bytes = len(message.expected)
        if is_compared:
            slots.payload(sequence)[:num_bytes] = message.expected
        about = MessageInfo(num_bytes, (0,) * TAG_WORDS, NO_TIME_NS, NO_TIME_NS)
        slots.write_info(sequence, about)
        slots.mark_complete(sequence)
        slots.produced = add(sequence, 1)
        arrival = message.program()
        arrival.add(range(message.num_elements), self._end.take(0.0))
        return _Taken(sequence, arrival.value())

    def _is_over(self, each: _Taken) -> bool:
        return _is_there(each) and self._is_released(each)

    def _is_released(self, each: _Taken) -> bool:
        return 0 < distance(self._end.slots.consumed, each.sequence) < HALF

    def _wait(self, each: _Taken) -> None:
        what = f"{self._backend.name} has not received a message"
        wait_until(lambda: _is_there(each), self._site.patience_s, what)
        jax.block_until_ready(each.value)

    def _spoil_released(self, message: Message, each: _Taken) -> None:
        self._finish(each)
        memory = self._end.slots.payload(each.sequence)[: len(message.expected)]
        spoil(memory, message.expected)

    def _received(self, each: _Taken, message: Message) -> np.ndarray:
        self._wait(each)
        return np.asarray(each.value).reshape(-1).view(np.uint8)

    def _finish(self, each: _Taken) -> None:
        what = f"message {each.sequence}: {self._backend.name} has not released its slot"
        wait_until(lambda: self._is_released(each), self._site.patience_s, what)

    def _settle(self) -> None:
        self._backend.settle()


def _is_there(each: _Taken) -> bool:
    return not isinstance(each.value, jax.Array) or is_ready(each.value)


def wait_until(condition: Callable[[], bool], patience_s: float, what: str) -> None:
    """Return at once when a condition holds; other threads can run meanwhile."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} within {patience_s:g} s")
        time.sleep(0)


def what_is_wrong(got: np.ndarray, expected: np.ndarray) -> str:
    """What is wrong with a payload now; empty if nothing is.

    Its end and some samples are read first: reading all of it takes so long that an unfinished copy
    would end meanwhile.

    Args:
        got: uint8 [n], memory that may be changing.
    """
    looks = {
        "of the last bytes": (got[-_END:].copy(), expected[-_END:]),
        f"of one byte in {_EVERY}": (got[::_EVERY].copy(), expected[::_EVERY]),
        "of all bytes": (got.copy(), expected),
    }
    for which, (seen, due) in looks.items():
        (wrong,) = np.nonzero(seen != due)
        if len(wrong):
            return f"{len(wrong)} {which} ({len(due)}), the first at {wrong[0]} among them"
    return ""


def spoil(memory: np.ndarray, expected: np.ndarray) -> None:
    """Make every byte of a memory differ from those expected; both are uint8 [n]."""
    np.invert(expected, out=memory)
