"""How a payload gets from a stage's device into a slot: compiled programs, in several tiers.

A tier is chosen once, when a rank starts, by trying it. Every tier gets the same eight words of
control: where the payload goes, where the signal and the acknowledgement are, the number that the
signal takes, and for how long a kernel may spin. Callbacks never wait: what they would wait for
may be dispatched behind them. On CPUs a payload that is computed already is copied by no program.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.pallas_kernels import CONTROL_WORDS, SlotControl, pack, unpack
from jaxmorph.runtime.host_memory import is_on_host
from jaxmorph.runtime.links import PayloadShape
from jaxmorph.runtime.payloads import SlotUse
from jaxmorph.transport.plane import OutgoingSlot

_WORD = 0xFFFFFFFF
_TICKET = jax.ShapeDtypeStruct((1,), jnp.uint32)
_CONTROL = jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32)
_log = logging.getLogger(__name__)


class CopyProgram(Protocol):
    """Copies payloads of one shape into slots."""

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> jax.Array:
        """Dispatch one copy, or make it on the caller's thread; waits for no other work.

        Args:
            value: The payload.
            part: Which of its elements, as a flat array.
            slot: Where to; it is posted and completed when they are all there.
            tag: What the message is posted with.

        Returns:
            A ticket: ready when the copy is over, an error where it failed. Value and ticket must
            be kept until then, and the value must not be donated.

        Raises:
            Exception: Where a copy that is made here fails.
        """
        ...


class CopyTier(Protocol):
    """One way to make copy programs."""

    name: str

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        ...


def control_words(slot: OutgoingSlot, signal_address: int = 0, spin_us: int = 0) -> np.ndarray:
    """What a copy program is told of a slot.

    Args:
        slot: Where the payload goes.
        signal_address: The slot's, for a tier that writes the signal itself.
        spin_us: For how long a kernel may wait for anything, microseconds.

    Returns:
        uint32 [8], as `jaxmorph.pallas_kernels.control` lays them out.
    """
    number = _signal_of(slot)
    return pack(SlotControl(slot.address, number, signal_address, spin_us=spin_us))


def _signal_of(slot: OutgoingSlot) -> int:
    return slot.sequence + 1 & _WORD


class HostCallbackTier:
    """A host callback inside a compiled program copies out of the buffer that it is shown.

    Args:
        name: Of the callback.
        embed: Makes a traceable function of a callback that is given arrays and returns nothing.
    """

    def __init__(self, name: str, embed: Callable[[Callable[..., None]], Any]) -> None:
        self.name = name
        self._embed = embed

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        return _HostCallbackProgram(self._embed, use, placement)


class _HostCallbackProgram:
    """One callback for all messages of a channel: it finds the slot by the signal's number."""

    def __init__(
        self, embed: Callable[[Callable[..., None]], Any], use: SlotUse, placement: Sharding
    ) -> None:
        self._open: dict[int, tuple[OutgoingSlot, tuple[int, ...]]] = {}
        self._is_whole = len(use.parts) == 1
        call = embed(self._copy)
        payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
        first = jax.ShapeDtypeStruct((), jnp.int32)
        self._programs: dict[int, jax.stages.Compiled] = {}
        for length in {len(part) for part in use.parts}:
            copy = call if self._is_whole else _of_part(call, length)
            shapes = (payload, _CONTROL) if self._is_whole else (payload, first, _CONTROL)
            self._programs[length] = jax.jit(copy).lower(*shapes).compile()

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> jax.Array:
        """Dispatch one copy; see `CopyProgram`."""
        self._open[_signal_of(slot)] = (slot, tuple(tag))
        program, control = self._programs[len(part)], control_words(slot)
        if self._is_whole:
            return program(value, control)
        return program(value, np.int32(part.start), control)

    def _copy(self, payload: np.ndarray, control: np.ndarray) -> None:
        told = unpack(control)
        _fill(*self._open.pop(told.number), told.payload_address, payload)


def is_ready(value: jax.Array) -> bool:
    """Whether an array has been computed, or has failed to be."""
    return value.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def _fill(slot: OutgoingSlot, tag: tuple[int, ...], address: int, payload: np.ndarray) -> None:
    """Copy a payload to where its slot is, and say so."""
    payload = np.ascontiguousarray(payload)
    if payload.nbytes > len(slot.payload):
        raise ValueError(f"{payload.nbytes} bytes, expected at most {len(slot.payload)}")
    ctypes.memmove(address, payload.ctypes.data, payload.nbytes)
    slot.post(payload.nbytes, tag)
    slot.complete()


def _fill_in_place(value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]) -> None:
    """Fill a slot with part of an array that is in host memory and has been computed."""
    payload = np.asarray(value).reshape(-1)  # the same memory
    _fill(slot, tuple(tag), slot.address, payload[part.start : part.stop])


