"""A slot of host memory into device memory, then the acknowledgement.

Lowered for CUDA by JAX 0.10.2, 0.11.2 and 0.12, assembled for sm_90a and interpreted in tests; it
has never run on a GPU. `assembly` has the argument for the order of the acknowledgement. That of
the payload: a CTA's first thread reads the signal by `ld.acquire.sys`, and the barrier behind it
orders that before the other threads' loads, which are `relaxed.sys` so that none is answered by a
cache that still holds the slot's message before.

A kernel that waits holds multiprocessors and the stream, and what it waits for may need something
that is queued behind it. So the host should wait for the signal first, and the time that a kernel
may wait is for the rest of the way alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.pallas_kernels.assembly import (
    FAILED_AT,
    Access,
    block,
    copy,
    last_arriver,
    tell,
    who_and_what,
)
from jaxmorph.pallas_kernels.checks import check_words, checked_bytes
from jaxmorph.pallas_kernels.control import (
    ACKNOWLEDGEMENT_AT,
    PAYLOAD_AT,
    SIGNAL_AT,
    SPIN_AT,
    not_ready,
)
from jaxmorph.pallas_kernels.mosaic import assembled_kernel
from jaxmorph.pallas_kernels.tiling import Tiling, tile
from jaxmorph.pallas_kernels.tuning import FROM_HOST, CopyTuning

_NAME = "copy_from_host"
_ACCESS = Access(load="ld.relaxed.sys.global", store="st.global")
_NS_PER_US = 1000
_NAP_NS = 100


def copy_from_host(
    control: jax.Array,
    arrivals: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    slot_bytes: int,
    tuning: CopyTuning = FROM_HOST,
) -> tuple[jax.Array, jax.Array]:
    """Copy a slot's payload into a new array and acknowledge that the slot may be used again.

    For use inside `jax.jit` on one CUDA device, in a program of its own. Without a signal's address
    in `control` it copies at once: the host has seen the signal.

    Args:
        control: uint32 [8], from `pack`: where the slot is, by addresses of the GPU, the number to
            wait for, and for how long each CTA may. Another for each call; two calls with equal
            operands may be made one.
        arrivals: uint32 [2], from `new_arrivals`.
        dtype: Of the payload; elements of whole bytes.
        slot_bytes: How long the slot is; no byte is read beyond.

    Returns:
        The payload, and a status, uint32 [1]: the control's number, or `not_ready` of it, if the
        signal was another when the time was over. Then the payload's contents mean nothing, nothing
        has been acknowledged, and the same call may be made again.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If a shape or length is.
        ImportError: If JAX has no Mosaic GPU backend here.
    """
    check_words(_NAME, control, arrivals)
    num_bytes = checked_bytes(_NAME, shape, dtype, slot_bytes)
    tiling = tile(num_bytes, tuning)
    flat = jax.ShapeDtypeStruct((num_bytes // jnp.dtype(dtype).itemsize,), dtype)
    status = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernel = assembled_kernel(
        _NAME, assembly(tiling), [flat, status], ctas=tiling.ctas, threads=tiling.threads
    )
    copied, answer = kernel(control, arrivals)
    return copied.reshape(shape), answer


def assembly(tiling: Tiling) -> str:
    """The kernel in PTX; operands: control, arrivals, payload, status.

    Args:
        tiling: The payload's length and who copies what of it.
    """
    control, arrivals, payload, status = "$0", "$1", "$2", "$3"
    addresses = [
        ("%slot", PAYLOAD_AT), ("%signal", SIGNAL_AT), ("%acknowledgement", ACKNOWLEDGEMENT_AT),
    ]  # fmt: skip
    lines = [
        *who_and_what(control, addresses),
        f"ld.global.b32 %spin, [{control}+{SPIN_AT}];",
        *_wait(arrivals),
        *copy(tiling, "%slot", payload, _ACCESS),
        "COPIED:",
        *last_arriver(arrivals, tiling.ctas, _answer(arrivals, status)),
    ]
    return block(lines, tiling.loads)


def _wait(arrivals: str) -> list[str]:
    """Each CTA's first thread waits for the signal; all its threads hear whether it has come."""
    return [
        "mov.u32 %late, 0;",
        "setp.ne.u32 %is, %thread, 0;",
        "@%is bra WAITED;",
        "setp.eq.u64 %is, %signal, 0;",
        "@%is bra WAITED;",
        "mov.u64 %start, %globaltimer;",
        f"mul.wide.u32 %limit, %spin, {_NS_PER_US};",
        "LOOK:",
        "ld.acquire.sys.global.u32 %seen, [%signal];",
        "setp.eq.u32 %is, %seen, %number;",
        "@%is bra WAITED;",
        "mov.u64 %now, %globaltimer;",
        "sub.u64 %now, %now, %start;",
        "setp.ge.u64 %is, %now, %limit;",
        "@%is bra LATE;",
        f"nanosleep.u32 {_NAP_NS};",
        "bra LOOK;",
        "LATE:",
        "mov.u32 %late, 1;",
        f"red.relaxed.gpu.global.or.b32 [{arrivals}+{FAILED_AT}], 1;",
        "WAITED:",
        "setp.ne.u32 %is, %late, 0;",
        "barrier.red.or.pred %all, 0, %is;",
        "@%all bra COPIED;",
    ]


def _answer(arrivals: str, status: str) -> list[str]:
    """The last arriver's: no acknowledgement if any CTA gave up, and the mark of that is taken."""
    return [
        f"atom.relaxed.gpu.global.exch.b32 %failed, [{arrivals}+{FAILED_AT}], 0;",
        "sub.u32 %status, %number, %failed;",
        f"st.global.u32 [{status}], %status;",
        "setp.ne.u32 %is, %failed, 0;",
        "@%is bra DONE;",
        *tell("%acknowledgement"),
    ]


def copy_from_host_reference(
    slot: jax.Array, signal: int, number: int, *, shape: tuple[int, ...], dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """What `copy_from_host` returns, in plain `jax.numpy`.

    Args:
        slot: uint8 [slot bytes], what the slot holds.
        signal: What its signal is when the time to wait is over.

    Returns:
        The payload, and the status, uint32 [1].
    """
    element_bytes = jnp.dtype(dtype).itemsize
    size = int(np.prod(shape, dtype=np.int64))
    rows = slot[: size * element_bytes].reshape(size, element_bytes)
    flat = jax.lax.bitcast_convert_type(rows if element_bytes > 1 else rows.reshape(-1), dtype)
    status = np.uint32(number if signal == number else not_ready(number))
    return flat.reshape(shape), jnp.full(1, status)
