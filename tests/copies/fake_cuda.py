"""A library that stands for libcuda: it notes what it is called with, and copies on the host."""

import ctypes
import threading

AWAY = 1 << 44  # between an address here and the device's of the same memory
NOT_READY = 600
LIMIT_S = 20.0


class FakeLibrary:
    """Streams run what is enqueued at once, or, while `held`, when `run` is called.

    Args:
        held: Whether streams wait for `run`.
        missing: Functions that the library doesn't have.
        failing: What others return.
    """

    def __init__(self, *, held=False, missing=(), failing=None):
        self.held, self.missing, self.failing = held, set(missing), dict(failing or {})
        self.calls = []
        self.current = set()  # threads with a context
        self.registered = {}
        self.happened = {}
        self.lock = threading.RLock()
        self._waiting = []
        self._next_handle = 1

    def __getattr__(self, name):
        if not name.startswith("cu") or name in self.missing:
            raise AttributeError(name)

        def call(*arguments):
            plain = [getattr(each, "value", None) for each in arguments]
            with self.lock:
                self.calls.append((name, *plain))
            if name in self.failing:
                return self.failing[name]
            return getattr(self, f"_{name}", lambda *_: 0)(*arguments) or 0

        return call

    def names(self):
        return [call[0] for call in self.calls]

    def run(self):
        """Run what streams hold, in the order in which it was enqueued."""
        with self.lock:
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def enqueue(self, work):
        if self.held:
            with self.lock:
                self._waiting.append(work)
        else:
            work()

    def _cuDriverGetVersion(self, found, /):  # noqa: N802
        found._obj.value = 13000

    def _cuGetErrorName(self, code, found, /):  # noqa: N802
        found._obj.value = {304: b"CUDA_ERROR_OPERATING_SYSTEM"}.get(code.value, b"CUDA_ERROR")

    def _cuCtxSetCurrent(self, context, /):  # noqa: N802
        self.current.add(threading.get_ident())

    def _cuMemHostRegister_v2(self, address, num_bytes, flags, /):  # noqa: N802
        assert threading.get_ident() in self.current
        assert flags.value == 3
        assert address.value not in self.registered
        self.registered[address.value] = num_bytes.value

    def _cuMemHostUnregister(self, address, /):  # noqa: N802
        del self.registered[address.value]

    def _cuMemHostGetDevicePointer_v2(self, found, address, flags, /):  # noqa: N802
        found._obj.value = address.value + AWAY

    def _cuStreamCreate(self, made, flags, /):  # noqa: N802
        self._make(made)

    def _cuEventCreate(self, made, flags, /):  # noqa: N802
        self._make(made)

    def _make(self, made):
        made._obj.value, self._next_handle = self._next_handle, self._next_handle + 1

    def _cuMemcpyDtoHAsync_v2(self, address, source, num_bytes, stream, /):  # noqa: N802
        self.require_registered(address.value, num_bytes.value)
        self.enqueue(lambda: ctypes.memmove(address.value, source.value, num_bytes.value))

    def _cuMemcpyHtoDAsync_v2(self, address, source, num_bytes, stream, /):  # noqa: N802
        self.require_registered(source.value, num_bytes.value)
        self.enqueue(lambda: ctypes.memmove(address.value, source.value, num_bytes.value))

    def _cuStreamWriteValue32_v2(self, stream, address, value, flags, /):  # noqa: N802
        self.require_registered(address.value - AWAY, 4)
        word = ctypes.c_uint32.from_address(address.value - AWAY)
        self.enqueue(lambda: setattr(word, "value", value.value))

    def _cuEventRecord(self, event, stream, /):  # noqa: N802
        happened = self.happened[event.value] = threading.Event()
        self.enqueue(happened.set)

    def _cuEventQuery(self, event, /):  # noqa: N802
        return 0 if self.happened[event.value].is_set() else NOT_READY

    def _cuEventSynchronize(self, event, /):  # noqa: N802
        assert self.happened[event.value].wait(LIMIT_S)

    def _cuStreamSynchronize(self, stream, /):  # noqa: N802
        self.run()

    def require_registered(self, address, num_bytes):
        assert any(
            start <= address and address + num_bytes <= start + length
            for start, length in self.registered.items()
        )
