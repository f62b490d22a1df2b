"""Copies made on the host: immediately, in callbacks of compiled programs, or via pinned memory.

On CPUs, whose arrays lie in this process's memory, these are the only backends. On GPUs they come
after the backends that need the driver.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.backends import (
    Copy,
    Receive,
    SendBackend,
    SlotUse,
    Ticket,
    cutting,
    is_ready,
    signal_of,
)
from jaxmorph.transport.plane import IncomingSlot, OutgoingSlot

_CACHE_LINE = 64  # the alignment at which JAX takes over memory without a copy
_NUMBER = jax.ShapeDtypeStruct((1,), jnp.uint32)


def is_on_host(placement: Sharding) -> bool:
    """Whether arrays at this placement lie whole in memory that this process reads."""
    first, *others = placement.device_set
    return not others and first.platform == "cpu"


def for_program(values: np.ndarray, placement: Sharding) -> jax.Array | np.ndarray:
    """Host values in the form in which a compiled program takes them.

    The caller must not write to `values` any more. On CPUs the result is `values` itself: passing
    that to a program costs about 40 us, `device_put` and then passing its result 230 us (float32
    [1, 32, 64], JAX 0.10.2).
    """
    return values if is_on_host(placement) else jax.device_put(values, placement)


def fill(slot: OutgoingSlot, tag: Sequence[int], payload: np.ndarray) -> None:
    """Copy a payload into its slot, then post and complete the message.

    Raises:
        ValueError: If the payload is longer than the slot.
    """
    payload = np.ascontiguousarray(payload)
    if payload.nbytes > len(slot.payload):
        raise ValueError(f"{payload.nbytes} bytes, expected at most {len(slot.payload)}")
    ctypes.memmove(slot.address, payload.ctypes.data, payload.nbytes)
    slot.post(payload.nbytes, tag)
    slot.complete()


def fill_in_place(value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]) -> None:
    """Fill a slot with part of a computed array in host memory."""
    payload = np.asarray(value).reshape(-1)  # the same memory
    fill(slot, tag, payload[part.start : part.stop])


class ImmediateSend:
    """Copies computed payloads in host memory within the call: a program would cost more.

    Args:
        otherwise: Copies payloads that are still being computed or lie in other memory.
    """

    def __init__(self, otherwise: SendBackend) -> None:
        self.name = otherwise.name
        self._otherwise = otherwise

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape and placement."""
        copy = self._otherwise.compile(use, placement)
        return partial(_copy_if_ready, copy) if is_on_host(placement) else copy


def _copy_if_ready(
    otherwise: Copy, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
) -> Ticket | jax.Array:
    if not is_ready(value):
        return otherwise(value, part, slot, tag)
    fill_in_place(value, part, slot, tag)
    return value


class HostCallbackSend:
    """Copies in a host callback of a compiled program.

    Callbacks never wait: what they waited for might be dispatched after them.

    Args:
        embed: Makes a traceable function of a callback that takes an array and a number.
    """

    def __init__(self, name: str, embed: Callable[[Callable[..., None]], Any]) -> None:
        self.name, self._embed = name, embed

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape and placement."""
        return _CallbackProgram(self._embed, use, placement).start


class _CallbackProgram:
    """One callback for all messages of a channel; the signal's number identifies the slot."""

    def __init__(
        self, embed: Callable[[Callable[..., None]], Any], use: SlotUse, placement: Sharding
    ) -> None:
        self._open: dict[int, tuple[OutgoingSlot, Sequence[int], jax.Array, range]] = {}
        # On CPUs the callback gets only the first element, as a sign that the payload has been
        # computed, and reads the payload in place. JAX 0.10 hands long arrays to `io_callback` as
        # copies that another thread of its pool fills: a callback that reads one waits for that
        # thread, forever if the pool has no other. Short arrays are copied at once.
        self._is_in_place = is_on_host(placement)
        call = embed(self._copy)
        payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
        shapes = (payload, jax.ShapeDtypeStruct((), jnp.int32), _NUMBER)
        lengths = {1 if self._is_in_place else len(part) for part in use.parts}
        self._programs: dict[int, jax.stages.Compiled] = {}
        for length in lengths:
            copy = _of_part(call, use, length)
            self._programs[length] = jax.jit(copy).lower(*shapes).compile()

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> jax.Array:
        """Dispatch one copy; see `Copy`."""
        number = signal_of(slot)
        self._open[number] = (slot, tag, value, part)
        program = self._programs[1 if self._is_in_place else len(part)]
        return program(value, np.int32(part.start), np.array([number], np.uint32))

    def _copy(self, payload: np.ndarray, number: int) -> None:
        slot, tag, value, part = self._open.pop(number)
        if self._is_in_place:
            fill_in_place(value, part, slot, tag)
        else:
            fill(slot, tag, payload)


