"""The compiled program that moves one payload over one direction of a link by `ppermute`."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.stage.mesh import DATA, STAGE

# Every message begins with the identity of its transfer: 8 words, each in as many elements of the
# payload's own width as it takes, so that identity and payload travel as one array.
IDENTITY_WORDS = 8


@dataclass(frozen=True)
class PayloadShape:
    """What one message of a link carries, on one shard."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


class LinkProgram:
    """One direction of a link: sender and receiver both call it, at the same point of their queues.

    The program runs on a mesh of the two stages' devices only, matching shards with matching
    shards; no other rank takes part. It is compiled once, for a fixed shape.

    Args:
        mesh: The link mesh, (stage=2, data, tensor): the lower stage's devices first.
        payload: Shape and type of a message on one shard.
        upward: True when the higher stage sends (gradients), False when the lower one does.
    """

    def __init__(self, mesh: Mesh, payload: PayloadShape, *, upward: bool) -> None:
        self._payload = payload
        self._word = np.dtype(f"uint{8 * payload.dtype.itemsize}")
        self._identity_length = IDENTITY_WORDS * 4 // payload.dtype.itemsize
        self._sharding = NamedSharding(mesh, PartitionSpec((STAGE, DATA)))
        self._num_shards = mesh.devices.size
        self._device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
        self._program = self._compile(mesh, (1, 0) if upward else (0, 1))
        self.blank = self._place(np.zeros(payload.shape, payload.dtype))
        self._no_identity = self._place(np.zeros(self._identity_length, self._word))

    def _compile(self, mesh: Mesh, hop: tuple[int, int]) -> jax.stages.Compiled:
        length, payload = self._identity_length, self._payload

        def move(identity: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
            words = jax.lax.bitcast_convert_type(value, self._word).reshape(-1)
            message = jnp.concatenate([identity, words])
            message = jax.lax.ppermute(message, STAGE, [hop])
            moved = jax.lax.bitcast_convert_type(message[length:], payload.dtype)
            return message[:length], moved.reshape(payload.shape)

        spec = PartitionSpec((STAGE, DATA))
        program = jax.jit(
            jax.shard_map(
                move, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
            )
        )
        identity = self._global_shape((length,))
        value = self._global_shape(payload.shape)
        return program.lower(
            jax.ShapeDtypeStruct(identity, self._word, sharding=self._sharding),
            jax.ShapeDtypeStruct(value, payload.dtype, sharding=self._sharding),
        ).compile()

    def _global_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self._num_shards * shape[0], *shape[1:])

    def _place(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, self._device)

    def _as_shard(self, value: jax.Array) -> jax.Array:
        """This process's shard of the array over both ends; the peer brings its own."""
        shape = self._global_shape(value.shape)
        return jax.make_array_from_single_device_arrays(
            shape, self._sharding, [value], dtype=value.dtype
        )

    def send(self, identity: Sequence[int], value: jax.Array) -> jax.Array:
        """Dispatch the sender's side.

        Args:
            identity: Eight numbers below 2**32 that name the transfer.
            value: The payload, on this process's device.

        Returns:
            An array that is ready once the message has left.
        """
        words = np.asarray(identity, np.uint32).view(self._word)
        placed = self._as_shard(self._place(words))
        echoed, _ = self._program(placed, self._as_shard(value))
        return echoed.addressable_data(0)

    def receive(self) -> tuple[jax.Array, tuple[int, ...]]:
        """Run the receiver's side.

        Returns:
            The payload, and the identity that came with it (waits until it is there).
        """
        identity, moved = self._program(
            self._as_shard(self._no_identity), self._as_shard(self.blank)
        )
        words = np.asarray(identity.addressable_data(0)).view(np.uint32)
        return moved.addressable_data(0), tuple(int(word) for word in words)
