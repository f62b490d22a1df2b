"""Receives messages that are whole in their slots, each straight from there to the device."""

from collections.abc import Callable

import jax
import numpy as np

from jaxmorph.copies.programs import Arrival, Landing
from jaxmorph.transport.plane import IncomingSlot

Fetch = Callable[[IncomingSlot], jax.Array | None]


class WholeLanding:
    """Receives payloads of one shape, of one part each.

    Args:
        fetch: Begins to copy a slot's message to the device, and sees to the slot's release; None:
            the device doesn't know that slot.
        otherwise: What takes messages out of such slots.
    """

    def __init__(self, fetch: Fetch, otherwise: Landing) -> None:
        self.fetch, self.otherwise = fetch, otherwise

    def begin(self) -> "_WholeArrival":
        """Begin with a message."""
        return _WholeArrival(self)


class _WholeArrival:
    """A message of one part."""

    def __init__(self, landing: WholeLanding) -> None:
        self._landing = landing
        self._value: jax.Array | None = None
        self._other: Arrival | None = None

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Have the payload copied to the device."""
        self._value = self._landing.fetch(slot)
        if self._value is None:
            self._other = self._landing.otherwise.begin()
            self._other.add(part, slot)

    def value(self) -> jax.Array | np.ndarray:
        """The payload, or what will be it."""
        if self._value is not None:
            return self._value
        if self._other is None:
            raise ValueError("nothing of the message has been added")
        return self._other.value()
