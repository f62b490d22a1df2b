"""Fakes of a GPU: driver, kernels, later programs, slots, and a queue whose items fail."""

import ctypes
import math
import threading
import time
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from jaxmorph.copies.choosing import CopyBackends, StageCopies
from jaxmorph.copies.copy_engine import CopyEngineSend
from jaxmorph.copies.cuda_driver import CudaDriver, RegisteredMemory
from jaxmorph.copies.dlpack_memory import CPU, view_on_device
from jaxmorph.copies.host_memory import HostReceive, PinnedHostSend
from jaxmorph.copies.registered_receive import RegisteredReceive
from jaxmorph.pallas_kernels.control import SlotControl

WORD = jax.ShapeDtypeStruct((1,), jnp.uint32)
AWAY = 1 << 44  # from an address here to the device's address of the same memory
NOT_READY = 600
LIMIT_S = 20.0


class FakeLibrary:
    """A fake libcuda that records its calls and copies on the host.

    Streams run their work at once, or, while `held`, when `run` is called.

    Args:
        held: Whether streams wait for `run`.
        missing: Functions that the library lacks.
        failing: Error codes of functions that fail.
    """

    def __init__(self, *, held=False, missing=(), failing=None):
        self.held, self.missing, self.failing = held, set(missing), dict(failing or {})
        self.calls = []
        self.current = {}  # each thread's context
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
        """Run the streams' work, in the order in which it was enqueued."""
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

    def _cuDeviceGet(self, device, number, /):  # noqa: N802
        device._obj.value = number.value

    def _cuDevicePrimaryCtxRetain(self, context, device, /):  # noqa: N802
        context._obj.value = 1 + device.value

    def _cuCtxSetCurrent(self, context, /):  # noqa: N802
        self.current[threading.get_ident()] = context.value

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
            for start, length in list(self.registered.items())  # a thread may add some
        )


class FakeKernels:
    """Callbacks in place of the copy kernels, on the device of a `FakeLibrary`.

    They take slots by the device's addresses, and copy into slots on the library's streams.

    Attributes:
        controls: The control of every launch.
        arrivals: Where every launch into a slot counted its arrivals.
        error: What launches raise.
    """

    def __init__(self, library):
        self.library = library
        self.controls, self.arrivals = [], []
        self.error = None

    def copy_to_host(self, payload, control, arrivals):
        num_bytes = payload.size * payload.dtype.itemsize

        def called(_, ticket, payload, control, arrivals):
            counter = np.asarray(arrivals)
            assert counter.tolist() == [0]
            self.arrivals.append(counter.ctypes.data)
            slot = self._launched(control, num_bytes)
            assert payload.shape == (num_bytes,)
            copied = np.asarray(payload).copy()
            self.library.enqueue(lambda: self.copy(copied, slot))
            np.asarray(ticket)[...] = slot.number

        flat = jax.lax.bitcast_convert_type(payload.reshape(-1), jnp.uint8).reshape(-1)
        return buffer_callback(called, WORD, has_side_effect=True)(flat, control, arrivals)

    def copy(self, payload, slot):
        """Fill a slot, and only then give the signal its number."""
        ctypes.memmove(slot.payload_address, payload.ctypes.data, payload.nbytes)
        if slot.signal_address:
            ctypes.c_uint32.from_address(slot.signal_address).value = slot.number

    def copy_from_host(self, control, *, shape, dtype):
        num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize

        def called(_, out, control):
            into, ticket = map(np.asarray, out)
            slot = self._launched(control, num_bytes)
            ctypes.memmove(into.ctypes.data, slot.payload_address, into.nbytes)
            ticket[...] = slot.number

        outputs = (jax.ShapeDtypeStruct((num_bytes,), jnp.uint8), WORD)
        flat, ticket = buffer_callback(called, outputs, has_side_effect=True)(control)
        item_bytes = jnp.dtype(dtype).itemsize
        rows = flat.reshape(-1, item_bytes) if item_bytes > 1 else flat
        return jax.lax.bitcast_convert_type(rows, dtype).reshape(shape), ticket

    def _launched(self, control, num_bytes):
        """The slot's control, with the host's addresses."""
        control = unpack(np.asarray(control))
        self.controls.append(control)
        if self.error is not None:
            raise self.error
        payload, signal = control.payload_address - AWAY, control.signal_address
        self.library.require_registered(payload, num_bytes)
        if signal:
            self.library.require_registered(signal - AWAY, 4)
        return control._replace(payload_address=payload, signal_address=signal and signal - AWAY)


def unpack(words):
    """The inverse of `pack`, with the number below 2**32."""
    low, high, signal_low, signal_high, number = words.tolist()
    return SlotControl(high << 32 | low, number, signal_high << 32 | signal_low)


