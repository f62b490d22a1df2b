"""The few CUDA driver calls that copies beside JAX's own streams need.

A device can only access slots whose memory is registered with the driver: `RegisteredMemory`.

Importing this module loads no library; `CudaDriver.open` does, and reports what is missing. It was
written from the driver's documentation, and is tested with a fake library.
"""

import ctypes
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from jaxmorph.transport.plane import OutgoingSlot

_log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"

_NOT_READY = 600
_PORTABLE, _DEVICE_MAP = 1, 2  # usable in every context, and mapped for devices
_NON_BLOCKING = 1  # doesn't synchronise with the legacy default stream
_SLEEPING, _NO_TIMING = 1, 2  # waiting for an event blocks instead of spinning
_DEFAULT = 0


class CudaError(RuntimeError):
    """A driver call has failed, or is missing.

    Attributes:
        code: The CUresult; None if the call is missing.
    """

    def __init__(self, call: str, code: int | None, reason: str) -> None:
        super().__init__(f"{call}: {reason}" if code is None else f"{call} gave {code} ({reason})")
        self.call, self.code = call, code


class CudaDriver:
    """The driver, in JAX's own context of one device; usable from any thread.

    Args:
        library: libcuda, as loaded by `ctypes.CDLL`.
        ordinal: The device's number, as JAX's `local_hardware_id`.

    Raises:
        CudaError: If the driver, the device or its context is unavailable.
    """

    def __init__(self, library: Any, ordinal: int) -> None:
        self._library = library
        self._context, self._device = c_void_p(), c_int()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(self._device), c_int(ordinal))
        # JAX computes in the primary context, too, so both see each other's mappings and work.
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)

    @classmethod
    def open(cls, ordinal: int) -> "CudaDriver":
        """The driver of this machine.

        Raises:
            CudaError: If there is none, or it can't be used.
        """
        try:
            loaded = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(f"loading {LIBRARY}", None, str(error)) from error
        return cls(loaded, ordinal)

    def version(self) -> str:
        """The newest CUDA version that the driver supports, such as "13.0"."""
        found = c_int()
        self._call("cuDriverGetVersion", byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"

    def register(self, address: int, num_bytes: int) -> int:
        """Register memory of this process with the device.

        Args:
            address: Page-aligned.
            num_bytes: Whole pages.

        Returns:
            The memory's address on the device.
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
        """Unregister memory; the device must not be using it."""
        self._bind()
        self._call("cuMemHostUnregister", c_void_p(address))

    def create_stream(self) -> int:
        """A new stream beside JAX's."""
        return self._created("cuStreamCreate", _NON_BLOCKING)

    def wait_for_stream(self, stream: int) -> None:
        """Wait for everything enqueued on a stream so far."""
        self._bind()
        self._call("cuStreamSynchronize", c_void_p(stream))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream after everything enqueued on it."""
        self.wait_for_stream(stream)
        self._call("cuStreamDestroy_v2", c_void_p(stream))

    def copy_to_host(self, address: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from the device.

        Args:
            address: The target, in registered memory of this process.
            source: An address on the device.
        """
        self._bind()
        sizes = (c_uint64(source), c_size_t(num_bytes))
        self._call("cuMemcpyDtoHAsync_v2", c_void_p(address), *sizes, c_void_p(stream))

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Enqueue the write of a 32-bit word, visible after all earlier writes of the stream.

        Args:
            address: The device's address of the word.
        """
        self._bind()
        word = (c_uint64(address), c_uint32(value), c_uint(_DEFAULT))
        self._call("cuStreamWriteValue32_v2", c_void_p(stream), *word)

    def create_event(self) -> int:
        """A new event."""
        return self._created("cuEventCreate", _SLEEPING | _NO_TIMING)

    def record(self, event: int, stream: int) -> None:
        """Record an event after everything enqueued on a stream so far."""
        self._bind()
        self._call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def has_happened(self, event: int) -> bool:
        """Whether everything before the recorded event has finished."""
        self._bind()
        code = self._function("cuEventQuery")(c_void_p(event))
        if code not in (0, _NOT_READY):
            self._fail("cuEventQuery", code)
        return code == 0

    def wait_for(self, event: int) -> None:
        """Wait for an event."""
        self._bind()
        self._call("cuEventSynchronize", c_void_p(event))

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        self._bind()
        self._call("cuEventDestroy_v2", c_void_p(event))

    def close(self) -> None:
        """Release the context; JAX keeps its own reference."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _bind(self) -> None:
        """Make the context current in this thread.

        Called before every call: each thread has its own, and JAX may leave another device's set.
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
        self._library.cuGetErrorName(c_int(code), byref(name))
        return (name.value or b"no name").decode()


class _Region(NamedTuple):
    start: int
    num_bytes: int
    device_start: int


class RegisteredMemory:
    """Registers a data plane's slots with the driver; a `transport.plane.MemoryRegistry`.

    Registering takes about as long as writing all of the memory. So a thread registers a new plan's
    slots, beside the steps. Until it is done, copies use another backend, as for memory that
    could not be registered.

    Attributes:
        error: Why some memory could not be registered, if any. Copies that need it use another
            backend from then on.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.error: CudaError | None = None
        self._driver = driver
        self._regions: list[_Region] = []  # sorted by start; replaced as a whole, for readers
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False

    def add(self, address: int, num_bytes: int) -> None:
        """Register memory; logs a warning at the first failure after a success."""
        if self._is_closed:
            return
        try:
            region = _Region(address, num_bytes, self._driver.register(address, num_bytes))
        except CudaError as error:
            if self.error is None and self._regions:  # with none, the opener reports it
                _log.warning("the device can't use slots of %s bytes: %s", num_bytes, error)
            self.error = self.error or error
            return
        with self._lock:
            self._regions = sorted([*self._regions, region])

    def replace(self, old: int, free: Callable[[], None], address: int, num_bytes: int) -> None:
        """Unregister and free the old memory, then register the new, in the thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-registration")
        self._thread.submit(self._replace, old, free, address, num_bytes)

    def _replace(self, old: int, free: Callable[[], None], address: int, num_bytes: int) -> None:
        self._unregister(old)
        free()
        self.add(address, num_bytes)

    def remove(self, address: int) -> None:
        """Unregister memory that is about to be freed, once the thread is done."""
        self.settle()
        self._unregister(address)

    def settle(self) -> None:
        """Wait until all memory is registered."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _unregister(self, address: int) -> None:
        with self._lock:
            left = [region for region in self._regions if region.start != address]
            was_known, self._regions = len(left) < len(self._regions), left
        if not was_known:
            return
        try:
            self._driver.unregister(address)
        except CudaError as error:  # the memory is freed all the same
            _log.warning("slots could not be unregistered: %s", error)

    def close(self) -> None:
        """Unregister everything, after the last copy; later additions are ignored."""
        self._is_closed = True
        self.settle()
        for region in self._regions:
            self._unregister(region.start)

    def device_address(self, address: int) -> int | None:
        """The device's address for an address in this process; None if it isn't registered."""
        regions = self._regions
        index = bisect_right(regions, (address, float("inf"))) - 1
        if index < 0:
            return None
        region = regions[index]
        offset = address - region.start
        return region.device_start + offset if offset < region.num_bytes else None


def signal_on_device(memory: RegisteredMemory, slot: OutgoingSlot, num_bytes: int) -> int:
    """The device's address of a slot's signal; the sidecar polls the signal from now on.

    Raises:
        ValueError: If the message is longer than the slot, or the signal isn't registered.
    """
    if num_bytes > len(slot.payload):
        raise ValueError(f"{num_bytes} bytes, expected at most {len(slot.payload)}")
    address = memory.device_address(slot.signal_address())
    if address is None:
        raise ValueError(f"the signal of message {slot.sequence} is not in registered memory")
    return address