def _of_part(call: Any, length: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    def copy(value: jax.Array, first: jax.Array, control: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(value.reshape(-1), first, length)
        return call(part, control)

    return copy


class IoCallbackTier:
    """Copies by JAX's `io_callback`, which hands over copies of what the program computed.

    On CPUs, JAX 0.10 fills long ones in another thread of its pool: a callback that looks at one
    waits for that, and for ever if the pool has no other thread. So here a callback hears only
    that the payload has been computed, and reads it where it is.
    """

    name = "io_callback"

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        if is_on_host(placement):
            return _InPlaceProgram(use, placement)
        return _HostCallbackProgram(_embed_io_callback, use, placement)


class _InPlaceProgram:
    """Calls back once a payload has been computed, with little more than the slot's number."""

    def __init__(self, use: SlotUse, placement: Sharding) -> None:
        self._open: dict[int, tuple[OutgoingSlot, tuple[int, ...], jax.Array, range]] = {}
        call = _embed_io_callback(self._copy)

        def told(value: jax.Array, control: jax.Array) -> jax.Array:
            return call(value.reshape(-1)[:1], control)  # short ones are copied at once

        payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
        self._program = jax.jit(told).lower(payload, _CONTROL).compile()

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> jax.Array:
        """Dispatch one copy; see `CopyProgram`."""
        self._open[_signal_of(slot)] = (slot, tuple(tag), value, part)
        return self._program(value, control_words(slot))

    def _copy(self, first: np.ndarray, control: np.ndarray) -> None:
        del first  # it came with the rest of the payload
        slot, tag, value, part = self._open.pop(int(control[-2]))
        _fill_in_place(value, part, slot, tag)


def _embed_buffer_callback(copy: Callable[..., None]) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    def called(context: Any, ticket: Any, payload: Any, control: Any) -> None:
        del context
        words = np.asarray(control)
        copy(np.asarray(payload), words)
        np.asarray(ticket)[...] = words[-2]

    return buffer_callback(called, _TICKET, has_side_effect=True)


def _embed_io_callback(copy: Callable[..., None]) -> Any:
    from jax.experimental import io_callback

    def called(payload: Any, control: Any) -> np.ndarray:
        words = np.asarray(control)
        copy(np.asarray(payload), words)
        return words[-2:-1].copy()

    return lambda payload, control: io_callback(called, _TICKET, payload, control, ordered=False)


class AtOnceTier:
    """Copies what lies computed in host memory without any program, which would cost far more.

    The copy is over, or has failed, when `start` returns.

    Args:
        otherwise: The tier for what is still being computed, and for other memory.
    """

    def __init__(self, otherwise: CopyTier) -> None:
        self.name = otherwise.name
        self._otherwise = otherwise

    def compile(self, use: SlotUse, placement: Sharding) -> CopyProgram:
        """The program for payloads of a shape, compiled for where they are kept."""
        program = self._otherwise.compile(use, placement)
        return _AtOnce(program) if is_on_host(placement) else program


class _AtOnce:
    """Copies at once where it can."""

    def __init__(self, otherwise: CopyProgram) -> None:
        self._otherwise = otherwise

    def start(
        self, value: jax.Array, part: range, slot: OutgoingSlot, tag: Sequence[int]
    ) -> jax.Array:
        """Copy now, or dispatch a copy; see `CopyProgram`."""
        if not is_ready(value):
            return self._otherwise.start(value, part, slot, tag)
        _fill_in_place(value, part, slot, tag)
        return value


def host_callback_tiers() -> list[CopyTier]:
    """The tiers that work wherever JAX has host callbacks, the cheapest first."""
    return [
        HostCallbackTier("buffer_callback", _embed_buffer_callback),
        IoCallbackTier(),
    ]


def choose_tier(placement: Sharding, tiers: Sequence[CopyTier] | None = None) -> CopyTier:
    """The first tier that copies a payload as it should.

    Args:
        placement: Where the stage keeps its arrays.
        tiers: What to try, in this order; None: those with host callbacks.

    Raises:
        RuntimeError: If none works; the message says why.
    """
    failures = []
    for tier in host_callback_tiers() if tiers is None else tiers:
        try:
            _try(tier, placement)
        except Exception as error:  # whatever it is: the next one may do
            failures.append(f"{tier.name}: {error!r}")
            _log.warning("copies by %s don't work here: %r", tier.name, error)
        else:
            return tier
    raise RuntimeError(f"no way to copy into a slot works here: {'; '.join(failures)}")


class _TrialSlot:
    """Memory of this process that stands for a slot."""

    def __init__(self, num_bytes: int) -> None:
        self.sequence = _WORD  # so that the signal's number wraps
        self.payload = np.zeros(num_bytes, np.uint8)
        self.address = self.payload.ctypes.data
        self.signal_address = 0
        self.is_posted = False
        self.said: list[Any] = []

    def post(self, num_bytes: int, tag: Sequence[int]) -> None:
        self.is_posted = True
        self.said.append((num_bytes, tuple(tag)))

    def complete(self) -> None:
        self.said.append("complete")


def _try(tier: CopyTier, placement: Sharding) -> None:
    """Copy a small payload in two parts, and look at what came."""
    values = np.arange(1, 1025, dtype=np.float32).reshape(4, 256)
    use = SlotUse(PayloadShape(values.shape, jnp.dtype(jnp.float32)), 1000)
    program, value = tier.compile(use, placement), jax.device_put(values, placement)
    arrived = []
    for part in use.parts:
        slot = _TrialSlot(use.slot_bytes)
        ticket = np.asarray(program.start(value, part, slot, (len(part),)))
        expected = ([(4 * len(part), (len(part),)), "complete"], [0])
        if (slot.said, ticket.tolist()) != expected:
            raise RuntimeError(f"got {(slot.said, ticket.tolist())}, expected {expected}")
        arrived.append(slot.payload.view(np.float32)[: len(part)])
    if not np.array_equal(np.concatenate(arrived), values.reshape(-1)):
        raise RuntimeError("the bytes that came are not those that were sent")
