"""The few calls of the CUDA driver by which copies go beside JAX's own streams, and what it knows.

A driver must know the memory of slots before a device copies to it: `RegisteredMemory`.

Importing this loads nothing: `CudaDriver.open` does, and says what is missing. None of it has run
on a GPU yet: it was written from the driver's documentation, and is tested with a library that
stands for the driver's.
"""

import ctypes
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from jaxmorph.transport.plane import OutgoingSlot

_log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"

_NOT_READY = 600
_PORTABLE, _DEVICE_MAP = 1, 2  # every context may use the memory, and devices have addresses of it
_NON_BLOCKING = 1  # a stream that the legacy default stream doesn't wait for, nor it for that
_SLEEPING, _NO_TIMING = 1, 2  # who waits for an event sleeps
_DEFAULT = 0


class CudaError(RuntimeError):
    """A call of the driver has failed, or can't be made.

    Attributes:
        code: What it returned, a CUresult; None where there is no such call.
    """

    def __init__(self, call: str, code: int | None, reason: str) -> None:
        super().__init__(f"{call}: {reason}" if code is None else f"{call} gave {code} ({reason})")
        self.call, self.code = call, code


class CudaDriver:
    """The driver with JAX's own context of one device, for any thread.

    Args:
        library: What `ctypes.CDLL` gives for libcuda.
        ordinal: The device's number, as JAX's `local_hardware_id`.

    Raises:
        CudaError: If the driver, the device or its context isn't to be had.
    """

    def __init__(self, library: Any, ordinal: int) -> None:
        self._library = library
        self._context, self._device = c_void_p(), c_int()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(self._device), c_int(ordinal))
        # JAX computes in the primary context too: what one maps or enqueues the other sees.
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)

    @classmethod
    def open(
        cls, ordinal: int, load: Callable[[str], Any] = ctypes.CDLL, library: str = LIBRARY
    ) -> "CudaDriver":
        """The driver of this machine.

        Args:
            load: Loads a library by its name.

        Raises:
            CudaError: If there is none, or it can't be used.
        """
        try:
            loaded = load(library)
        except OSError as error:
            raise CudaError(f"loading {library}", None, str(error)) from error
        return cls(loaded, ordinal)

    def version(self) -> str:
        """The newest CUDA that the driver knows, such as "13.0"."""
        found = c_int()
        self._call("cuDriverGetVersion", byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"

    def register(self, address: int, num_bytes: int) -> int:
        """Make memory of this process known to the device.

        Args:
            address: Where it begins, on a page.
            num_bytes: How long it is, whole pages.

        Returns:
            Where it begins for the device.
        """
        self._bind()
        flags = c_uint(_PORTABLE | _DEVICE_MAP)
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(num_bytes), flags)
        found = c_uint64()
        try:
            self._call(
                "cuMemHostGetDevicePointer_v2", byref(found), c_void_p(address), c_uint(_DEFAULT)
            )
        except CudaError:
            self.unregister(address)
            raise
        return found.value

    def unregister(self, address: int) -> None:
        """Forget memory that was registered; nothing of the device's may be using it."""
        self._bind()
        self._call("cuMemHostUnregister", c_void_p(address))

    def create_stream(self) -> int:
        """A stream of its own, beside all that JAX has."""
        return self._created("cuStreamCreate", _NON_BLOCKING)

    def wait_for_stream(self, stream: int) -> None:
        """Wait until all is over that stands on a stream now."""
        self._bind()
        self._call("cuStreamSynchronize", c_void_p(stream))

    def destroy_stream(self, stream: int) -> None:
        """Let go of a stream, once all that was enqueued on it is over."""
        self.wait_for_stream(stream)
        self._call("cuStreamDestroy_v2", c_void_p(stream))

    def copy_to_host(self, address: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy.

        Args:
            address: Where to, in registered memory of this process.
            source: Where from, on the device.
        """
        self._bind()
        sizes = (c_uint64(source), c_size_t(num_bytes))
        self._call("cuMemcpyDtoHAsync_v2", c_void_p(address), *sizes, c_void_p(stream))

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Enqueue the writing of 32 bits, seen after all that the stream has written before.

        Args:
            address: Where to, as the device knows it.
        """
        self._bind()
        word = (c_uint64(address), c_uint32(value), c_uint(_DEFAULT))
        self._call("cuStreamWriteValue32_v2", c_void_p(stream), *word)

    def create_event(self) -> int:
        """Something that can be recorded on a stream."""
        return self._created("cuEventCreate", _SLEEPING | _NO_TIMING)

    def record(self, event: int, stream: int) -> None:
        """Have an event happen when all is over that stands on a stream now."""
        self._bind()
        self._call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def has_happened(self, event: int) -> bool:
        """Whether all is over that stood on the stream when the event was recorded."""
        self._bind()
        code = self._function("cuEventQuery")(c_void_p(event))
        if code not in (0, _NOT_READY):
            self._fail("cuEventQuery", code)
        return code == 0

    def wait_for(self, event: int) -> None:
        """Wait until an event has happened."""
        self._bind()
        self._call("cuEventSynchronize", c_void_p(event))

    def destroy_event(self, event: int) -> None:
        """Let go of an event."""
        self._bind()
        self._call("cuEventDestroy_v2", c_void_p(event))

    def close(self) -> None:
        """Let go of the context; JAX holds it all the same."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _bind(self) -> None:
        """Make the context this thread's: every thread has one of its own, or none.

        For every call: with several devices JAX leaves that of any of them behind.
        """
        self._call("cuCtxSetCurrent", self._context)

    def _created(self, call: str, flags: int) -> int:
        self._bind()
        made = c_void_p()
        self._call(call, byref(made), c_uint(flags))
        return made.value or 0

    def _call(self, call: str, *arguments: Any) -> None:
        code = self._function(call)(*arguments)
        if code:
            self._fail(call, code)

    def _function(self, call: str) -> Any:
        try:
            return getattr(self._library, call)
        except AttributeError as error:
            raise CudaError(call, None, f"this {LIBRARY} has no such function") from error

    def _fail(self, call: str, code: int) -> None:
        raise CudaError(call, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        try:
            self._library.cuGetErrorName(c_int(code), byref(name))
        except AttributeError:
            return "no name"
        return (name.value or b"no name").decode()


class _Region(NamedTuple):
    start: int
    num_bytes: int
    device_start: int


class RegisteredMemory:
    """Registers the memory that a data plane tells of; see `transport.plane.MemoryRegistry`.

    Attributes:
        error: Why some memory could not be registered; None as long as all could. Copies that
            need it go another way from then on.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.error: CudaError | None = None
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
            if self.error is None and self._regions:  # of the first, who asks for `trouble` tells
                _log.warning("the device can't use slots of %s bytes: %s", num_bytes, error)
            self.error = self.error or error
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


def signal_on_device(memory: RegisteredMemory, slot: OutgoingSlot, num_bytes: int) -> int:
    """Where the device writes a slot's signal; from now on it is looked for without being rung.

    Raises:
        ValueError: If that is more than the slot holds, or the device doesn't know the signal.
    """
    if num_bytes > len(slot.payload):
        raise ValueError(f"{num_bytes} bytes, expected at most {len(slot.payload)}")
    address = memory.device_address(slot.signal_address)
    if address is None:
        raise ValueError(f"the signal of message {slot.sequence} is not in registered memory")
    return address
