"""The slots' memory as the device's driver knows it: registered once, until it goes."""

import logging
import threading
from bisect import bisect_right
from typing import NamedTuple

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError

_log = logging.getLogger(__name__)


class _Region(NamedTuple):
    start: int
    num_bytes: int
    device_start: int


class RegisteredMemory:
    """Registers the memory that a data plane tells of; see `transport.plane.MemoryKeeper`.

    Attributes:
        trouble: Why some memory could not be registered; None as long as all could. Copies that
            need it go another way from then on.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.trouble: CudaError | None = None
        self._driver = driver
        self._regions: list[_Region] = []  # by where they start; replaced as a whole
        self._lock = threading.Lock()
        self._is_closed = False

    def add(self, address: int, num_bytes: int) -> None:
        """Register memory; where that can't be done any more, a warning says so once."""
        if self._is_closed:
            return
        try:
            region = _Region(address, num_bytes, self._driver.register(address, num_bytes))
        except CudaError as error:
            if self.trouble is None and self._regions:  # of the first, who asks for `trouble` tells
                _log.warning("the device can't use slots of %s bytes: %s", num_bytes, error)
            self.trouble = self.trouble or error
            return
        with self._lock:
            self._regions = sorted([*self._regions, region])

    def remove(self, address: int) -> None:
        """Forget memory that is about to go."""
        with self._lock:
            left = [region for region in self._regions if region.start != address]
            was_known, self._regions = len(left) < len(self._regions), left
        if not was_known:
            return
        try:
            self._driver.unregister(address)
        except CudaError as error:  # the memory goes all the same, and with the process all of it
            _log.warning("slots could not be unregistered: %s", error)

    def close(self) -> None:
        """Forget all of it, once nothing of the device's uses it; what comes later is nobody's."""
        self._is_closed = True
        for region in self._regions:
            self.remove(region.start)

    def device_address(self, address: int) -> int | None:
        """Where the device finds what is at an address here; None where it doesn't know it."""
        regions = self._regions
        index = bisect_right(regions, (address, float("inf"))) - 1
        if index < 0:
            return None
        region = regions[index]
        offset = address - region.start
        return region.device_start + offset if offset < region.num_bytes else None
