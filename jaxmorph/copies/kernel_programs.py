"""The copy kernels as programs of their own, for payloads of one shape on one device.

A device runs its programs one at a time, on one stream of JAX's. So of the launches of a channel,
which share its `arrivals`, no two are ever under way together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxmorph.copies.payload import SlotUse
from jaxmorph.pallas_kernels import CONTROL_WORDS, new_arrivals

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class KernelProgram:
    """A program that has not been compiled.

    Attributes:
        operands: Shapes and dtypes of its arguments, and where they are kept.
    """

    traceable: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]

    def compile(self) -> Callable[..., Any]:
        """Compile it ahead of time, for where its operands are kept."""
        return self.traceable.lower(*self.operands).compile()


def program_to_host(
    use: SlotUse, placement: Sharding, length: int, kernel: Kernel
) -> KernelProgram:
    """The program that copies payloads, or parts of them, into slots.

    A part is cut out on the device first. That is a copy too, but of memory that is dozens of times
    as fast as the way to the host, and only messages that are longer than a slot have parts.

    Args:
        use: How payloads lie in slots.
        placement: Where the stage keeps its arrays.
        length: Of the part, in elements; a whole payload's: it is not cut.

    Returns:
        It takes the payload, the first element of a part (int32; none for a whole payload), control
        words and arrivals, and gives a ticket.
    """

    def send(value: jax.Array, *rest: jax.Array) -> jax.Array:
        *first, control, arrivals = rest
        if first:
            value = jax.lax.dynamic_slice_in_dim(value.reshape(-1), first[0], length)
        return kernel(value, control, arrivals, slot_bytes=use.slot_bytes)

    is_whole = length == use.num_elements
    first = () if is_whole else (jax.ShapeDtypeStruct((), jnp.int32),)
    payload = jax.ShapeDtypeStruct(use.payload.shape, use.payload.dtype, sharding=placement)
    return KernelProgram(jax.jit(send), (payload, *first, *_words(placement)))


def program_from_host(use: SlotUse, placement: Sharding, kernel: Kernel) -> KernelProgram:
    """The program that copies whole payloads out of slots.

    Args:
        use: How payloads lie in slots, each in one.
        placement: Where the stage keeps its arrays.

    Returns:
        It takes control words and arrivals, and gives the payload and a status.
    """

    def receive(control: jax.Array, arrivals: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape, dtype = use.payload.shape, use.payload.dtype
        return kernel(control, arrivals, shape=shape, dtype=dtype, slot_bytes=use.slot_bytes)

    return KernelProgram(jax.jit(receive, out_shardings=placement), _words(placement))


def arrivals_on_device(placement: Sharding) -> jax.Array:
    """A channel's counter of arrivals, for one direction, where its programs take it."""
    return jax.device_put(new_arrivals(), placement)


def only_device(placement: Sharding) -> Any:
    """The device on which a stage keeps its arrays.

    Raises:
        ValueError: If there are several: a kernel copies for one.
    """
    device, *others = placement.device_set
    if others:
        raise ValueError(f"got arrays on {1 + len(others)} devices, expected one")
    return device


def _words(placement: Sharding) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Control words, which come from the host with every call, and arrivals, which stay."""
    arrivals = jax.eval_shape(new_arrivals)
    return (
        jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),
        jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype, sharding=placement),
    )
