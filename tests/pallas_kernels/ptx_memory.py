"""The memory of the machine that runs the kernels' PTX, and the stores on their way there."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SENT_AT_TIMES = 0.1


class Memory:
    """Regions of bytes; whatever lies in none of them, or isn't aligned, can't be touched.

    Args:
        regions: What lies at which address.
    """

    def __init__(self, regions: Mapping[int, bytearray]) -> None:
        self.regions = dict(regions)
        self.written: list[tuple[int, int]] = []  # address and length
        self.on_write: Callable[[int], None] = lambda address: None

    def load(self, address: int, size: int) -> int:
        region, at = self._find(address, size)
        return int.from_bytes(region[at : at + size], "little")

    def store(self, address: int, size: int, value: int) -> None:
        region, at = self._find(address, size)
        region[at : at + size] = value.to_bytes(size, "little")
        self.written.append((address, size))
        self.on_write(address)

    def _find(self, address: int, size: int) -> tuple[bytearray, int]:
        if address % size:
            raise AssertionError(f"{address:#x} is no multiple of {size}")
        for base, region in self.regions.items():
            if base <= address and address + size <= base + len(region):
                return region, address - base
        raise AssertionError(f"{size} bytes at {address:#x} are nobody's")


@dataclass(eq=False)
class Store:
    """On its way to memory.

    Attributes:
        thread: Whose it is.
        cta: Whose threads all know of it, once they have met at a barrier; None: not yet.
        address: Where to.
        size: In bytes.
        value: What.
    """

    thread: Any
    cta: int | None
    address: int
    size: int
    value: int


class StoreBuffer:
    """Stores that have been made and are not in memory yet; they get there in any order.

    Args:
        memory: Where they go.
        order: Draws it.
    """

    def __init__(self, memory: Memory, order: random.Random) -> None:
        self._memory, self._random = memory, order
        self._stores: list[Store] = []

    def add(self, store: Store) -> None:
        self._stores.append(store)

    def meet(self, cta: int) -> None:
        """The threads of a CTA have met: each knows of the others' stores."""
        for store in self._stores:
            if store.thread.cta == cta:
                store.cta = cta

    def send_known(self, thread: Any) -> None:
        """Put all that a thread knows of into memory."""
        self._send([s for s in self._stores if s.thread is thread or s.cta == thread.cta])

    def send_some(self) -> None:
        """Put a few into memory, now and then."""
        if self._random.random() < _SENT_AT_TIMES:
            self._send(self._random.sample(self._stores, min(5, len(self._stores))))

    def send_all(self) -> None:
        """Put all into memory."""
        self._send(self._stores)

    def _send(self, stores: Sequence[Store]) -> None:
        sent = set(stores)
        for store in self._random.sample(stores, len(stores)):
            self._memory.store(store.address, store.size, store.value)
        self._stores = [store for store in self._stores if store not in sent]
