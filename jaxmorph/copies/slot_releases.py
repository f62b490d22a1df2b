"""Slots are released when the device has read them: by a thread, for nobody else is to wait."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax

from jaxmorph.copies.programs import LandingTier
from jaxmorph.transport.plane import IncomingSlot


class SlotReleases:
    """A thread that releases slots in their order, each when what was copied out of it is ready."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-releases")
        self._under_way: deque[Future[None]] = deque()

    def once_ready(self, copied: Any, slot: IncomingSlot) -> None:
        """Release a slot when an array is ready, or what behaves like one; after an error too.

        Raises:
            Exception: The error of an earlier copy, if one has failed.
        """
        self._under_way.append(self._thread.submit(_release, copied, slot))
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def settle(self) -> None:
        """Wait until every slot has been released; an error of any copy is raised, once."""
        while self._under_way:
            self._under_way.popleft().result()

    def close(self) -> None:
        """End the thread, once every slot has been released."""
        self._thread.shutdown()
        while self._under_way:
            with suppress(Exception):  # it was for `settle` to raise it
                self._under_way.popleft().result()


class ReleasingTier:
    """What ways of copying out of slots have in common that release them by a thread.

    Args:
        otherwise: What takes messages that such a way doesn't.
    """

    def __init__(self, otherwise: LandingTier) -> None:
        self._otherwise, self._releases = otherwise, SlotReleases()

    def settle(self) -> None:
        """Wait until every slot has been released; an error of any copy is raised, once."""
        self._releases.settle()
        self._otherwise.settle()

    def close(self) -> None:
        """End the thread, once every slot has been released."""
        self._releases.close()


def _release(copied: Any, slot: IncomingSlot) -> None:
    try:
        jax.block_until_ready(copied)
    finally:
        slot.release()
