"""Both copies as kernels: device memory into a slot of host memory, and a slot into device memory.

Lowered for CUDA by JAX 0.10.2, 0.11.2 and 0.12, assembled for sm_90a and interpreted in tests; they
have never run on a GPU. `assembly` has the argument for the order of signal and acknowledgement.
That of a payload that comes: a CTA's first thread reads the signal by `ld.acquire.sys`, and the
barrier behind it orders that before the other threads' loads, which are `relaxed.sys` so that none
is answered by a cache that still holds the slot's message before.

A kernel that waits holds multiprocessors and the stream, and what it waits for may need something
that is queued behind it. So the host should wait for the signal first, and the time that a kernel
may wait is for the rest of the way alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.pallas_kernels.assembly import (
    FAILED_AT,
    Access,
    block,
    copy,
    last_arriver,
    tell,
    who_and_what,
)
from jaxmorph.pallas_kernels.control import (
    ACKNOWLEDGEMENT_AT,
    PAYLOAD_AT,
    SIGNAL_AT,
    SPIN_AT,
    check_words,
    checked_bytes,
)
from jaxmorph.pallas_kernels.mosaic import assembled_kernel
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, CopyTuning, Tiling, tile

# A payload that leaves is read once, so it takes no place in the first cache.
_OUT = Access(load="ld.global.L1::no_allocate", store="st.global")
_IN = Access(load="ld.relaxed.sys.global", store="st.global")
_NS_PER_US = 1000
_NAP_NS = 100


def copy_to_host(
    payload: jax.Array,
    control: jax.Array,
    arrivals: jax.Array,
    *,
    slot_bytes: int,
    tuning: CopyTuning = TO_HOST,
) -> jax.Array:
    """Copy an array into a slot and signal that all of it is there.

    Whoever sees the signal's number sees the whole payload. Nothing is waited for: the slot must be
    free. For use inside `jax.jit` on one CUDA device, in a program of its own, so that nothing that
    is computed meanwhile can hold it up.

    Args:
        payload: Any shape and dtype of whole bytes, on the device.
        control: uint32 [8], from `pack`: where the slot is, by addresses of the GPU. Another for
            each call; two calls with equal operands may be made one.
        arrivals: uint32 [2], from `new_arrivals`.
        slot_bytes: How long the slot is; no byte is written beyond.

    Returns:
        A ticket, uint32 [1]: the control's number. Return it from the program and keep it with the
        payload until it is ready: XLA drops a kernel that no result depends on.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If a shape or length is.
        ImportError: If JAX has no Mosaic GPU backend here.
    """
    check_words("copy_to_host", control, arrivals)
    num_bytes = checked_bytes("copy_to_host", payload.shape, payload.dtype, slot_bytes)
    tiling = tile(num_bytes, tuning)
    ticket = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernel = assembled_kernel(
        "copy_to_host", to_host_assembly(tiling), [ticket], ctas=tiling.ctas, threads=tiling.threads
    )
    return kernel(payload.reshape(-1), control, arrivals)[0]


def to_host_assembly(tiling: Tiling) -> str:
    """The kernel in PTX; operands: payload, control, arrivals, ticket."""
    payload, control, arrivals, ticket = "$0", "$1", "$2", "$3"
    lines = [
        *who_and_what(control, [("%slot", PAYLOAD_AT), ("%signal", SIGNAL_AT)]),
        *copy(tiling, payload, "%slot", _OUT),
        *last_arriver(
            arrivals, tiling.ctas, [*tell("%signal"), f"st.global.u32 [{ticket}], %number;"]
        ),
    ]
    return block(lines, tiling.loads)


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
    check_words("copy_from_host", control, arrivals)
    num_bytes = checked_bytes("copy_from_host", shape, dtype, slot_bytes)
    tiling = tile(num_bytes, tuning)
    flat = jax.ShapeDtypeStruct((num_bytes // jnp.dtype(dtype).itemsize,), dtype)
    status = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernel = assembled_kernel(
        "copy_from_host",
        from_host_assembly(tiling),
        [flat, status],
        ctas=tiling.ctas,
        threads=tiling.threads,
    )
    copied, answer = kernel(control, arrivals)
    return copied.reshape(shape), answer


def from_host_assembly(tiling: Tiling) -> str:
    """The kernel in PTX; operands: control, arrivals, payload, status."""
    control, arrivals, payload, status = "$0", "$1", "$2", "$3"
    addresses = [
        ("%slot", PAYLOAD_AT), ("%signal", SIGNAL_AT), ("%acknowledgement", ACKNOWLEDGEMENT_AT),
    ]  # fmt: skip
    lines = [
        *who_and_what(control, addresses),
        f"ld.global.b32 %spin, [{control}+{SPIN_AT}];",
        *_wait(arrivals),
        *copy(tiling, "%slot", payload, _IN),
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
