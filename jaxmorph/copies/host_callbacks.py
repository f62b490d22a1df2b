"""Copies by host callbacks inside compiled programs: they work wherever JAX has such callbacks.

Callbacks never wait: what they would wait for may be dispatched behind them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.control import control_words, signal_of
from jaxmorph.copies.filling import fill, fill_in_place
from jaxmorph.copies.host_memory import is_on_host
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.programs import CopyProgram, CopyTier
from jaxmorph.pallas_kernels import CONTROL_WORDS
from jaxmorph.transport.plane import OutgoingSlot

_TICKET = jax.ShapeDtypeStruct((1,), jnp.uint32)
_CONTROL = jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32)


class HostCallbackTier:
    """A host callback inside a compiled program copies out of the buffer that it is shown.

    Args:
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
        self._open[signal_of(slot)] = (slot, tuple(tag))
        program, control = self._programs[len(part)], control_words(slot)
        if self._is_whole:
            return program(value, control)
        return program(value, np.int32(part.start), control)

    def _copy(self, payload: np.ndarray, control: np.ndarray) -> None:
        low, high, *_, number, _ = control.tolist()
        fill(*self._open.pop(number), high << 32 | low, payload)


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
        self._open[signal_of(slot)] = (slot, tuple(tag), value, part)
        return self._program(value, control_words(slot))

    def _copy(self, first: np.ndarray, control: np.ndarray) -> None:
        del first  # it came with the rest of the payload
        slot, tag, value, part = self._open.pop(int(control[-2]))
        fill_in_place(value, part, slot, tag)


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


def host_callback_tiers() -> list[CopyTier]:
    """The tiers with host callbacks, the cheapest first."""
    return [
        HostCallbackTier("buffer_callback", _embed_buffer_callback),
        IoCallbackTier(),
    ]