class LaterDevice:
    """Compiles programs that run when `run_next` is called. (A CPU runs callbacks' at once.)

    Args:
        compiling: Compiles a program that runs at once.
    """

    def __init__(self, compiling):
        self._compiling = compiling
        self._launches = []

    def compiled(self, traced):
        program = self._compiling(traced)

        def launch(*operands):
            self._launches.append(_Launch(lambda: program(*operands)))
            return self._launches[-1].results(traced.out_info)

        return launch

    def run_next(self, error=None):
        """Run the first program that has not run, or have it fail."""
        self._launches.pop(0).run(error)


class _Launch:
    def __init__(self, work):
        self.over, self.error, self.given = threading.Event(), None, None
        self._work = work

    def run(self, error):
        self.error = error
        if error is None:
            self.given = self._work()
        self.over.set()

    def results(self, like):
        if isinstance(like, tuple):
            return tuple(_Result(self, index) for index in range(len(like)))
        return _Result(self)


class _Result:
    """Behaves like an array that is being computed."""

    def __init__(self, launch, index=None):
        self._launch, self._index = launch, index

    def is_ready(self):
        return self._launch.over.is_set()

    def block_until_ready(self):
        assert self._launch.over.wait(LIMIT_S)
        if self._launch.error is not None:
            raise self._launch.error
        return self

    def __array__(self, dtype=None, copy=None):
        self.block_until_ready()
        given = self._launch.given
        return np.asarray(given if self._index is None else given[self._index])


class _Slot:
    """Memory that records its calls."""

    def __init__(self, sequence, num_bytes):
        self.sequence = sequence
        self.payload = np.zeros(num_bytes, np.uint8)
        self.address = self.payload.ctypes.data
        self.signal_address = 0
        self.is_posted = False
        self.said = []

    def post(self, num_bytes, tag):
        self.is_posted = True
        self.said.append(("post", num_bytes, tag, self.payload[:num_bytes].any()))

    def complete(self):
        self.said.append("complete")

    def withdraw(self):
        self.said.append("withdraw")


Slot: Any = _Slot  # where an `OutgoingSlot` is expected


def view_here(value, stream):
    """On a CPU: an array's own address, once it has been computed."""
    assert stream
    return view_on_device(jax.block_until_ready(value), None)


def placed_here(value, placement):
    """A slot's message as an array of its own, as on a device."""
    del placement
    return jnp.array(value, copy=True)


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes."


def out_of_memory():
    """What JAX raises."""
    return jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


class Item:
    """What a queue's item leaves: it ends when the test says so, perhaps with an error."""

    def __init__(self, error=None):
        self.may_end, self.error = threading.Event(), error

    def is_ready(self):
        return self.may_end.is_set()

    def block_until_ready(self):
        self.may_end.wait()
        if self.error is not None:
            raise self.error
        return self


class FakeGpu:
    """A GPU in place of the CPU: what it was asked to copy it copies while `go` is set.

    Plugged into a stage (`open_copies` in place of the product's, `ending` in place of what an op
    leaves), its items hang, fail or end late as the test says; copies behind them wait, too.

    Attributes:
        items: What becomes of ops, by label; all others end at once.
        receive_error: What placing a received message raises.
    """

    def __init__(self):
        self.library = FakeLibrary(held=True)
        self.go = threading.Event()
        self.items = {}
        self.receive_error = None
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over:
            if self.go.wait(0.01):
                self.library.run()
                time.sleep(0.0002)

    def close(self):
        self._over = True
        self.go.set()
        self._thread.join()

    def ending(self, op, done):
        """What the queue waits for after an op."""
        item = self.items.get(op)
        if item is None:
            return done
        self.go.clear()  # copies of its results wait for it
        threading.Thread(target=self._end, args=(item,), daemon=True).start()
        return item

    def _end(self, item):
        item.may_end.wait()
        self.go.set()

    def open_copies(self, placement, report_memory, wanted="auto"):
        """As `choosing.open_copies` on a GPU whose copy engine works."""
        del placement, wanted
        resources = ExitStack()
        driver, pinned = CudaDriver(self.library, 0), PinnedHostSend()
        resources.callback(driver.close)
        resources.callback(pinned.close)
        memory = RegisteredMemory(driver)
        resources.callback(memory.close)
        report_memory(memory)
        outgoing = CopyEngineSend(driver, memory, pinned, view_here)
        incoming = RegisteredReceive(memory, 0, HostReceive(), CPU, self._place)
        resources.callback(outgoing.close)
        resources.callback(incoming.close)
        available = CopyBackends([outgoing], [incoming], memory, resources)
        return StageCopies(outgoing, incoming, available)

    def _place(self, value, placement):
        if self.receive_error is not None:
            raise self.receive_error
        return placed_here(value, placement)
