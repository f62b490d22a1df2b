"""Both copies as kernels: device memory into a slot of host memory, and a slot into device memory.

`assembly` explains why a reader of the signal sees the payload. A slot is read by `relaxed.sys`
loads, which no cache answers with the slot's previous message.

A kernel never waits: it would occupy multiprocessors and the stream, and an op that it waits for
may be queued behind it. So the host waits for a slot's signal before it launches the copy.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.pallas_kernels.assembly import (
    Access,
    block,
    copy,
    last_arriver,
    load_control,
    release_number,
)
from jaxmorph.pallas_kernels.control import PAYLOAD_AT, SIGNAL_AT
from jaxmorph.pallas_kernels.mosaic import assembled_kernel
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, CopyTuning, Tiling, tile

# A payload that leaves is read once, so it takes no place in the first-level cache.
_OUT = Access(load="ld.global.L1::no_allocate", store="st.global")
_IN = Access(load="ld.relaxed.sys.global", store="st.global")
_TICKET = jax.ShapeDtypeStruct((1,), jnp.uint32)


def copy_to_host(
    payload: jax.Array,
    control: jax.Array,
    arrivals: jax.Array,
    *,
    tuning: CopyTuning = TO_HOST,
) -> jax.Array:
    """Copy an array into a free slot, then signal that it is complete.

    A reader that sees the signal's number sees the whole payload. Call it inside `jax.jit` on one
    CUDA device, in its own program, so that no other computation in the program delays the copy.

    Args:
        payload: Elements of whole bytes, at least one, and no more than the slot holds.
        control: uint32 [5], from `pack`, with the GPU's addresses. Use another for each call: XLA
            may merge two calls with equal operands.
        arrivals: uint32 [1], from `new_arrivals`.

    Returns:
        A ticket, uint32 [1]: the control's number. Return it from the program (XLA drops a kernel
        that no result depends on), and keep it and the payload until it is ready.

    Raises:
        ImportError: If JAX has no Mosaic GPU backend here.
    """
    tiling = tile(payload.size * payload.dtype.itemsize, tuning)
    kernel = assembled_kernel("copy_to_host", to_host_assembly(tiling), [_TICKET], tiling)
    return kernel(payload.reshape(-1), control, arrivals)[0]


def to_host_assembly(tiling: Tiling) -> str:
    """The kernel in PTX; operands: payload, control, arrivals, ticket."""
    payload, control, arrivals, ticket = "$0", "$1", "$2", "$3"
    lines = [
        *load_control(control, [("%slot", PAYLOAD_AT), ("%signal", SIGNAL_AT)]),
        *copy(tiling, payload, "%slot", _OUT),
        *last_arriver(
            arrivals,
            tiling.ctas,
            [*release_number("%signal"), f"st.global.u32 [{ticket}], %number;"],
        ),
    ]
    return block(lines, tiling.loads)


def copy_from_host(
    control: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    tuning: CopyTuning = FROM_HOST,
) -> tuple[jax.Array, jax.Array]:
    """Copy a slot's payload, whose signal the host has seen, into a new array.

    Call it inside `jax.jit` on one CUDA device, in a program of its own.

    Args:
        control: uint32 [5], from `pack`, with the GPU's addresses. Use another for each call: XLA
            may merge two calls with equal operands.
        shape: At least one element, and no more than the slot holds.
        dtype: Elements of whole bytes.

    Returns:
        The payload, and a ticket, uint32 [1]: the control's number. The slot may be reused once the
        ticket is ready; wait for it, not for the payload, which another program may take over.

    Raises:
        ImportError: If JAX has no Mosaic GPU backend here.
    """
    flat = jax.ShapeDtypeStruct((math.prod(shape),), dtype)
    tiling = tile(flat.size * flat.dtype.itemsize, tuning)
    outputs = [flat, _TICKET]
    kernel = assembled_kernel("copy_from_host", from_host_assembly(tiling), outputs, tiling)
    copied, ticket = kernel(control)
    return copied.reshape(shape), ticket


def from_host_assembly(tiling: Tiling) -> str:
    """The kernel in PTX; operands: control, payload, ticket."""
    control, payload, ticket = "$0", "$1", "$2"
    lines = [
        *load_control(control, [("%slot", PAYLOAD_AT)]),
        *copy(tiling, "%slot", payload, _IN),
        "setp.eq.u32 %is, %thread, 0;",
        f"@%is st.global.u32 [{ticket}], %number;",
    ]
    return block(lines, tiling.loads)
