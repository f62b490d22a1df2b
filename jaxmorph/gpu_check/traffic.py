"""Messages that go along beside computation, as many as there is room for; nobody waits for them.

They are begun by the thread that dispatches the computation, between two dispatches, as a step's
are: a rank has no other thread for that.
"""

from collections import deque
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.copies.programs import is_ready
from jaxmorph.gpu_check.lone_receiver import LoneReceiver
from jaxmorph.gpu_check.lone_sender import LoneSender, Sent


class Traffic(Protocol):
    """Messages in one direction."""

    def begin(self, payload: jax.Array) -> int:
        """Begin a message, unless no slot is free; how many were begun."""
        ...

    def drain(self) -> None:
        """Wait until all that was begun is over."""
        ...


class OutgoingTraffic:
    """Into slots, which are freed once their signals are there."""

    def __init__(self, sender: LoneSender, payload: PayloadShape) -> None:
        self._sender, self._program = sender, sender.compile(payload)
        self._under_way: deque[Sent] = deque()

    def begin(self, payload: jax.Array) -> int:
        """Begin a message, unless no slot is free; how many were begun."""
        self._free_what_has_come()
        if not self._sender.end.has_room():
            return 0
        slot = self._sender.reserve()
        self._under_way.append(self._sender.start(self._program, payload, slot))
        return 1

    def drain(self) -> None:
        """Wait until all that was begun is over."""
        while self._under_way:
            sent = self._under_way.popleft()
            self._sender.wait(sent)
            self._sender.finish(sent)

    def _free_what_has_come(self) -> None:
        while self._under_way:
            first = self._under_way[0]
            if not self._sender.has_come(first) or not is_ready(first.ticket):
                return
            self._sender.finish(self._under_way.popleft())


class IncomingTraffic:
    """Out of slots, in which the next message is as soon as they are released."""

    def __init__(self, receiver: LoneReceiver, payload: PayloadShape) -> None:
        self._receiver, self._landing = receiver, receiver.compile(payload)
        (self._size,), self._dtype = payload.shape, jnp.dtype(payload.dtype)
        self._under_way: deque[Any] = deque()

    def begin(self, payload: jax.Array) -> int:
        """Begin a message, unless no slot is free; how many were begun."""
        del payload  # what comes is another rank's
        while self._under_way and self._receiver.is_there(self._under_way[0]):
            self._under_way.popleft()
        if not self._receiver.has_room():
            return 0
        slot = self._receiver.deliver(self._size * self._dtype.itemsize)
        self._under_way.append(self._receiver.land(self._landing, slot, self._size))
        return 1

    def drain(self) -> None:
        """Wait until all that was begun is over."""
        while self._under_way:
            self._receiver.wait(self._under_way.popleft())
        self._receiver.settle()


class BothTraffic:
    """Two kinds of messages, of which one of each is begun at a time."""

    def __init__(self, first: Traffic, second: Traffic) -> None:
        self._both = first, second

    def begin(self, payload: jax.Array) -> int:
        """Begin a message of each kind for which a slot is free; how many were begun."""
        return sum(traffic.begin(payload) for traffic in self._both)

    def drain(self) -> None:
        """Wait until all that was begun is over."""
        for traffic in self._both:
            traffic.drain()
