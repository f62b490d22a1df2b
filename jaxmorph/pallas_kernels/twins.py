"""Portable twins of the kernels, for Pallas's interpreter on any device.

A twin gets slot and signal as arrays in place of addresses, and its CTAs run one after another. All
else is the kernel's: which CTA copies which bytes, the count of arrivals, who signals or
acknowledges, and when not. It shows the tiling and the protocol, not the kernel's instructions,
its speed or its order in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.pallas_kernels.checks import ARRIVAL_WORDS, check_words, checked_bytes
from jaxmorph.pallas_kernels.control import NUMBER_AT
from jaxmorph.pallas_kernels.tiling import Tiling, tile
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, VECTOR_BYTES, CopyTuning

_NUMBER = NUMBER_AT // 4
_FAILED = 1  # of the arrivals
_WORD = jax.ShapeDtypeStruct((1,), jnp.uint32)
_ARRIVALS = jax.ShapeDtypeStruct((ARRIVAL_WORDS,), jnp.uint32)


def copy_to_host_twin(
    payload: jax.Array,
    control: jax.Array,
    arrivals: jax.Array,
    *,
    slot_bytes: int,
    tuning: CopyTuning = TO_HOST,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What `copy_to_host` writes.

    Args:
        payload: Any shape and dtype of whole bytes.
        control: uint32 [8]; only the number counts.
        arrivals: uint32 [2].
        slot_bytes: How long the slot is.

    Returns:
        The slot's first bytes, uint8 [payload bytes]; the signal and the ticket, uint32 [1] each;
        the arrivals.

    Raises:
        TypeError: As `copy_to_host`.
        ValueError: As `copy_to_host`.
    """
    where = "copy_to_host_twin"
    check_words(where, control, arrivals)
    tiling = tile(checked_bytes(where, payload.shape, payload.dtype, slot_bytes), tuning)

    def body(source: Any, control: Any, _: Any, slot: Any, signal: Any, ticket: Any, arrivals: Any):
        def last() -> None:
            signal[0] = control[_NUMBER]
            ticket[0] = control[_NUMBER]

        _copy(tiling, _cta(), source, slot)
        _arrive(tiling, arrivals, last)

    slot = jax.ShapeDtypeStruct((tiling.num_bytes,), jnp.uint8)
    interpreted = _interpreted(body, tiling, [slot, _WORD, _WORD, _ARRIVALS], {2: 3})
    source = jax.lax.bitcast_convert_type(payload.reshape(-1), jnp.uint8).reshape(-1)
    return interpreted(source, control, arrivals)


def copy_from_host_twin(
    slot: jax.Array,
    signal: jax.Array,
    control: jax.Array,
    arrivals: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    tuning: CopyTuning = FROM_HOST,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What `copy_from_host` returns and writes, if the signal stays as it is.

    Args:
        slot: uint8 [slot bytes].
        signal: uint32 [ctas]: what each CTA sees when the time to wait is over.
        control: uint32 [8]; only the number counts.
        arrivals: uint32 [2].
        dtype: Of the payload; elements of whole bytes.

    Returns:
        The payload; the status and the acknowledgement, uint32 [1] each, the latter 0 where there
        is none; the arrivals.

    Raises:
        TypeError: As `copy_from_host`.
        ValueError: As `copy_from_host`.
    """
    where = "copy_from_host_twin"
    check_words(where, control, arrivals)
    tiling = tile(checked_bytes(where, shape, dtype, slot.size), tuning)

    def body(
        slot: Any, signal: Any, control: Any, _: Any,
        payload: Any, status: Any, acknowledgement: Any, arrivals: Any,
    ):  # fmt: skip
        cta, number = _cta(), control[_NUMBER]
        seen = signal[cta]

        def last() -> None:
            failed = arrivals[_FAILED]
            arrivals[_FAILED] = np.uint32(0)
            status[0] = number - failed
            acknowledgement[0] = jnp.where(failed == 0, number, np.uint32(0))

        arrivals[_FAILED] = arrivals[_FAILED] | (seen != number).astype(jnp.uint32)
        _when(seen == number, lambda: _copy(tiling, cta, slot, payload))
        _arrive(tiling, arrivals, last)

    flat = jax.ShapeDtypeStruct((tiling.num_bytes,), jnp.uint8)
    interpreted = _interpreted(body, tiling, [flat, _WORD, _WORD, _ARRIVALS], {3: 3})
    copied, *words = interpreted(slot, signal, control, arrivals)
    return (_as_array(copied, shape, dtype), *words)


def _interpreted(
    body: Callable[..., None],
    tiling: Tiling,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
) -> Callable[..., Any]:
    from jax.experimental import pallas as pl

    return pl.pallas_call(
        body,
        out_shape=tuple(outputs),
        grid=(tiling.ctas,),
        input_output_aliases=dict(aliases),
        interpret=True,
    )


def _cta() -> jax.Array:
    from jax.experimental import pallas as pl

    return pl.program_id(0)


def _when(condition: jax.Array, do: Callable[[], None]) -> None:
    from jax.experimental import pallas as pl

    pl.when(condition)(do)


def _copy(tiling: Tiling, cta: jax.Array, source: Any, target: Any) -> None:
    """A CTA's part of the bytes: tiles, single vectors by rows, and the tail."""
    _copy_pieces(source, target, 0, tiling.tile_bytes, cta, tiling.num_tiles, tiling.ctas)
    rows, rest = divmod(tiling.num_vectors, tiling.threads)
    _copy_pieces(source, target, tiling.vectors_at, tiling.row_bytes, cta, rows, tiling.ctas)
    rest_at = tiling.vectors_at + rows * tiling.row_bytes
    if rest:
        _when(cta == rows % tiling.ctas, _copying(source, target, rest_at, rest * VECTOR_BYTES))
    if tiling.tail_bytes:
        _when(cta == 0, _copying(source, target, tiling.tail_at, tiling.tail_bytes))


def _copy_pieces(
    source: Any, target: Any, at: int, length: int, first: Any, end: int, step: int
) -> None:
    def piece(turn: jax.Array, _: None) -> None:
        _copying(source, target, at + (first + turn * step) * length, length)()

    if not end:  # one piece may be longer than the payload
        return
    # Pieces first, first + step, ... below end.
    turns = jnp.maximum(0, (end - first + step - 1) // step)
    jax.lax.fori_loop(0, turns, piece, None)


def _copying(source: Any, target: Any, at: Any, length: int) -> Callable[[], None]:
    from jax.experimental import pallas as pl

    def do() -> None:
        target[pl.ds(at, length)] = source[pl.ds(at, length)]

    return do


def _arrive(tiling: Tiling, arrivals: Any, last: Callable[[], None]) -> None:
    before = arrivals[0]
    is_last = before == tiling.ctas - 1
    arrivals[0] = jnp.where(is_last, np.uint32(0), before + 1)
    _when(is_last, last)


def _as_array(flat: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    element_bytes = jnp.dtype(dtype).itemsize
    rows = flat.reshape(-1, element_bytes) if element_bytes > 1 else flat
    return jax.lax.bitcast_convert_type(rows, dtype).reshape(shape)
