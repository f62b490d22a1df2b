"""The compiled program that moves one payload over one direction of a link by `ppermute`."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.stage.mesh import DATA, STAGE

IDENTITY_WORDS = 8
"""32-bit words by which each end of a transfer tells the other which transfer it is at."""


class LinkProgram:
    """One direction of a link: both ends call it, at the same point of their queues.

    The program runs on a mesh of the two stages' devices only, matching shards with matching
    shards; no other rank takes part. It is compiled once, for a fixed shape. The sender's identity
    of the transfer travels in front of the payload.

    Args:
        mesh: The link mesh, (stage=2, data, tensor).
        payload: Shape and type of a message on one shard.
        source: Which of the mesh's two stages sends: 0 or 1.
        answered: Whether a message of the same size, with the receiver's identity, goes the other
            way in the same collective, so that the sender too learns where its peer is.
    """

    def __init__(
        self, mesh: Mesh, payload: PayloadShape, *, source: int, answered: bool = False
    ) -> None:
        self._payload = payload
        # Identity and payload travel as one array of words as wide as the payload's elements.
        self._word = np.dtype(f"uint{8 * payload.dtype.itemsize}")
        self._identity_length = IDENTITY_WORDS * 4 // payload.dtype.itemsize
        self._sharding = NamedSharding(mesh, PartitionSpec((STAGE, DATA)))
        self._num_shards = mesh.devices.size
        self._device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
        destination = 1 - source
        hops = [(source, destination), (destination, source)]
        self._pack = self._compile_pack()
        self._program = self._compile(mesh, hops if answered else hops[:1])
        self._blank = jax.device_put(np.zeros(payload.shape, payload.dtype), self._device)

    def _compile_pack(self) -> jax.stages.Compiled:
        """Identity and payload as one message: given to a program, an identity costs least."""
        place = SingleDeviceSharding(self._device)
        payload = self._payload

        def pack(identity: jax.Array, value: jax.Array) -> jax.Array:
            words = jax.lax.bitcast_convert_type(value, self._word).reshape(-1)
            return jnp.concatenate([identity, words])

        identity = jax.ShapeDtypeStruct((self._identity_length,), self._word, sharding=place)
        value = jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=place)
        return jax.jit(pack).lower(identity, value).compile()

    def _compile(self, mesh: Mesh, hops: list[tuple[int, int]]) -> jax.stages.Compiled:
        length, payload = self._identity_length, self._payload

        def move(message: jax.Array) -> tuple[jax.Array, jax.Array]:
            message = jax.lax.ppermute(message, STAGE, hops)
            moved = jax.lax.bitcast_convert_type(message[length:], payload.dtype)
            return message[:length], moved.reshape(payload.shape)

        spec = PartitionSpec((STAGE, DATA))
        sharded = jax.shard_map(
            move, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False
        )
        num_words = length + math.prod(payload.shape)
        message = jax.ShapeDtypeStruct(
            (self._num_shards * num_words,), self._word, sharding=self._sharding
        )
        return jax.jit(sharded).lower(message).compile()

    def _as_shard(self, message: jax.Array) -> jax.Array:
        """This process's shard of the array over both ends; the peer brings its own."""
        return jax.make_array_from_single_device_arrays(
            (self._num_shards * message.size,), self._sharding, [message], dtype=message.dtype
        )

    def run(
        self, identity: Sequence[int], value: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Dispatch this process's end.

        Args:
            identity: Eight numbers below 2**32 that say which transfer this end is at.
            value: The payload, on this process's device, at the sending end; None at the other.

        Returns:
            (the peer's identity as words of the program's width, see `read_identity`; the payload
            at the receiving end). Both are ready when the transfer is over; the identity is zeros
            at the sending end of a program that isn't answered.
        """
        words = np.asarray(identity, np.uint32).view(self._word)
        message = self._pack(words, self._blank if value is None else value)
        peer, moved = self._program(self._as_shard(message))
        return peer.addressable_data(0), moved.addressable_data(0)


def read_identity(words: jax.Array) -> tuple[int, ...]:
    """The eight numbers of an identity; waits until they are there."""
    return tuple(np.asarray(words).view(np.uint32).tolist())
