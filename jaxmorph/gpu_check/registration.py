"""The part on registration: whether the driver takes the memory of slots, and how long it takes."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from jaxmorph.byte_sizes import in_bytes
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.ways import OpenDriver
from jaxmorph.gpu_check.lone_end import CHANNEL
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd

_SLOTS = 4


@dataclass(frozen=True)
class Registered:
    """What the driver did with memory.

    Attributes:
        first_s: Seconds of registering it.
        again_s: The same once more, after it had been unregistered.
        unregister_s: Seconds of that.
        same_address: Whether the device's address of it is this process's.
    """

    first_s: float
    again_s: float
    unregister_s: float
    same_address: bool


@dataclass(frozen=True)
class RegistrationReport:
    """What making slots known to a device costs.

    Attributes:
        create_s: Seconds of making them, every page written.
        locked_limit_bytes: What this process may lock; None: any amount.
        needs_none: Whether the device is the host.
        trouble: Why they can't be registered; empty if they were.
    """

    num_bytes: int
    create_s: float
    locked_limit_bytes: int | None
    needs_none: bool
    trouble: str = ""
    registered: Registered | None = None

    def rows(self) -> Iterator[Row]:
        """A row for each."""
        limit = self.locked_limit_bytes
        yield Row("locked memory", "unlimited" if limit is None else in_bytes(limit), "at most")
        size = in_bytes(self.num_bytes)
        yield Row("create slots", f"{self.create_s:.3f} s", f"{size}, every page written")
        if self.needs_none:
            yield Row("register slots", "none", "a CPU needs to be told of no memory")
        elif (found := self.registered) is None:
            yield Row("register slots", "not done", self.trouble, False)
        else:
            address = "this process's" if found.same_address else "another than this process's"
            note = f"{size}; the device's address is {address}"
            yield Row("register slots", f"{found.first_s:.3f} s", note, True)
            yield Row("unregister slots", f"{found.unregister_s:.3f} s")
            yield Row("register them again", f"{found.again_s:.3f} s", "", True)


def measure_registration(
    settings: CheckSettings, open_driver: OpenDriver = CudaDriver.open
) -> RegistrationReport:
    """Make slots, and have the driver know and forget them twice.

    Args:
        settings: How many bytes.
        open_driver: Opens the driver, given the device's number.
    """
    return registration_of(jax.devices()[0], settings.copies.registered_bytes, open_driver)


def registration_of(device: Any, num_bytes: int, open_driver: OpenDriver) -> RegistrationReport:
    """Make slots for a device, and have its driver know and forget them twice.

    Args:
        device: Where copies go to and come from.
        open_driver: Opens the driver, given the device's number.
    """
    spec = ChannelSpec(CHANNEL, num_bytes // _SLOTS, _SLOTS)
    began_s = time.perf_counter()
    with closing(OutgoingEnd(spec, 0, lambda: None)) as end:
        for number in range(_SLOTS):
            end.slots.payload(number)[:] = 1
        create_s = time.perf_counter() - began_s
        on_host = device.platform == "cpu"
        told = (num_bytes, create_s, _locked_limit(), on_host)
        if on_host:
            return RegistrationReport(*told)
        try:
            with closing(open_driver(device.local_hardware_id or 0)) as driver:
                return RegistrationReport(*told, registered=_register(driver, *end.slots.memory))
        except CudaError as error:
            return RegistrationReport(*told, trouble=str(error))


def _register(driver: CudaDriver, address: int, num_bytes: int) -> Registered:
    first_s, found = _timed(lambda: driver.register(address, num_bytes))
    unregister_s, _ = _timed(lambda: driver.unregister(address))
    again_s, _ = _timed(lambda: driver.register(address, num_bytes))
    driver.unregister(address)
    return Registered(first_s, again_s, unregister_s, same_address=found == address)


def _timed(call: Callable[[], int | None]) -> tuple[float, int | None]:
    began_s = time.perf_counter()
    found = call()
    return time.perf_counter() - began_s, found


def _locked_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit
