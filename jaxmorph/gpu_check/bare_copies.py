"""Copies with nothing else, for comparison: by the device's copy engine, or within the host."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax
import numpy as np

from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.dlpack_memory import address_on_device
from jaxmorph.copies.ways import OpenDriver

BareCopies = Callable[[np.ndarray, jax.Array, int], float]
"""Seconds of so many copies, one behind another, between a slot's memory, uint8, and a device's
array that is just as long."""


@contextmanager
def bare_copies(
    device: Any, *, outgoing: bool, open_driver: OpenDriver = CudaDriver.open
) -> Iterator[BareCopies | None]:
    """What copies so; None where the driver can't be had.

    Args:
        device: Where arrays are.
        outgoing: Whether into slots; else out of them, over what the array holds.
        open_driver: Opens the driver, given the device's number.
    """
    if device.platform == "cpu":
        yield _memcpy_out if outgoing else _MemcpyIn()
        return
    try:
        driver = open_driver(device.local_hardware_id or 0)
    except CudaError:
        yield None
        return
    with closing(driver), closing(_Engine(driver, outgoing=outgoing)) as engine:
        yield engine


class _Engine:
    """The copy engine, on a stream with nothing else."""

    def __init__(self, driver: CudaDriver, *, outgoing: bool) -> None:
        self._driver, self._outgoing = driver, outgoing
        self._stream = driver.create_stream()

    def __call__(self, slot: np.ndarray, value: jax.Array, count: int) -> float:
        host, device, stream = slot.ctypes.data, address_on_device(value), self._stream
        began_s = time.perf_counter()
        for _ in range(count):
            if self._outgoing:
                self._driver.copy_to_host(host, device, value.nbytes, stream)
            else:
                self._driver.copy_to_device(device, host, value.nbytes, stream)
        self._driver.wait_for_stream(stream)
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._driver.destroy_stream(self._stream)


def _memcpy_out(slot: np.ndarray, value: jax.Array, count: int) -> float:
    source = np.asarray(value).reshape(-1).view(np.uint8)  # the same memory
    began_s = time.perf_counter()
    for _ in range(count):
        slot[: len(source)] = source
    return time.perf_counter() - began_s


class _MemcpyIn:
    """Into memory of its own: what an array holds on a CPU isn't to be written."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def __call__(self, slot: np.ndarray, value: jax.Array, count: int) -> float:
        if len(self._memory) != value.nbytes:
            self._memory = np.zeros(value.nbytes, np.uint8)
        began_s = time.perf_counter()
        for _ in range(count):
            self._memory[:] = slot[: value.nbytes]
        return time.perf_counter() - began_s
