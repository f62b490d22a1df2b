"""Device memory into a slot of host memory, then the slot's signal.

Lowered for CUDA by JAX 0.10.2, 0.11.2 and 0.12, assembled for sm_90a and interpreted in tests; it
has never run on a GPU. `assembly` has the argument for its order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.pallas_kernels.assembly import Access, block, copy, last_arriver, tell, who_and_what
from jaxmorph.pallas_kernels.checks import check_words, checked_bytes
from jaxmorph.pallas_kernels.control import PAYLOAD_AT, SIGNAL_AT
from jaxmorph.pallas_kernels.mosaic import assembled_kernel
from jaxmorph.pallas_kernels.tiling import Tiling, tile
from jaxmorph.pallas_kernels.tuning import TO_HOST, CopyTuning

_NAME = "copy_to_host"
# The payload is read once, so it takes no place in the first cache.
_ACCESS = Access(load="ld.global.L1::no_allocate", store="st.global")


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
    check_words(_NAME, control, arrivals)
    num_bytes = checked_bytes(_NAME, payload.shape, payload.dtype, slot_bytes)
    tiling = tile(num_bytes, tuning)
    ticket = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernel = assembled_kernel(
        _NAME, assembly(tiling), [ticket], ctas=tiling.ctas, threads=tiling.threads
    )
    return kernel(payload.reshape(-1), control, arrivals)[0]


def assembly(tiling: Tiling) -> str:
    """The kernel in PTX; operands: payload, control, arrivals, ticket.

    Args:
        tiling: The payload's length and who copies what of it.
    """
    payload, control, arrivals, ticket = "$0", "$1", "$2", "$3"
    lines = [
        *who_and_what(control, [("%slot", PAYLOAD_AT), ("%signal", SIGNAL_AT)]),
        *copy(tiling, payload, "%slot", _ACCESS),
        *last_arriver(
            arrivals, tiling.ctas, [*tell("%signal"), f"st.global.u32 [{ticket}], %number;"]
        ),
    ]
    return block(lines, tiling.loads)


def copy_to_host_reference(
    payload: Any, number: int, slot: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `copy_to_host` leaves behind, in plain `jax.numpy`.

    Args:
        payload: Any shape and dtype of whole bytes.
        slot: uint8 [slot bytes], what the slot held before.

    Returns:
        The slot, uint8 [slot bytes]; the signal and the ticket, uint32 [1] each.
    """
    flat = jax.lax.bitcast_convert_type(payload.reshape(-1), jnp.uint8).reshape(-1)
    word = jnp.full(1, np.uint32(number))
    return slot.at[: flat.size].set(flat), word, word