def _of_part(call: Any, use: SlotUse, length: int) -> Callable[..., jax.Array]:
    if length == use.num_elements:
        return lambda value, first, number: call(value, number)
    cut = cutting(use, length)
    return lambda value, first, number: call(cut(value, first), number)


def _embed_buffer_callback(copy: Callable[..., None]) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    def called(context: Any, ticket: Any, payload: Any, number: Any) -> None:
        del context
        copy(np.asarray(payload), int(np.asarray(number)[0]))
        np.asarray(ticket)[...] = np.asarray(number)

    return buffer_callback(called, _NUMBER, has_side_effect=True)


def _embed_io_callback(copy: Callable[..., None]) -> Any:
    from jax.experimental import io_callback

    def called(payload: Any, number: Any) -> np.ndarray:
        copy(np.asarray(payload), int(np.asarray(number)[0]))
        return np.array(number)

    return lambda payload, number: io_callback(called, _NUMBER, payload, number, ordered=False)


def host_callback_backends() -> list[SendBackend]:
    """The backends with host callbacks, the cheapest first."""
    return [
        HostCallbackSend("buffer_callback", _embed_buffer_callback),
        HostCallbackSend("io_callback", _embed_io_callback),
    ]


class PinnedHostSend:
    """Copies through JAX's pinned memory: one copy more, but no driver calls of our own.

    JAX copies a payload to `pinned_host` memory beside the device's computation, and one thread
    for all channels copies it from there into its slot.
    """

    name = "pinned_host"

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slot-copies")

    def compile(self, use: SlotUse, placement: Sharding) -> Copy:
        """The copy function for payloads of one shape and placement."""
        return _PinnedHostCopies(self._thread, use, placement, self.name).start

    def close(self) -> None:
        """End the thread after the last copy."""
        self._thread.shutdown()


class _PinnedHostCopies:
    """Parts are cut out on the device, so JAX's pinned memory never holds a long payload whole."""

    def __init__(
        self, thread: ThreadPoolExecutor, use: SlotUse, placement: Sharding, kind: str
    ) -> None:
        self._thread, self._pinned = thread, placement.with_memory_kind(kind)
        payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
        first = jax.ShapeDtypeStruct((), jnp.int32)
        self._cuts: dict[int, jax.stages.Compiled] = {
            length: jax.jit(cutting(use, length)).lower(payload, first).compile()
            for length in {len(part) for part in use.parts} - {use.num_elements}
        }

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> "FutureTicket":
        """Begin one copy; see `Copy`."""
        cut = self._cuts.get(len(part))
        own = value if cut is None else cut(value, np.int32(part.start))
        pinned = jax.device_put(own, self._pinned)
        return FutureTicket(self._thread.submit(_fill_from, pinned, slot, tag))


def _fill_from(value: jax.Array, slot: OutgoingSlot, tag: Sequence[int]) -> None:
    fill(slot, tag, np.asarray(value))


class FutureTicket:
    """The ticket of a copy that a thread makes."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_ready(self) -> bool:
        """Whether the copy has finished or failed."""
        return self._future.done()

    def block_until_ready(self) -> "FutureTicket":
        """Wait for the copy; raises its error if it failed."""
        self._future.result()
        return self


class HostReceive:
    """Assembles messages in host memory; works on every device."""

    name = "host"

    def compile(self, use: SlotUse, placement: Sharding) -> Receive:
        """The receive function for payloads of one shape, delivered to a placement."""
        return partial(_HostArrival, use, placement)

    def settle(self) -> None:
        """Nothing to wait for: each slot is released as soon as it has been copied."""


class _HostArrival:
    """A message in memory of its own: no array may share memory with a slot."""

    def __init__(self, use: SlotUse, placement: Sharding) -> None:
        self._shape, self._placement = use.payload.shape, placement
        self._whole = _aligned(use)

    def add(self, part: range, slot: IncomingSlot) -> None:
        """Copy a part to its place and release its slot."""
        self._whole[part.start : part.stop].view(np.uint8)[:] = slot.payload
        slot.release()

    def value(self) -> jax.Array | np.ndarray:
        """The payload, in the form a program takes."""
        return for_program(self._whole.reshape(self._shape), self._placement)


def _aligned(use: SlotUse) -> np.ndarray:
    """New flat memory for a payload, aligned so that JAX takes it over without a copy."""
    dtype, num_bytes = use.payload.dtype, use.num_elements * use.payload.dtype.itemsize
    memory = np.empty(num_bytes + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + num_bytes].view(dtype)
