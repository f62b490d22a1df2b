"""The compiled programs of the direct route, and the communicators that they run over."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.progress import progress
from jaxmorph.records import Link
from jaxmorph.runtime.payloads import IDENTITY_WORDS, SEAL_WORDS, seal, unseal
from jaxmorph.stage.mesh import AXES, STAGE, spare_mesh


class LinkExhaustedError(RuntimeError):
    """All communicators of a direct link have failed; its processes can't make another."""


class LinkProgram:
    """The compiled program that moves one payload over one direction of a link by `ppermute`.

    Both ends call it at the same point of their queues. It runs on a mesh of the two stages'
    devices and sends each shard to the matching device; no other rank takes part. The sender's
    identity of the transfer travels in front of the payload. An answered program carries a pair of
    transfers if both ends send a payload.

    Args:
        mesh: The link mesh, (stage=2, tensor).
        payload: The array that a stage sends or receives.
        source: Which of the mesh's two stages sends: 0 or 1.
        home: This stage's mesh, where it keeps payloads; its devices in the link mesh may be spare
            ones.
        answered: Whether the same collective sends a message of the same size, with the receiver's
            identity, back to the sender, which then learns when its peer came.
        blank: Zeros on the home mesh, in place of a payload at an end that only receives.
        sealed: Whether a checksum travels with the message, so that the receiver knows whether it
            is whole: where XLA aborts NCCL's communicators, a transfer may end half-way without an
            error.
    """

    def __init__(
        self,
        mesh: Mesh,
        payload: PayloadShape,
        *,
        source: int,
        home: Mesh,
        answered: bool,
        blank: jax.Array,
        sealed: bool = False,
    ) -> None:
        self._payload, self._sealed = payload, sealed
        # Identity and payload travel as one array, so that a transfer is one collective.
        self._word = np.dtype(f"uint{8 * payload.dtype.itemsize}")
        self._identity_length = IDENTITY_WORDS * 4 // payload.dtype.itemsize
        self._sharding = NamedSharding(mesh, PartitionSpec(AXES))
        self._num_ends = mesh.devices.size  # devices of both stages
        self._devices, self._home = _own_devices(mesh), home
        self._is_at_home = self._devices == list(home.devices.flat)
        self._of_payload = NamedSharding(home, payload.spec)
        destination = 1 - source
        hops = [(source, destination), (destination, source)]
        self._pack = self._compile_pack()
        self._program = self._compile(mesh, hops if answered else hops[:1])
        self._blank = blank

    def _compile_pack(self) -> jax.stages.Compiled:
        """Joins identity and payload on each of the stage's devices.

        The identity is an argument of the program because that costs least.
        """
        payload, spec = self._payload, self._payload.spec

        def pack(identity: jax.Array, value: jax.Array) -> jax.Array:
            words = jax.lax.bitcast_convert_type(value, self._word).reshape(-1)
            return seal(identity, words) if self._sealed else jnp.concatenate([identity, words])

        alike = PartitionSpec()
        packed = jax.shard_map(
            pack,
            mesh=self._home,
            in_specs=(alike, spec),
            out_specs=PartitionSpec(AXES),
            check_vma=False,
        )
        place = NamedSharding(self._home, alike)
        identity = jax.ShapeDtypeStruct((self._identity_length,), self._word, sharding=place)
        value = jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=self._of_payload)
        return jax.jit(packed).lower(identity, value).compile()

    def _compile(self, mesh: Mesh, hops: list[tuple[int, int]]) -> jax.stages.Compiled:
        length, payload = self._identity_length, self._payload.part
        if self._sealed:
            length += SEAL_WORDS * 4 // payload.dtype.itemsize

        def move(message: jax.Array) -> tuple[jax.Array, jax.Array]:
            message = jax.lax.ppermute(message, STAGE, hops)
            moved = jax.lax.bitcast_convert_type(message[length:], payload.dtype)
            head = unseal(message) if self._sealed else message[:length]
            return head, moved.reshape(payload.shape)

        spec = PartitionSpec(AXES)
        sharded = jax.shard_map(
            move, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False
        )
        num_words = length + math.prod(payload.shape)
        message = jax.ShapeDtypeStruct(
            (self._num_ends * num_words,), self._word, sharding=self._sharding
        )
        return jax.jit(sharded).lower(message).compile()

    def _as_shards(self, message: jax.Array) -> jax.Array:
        """This stage's shards of the array over both ends; the peer has the others."""
        shards = [shard.data for shard in message.addressable_shards]
        num_words = self._num_ends * shards[0].size
        return jax.make_array_from_single_device_arrays(
            (num_words,), self._sharding, self._put(shards, self._devices), dtype=message.dtype
        )

    def _as_payload(self, moved: jax.Array) -> jax.Array:
        """This stage's shards of what both ends have received, as its payload."""
        shards = self._put(
            [shard.data for shard in moved.addressable_shards], list(self._home.devices.flat)
        )
        if len(shards) == 1:
            return shards[0]
        shape = self._payload.shape
        return jax.make_array_from_single_device_arrays(shape, self._of_payload, shards)

    def run(
        self, identity: Sequence[int], value: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Dispatch this process's end.

        Args:
            identity: Eight numbers below 2**32 that name the transfer.
            value: The payload that this end sends; None: it only receives.

        Returns:
            The peer's identity, for `read_identity`, and the payload that it sent. Both are ready
            when the transfer is over. The identity is zeros at the sending end of a program that
            isn't answered. Where messages are sealed, a number follows it: 1 if the message has
            come whole.
        """
        words = np.asarray(identity, np.uint32).view(self._word)
        message = self._pack(words, self._blank if value is None else value)
        peer, moved = self._program(self._as_shards(message))
        own = peer if len(self._devices) > 1 else peer.addressable_data(0)
        return own, self._as_payload(moved)

    def _put(self, shards: list[jax.Array], devices: list[Any]) -> list[jax.Array]:
        if self._is_at_home:
            return shards
        return [jax.device_put(*pair) for pair in zip(shards, devices, strict=True)]


def _own_devices(mesh: Mesh) -> list[Any]:
    own = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == own]


def read_identity(words: jax.Array) -> tuple[int, ...]:
    """The eight numbers of an identity; waits until the transfer is over, on all devices.

    Raises:
        JaxRuntimeError: If a sealed message has not come whole, or devices got parts of different
            messages.
    """
    own = (shard.data for shard in words.addressable_shards)
    found, *others = [tuple(np.asarray(each).view(np.uint32).tolist()) for each in own]
    is_whole = len(found) <= IDENTITY_WORDS or found[IDENTITY_WORDS]
    if not is_whole or any(other != found for other in others):
        raise jax.errors.JaxRuntimeError("DATA_LOSS: the message has not come whole")
    return found[:IDENTITY_WORDS]


Programs = Mapping[Channel | Link, LinkProgram]
"""Each channel's program, and each link's program for pairs."""


class LinkCommunicators:
    """The communicators that a direct link can use, one after another, and programs over each.

    XLA keeps one communicator for each tuple of devices, and it stays closed once a transfer over
    it has failed. The next one has the link's devices in the other order. Where processes have
    spare devices (`have_cpu_devices`), further communicators use them at one end or at both.

    Args:
        mesh: Of all ranks.
        payloads: What a message of each channel carries.
        answered: Whether the sender learns when its peer came.
        sealed: Whether the receiver learns that a message has come whole.

    Attributes:
        count: Communicators per link.
    """

    def __init__(
        self,
        mesh: Mesh,
        payloads: Mapping[Channel, PayloadShape],
        *,
        answered: bool,
        sealed: bool = False,
    ) -> None:
        self._meshes = [each for each in (mesh, spare_mesh(mesh)) if each is not None]
        own = np.array(_own_devices(mesh)).reshape(1, *mesh.devices.shape[1:])
        self._home = Mesh(own, AXES)
        self._payloads, self._answered, self._sealed = payloads, answered, sealed
        self._blanks: dict[PayloadShape, jax.Array] = {}
        self.count = 2 * len(self._meshes) ** 2

    def first_programs(self) -> Programs:
        """All links' programs over their first communicators."""
        links, compiled = sorted({channel.link for channel in self._payloads}), []
        for number, link in enumerate(links, start=1):
            progress.stamp(f"compiling {number} of {len(links)} links' programs")
            compiled.append(self.programs(link, 0))
        return {channel: program for each in compiled for channel, program in each.items()}

    def programs(self, link: Link, number: int) -> Programs:
        """A link's programs over one of its communicators, compiled now.

        Raises:
            LinkExhaustedError: If `number` is too large.
        """
        if number >= self.count:
            raise LinkExhaustedError(
                f"link {link} has failed {number} times, and a direct link can begin {self.count} "
                "times: delegate it, or start its processes again"
            )
        mesh = self._mesh(link, number)
        compiled = partial(LinkProgram, mesh, home=self._home, sealed=self._sealed)
        programs: dict[Channel | Link, LinkProgram] = {}
        for channel, payload in self._payloads.items():
            if channel.link == link:
                source = (link.index(channel.source) + number) % 2
                compile_one = partial(compiled, payload, blank=self._blank(payload))
                own = programs[channel] = compile_one(source=source, answered=self._answered)
                # One program does for all pairs: activations and gradients have one shape.
                if channel.payload is not Payload.TIED and link not in programs:
                    programs[link] = own if self._answered else compile_one(source=0, answered=True)
        return programs

    def _blank(self, payload: PayloadShape) -> jax.Array:
        """The zeros that all programs of a payload share, as a vocabulary's are large."""
        if payload not in self._blanks:
            zeros = np.zeros(payload.shape, payload.dtype)
            place = NamedSharding(self._home, payload.spec)
            self._blanks[payload] = jax.device_put(zeros, place)
        return self._blanks[payload]

    def _mesh(self, link: Link, number: int) -> Mesh:
        """The link's two stages: in order where the number is even, reversed where it is odd."""
        ends = ([mesh.devices[rank] for mesh in self._meshes] for rank in link)
        pair = list(product(*ends))[number // 2]
        return Mesh(np.stack(pair[::-1] if number % 2 else pair), AXES)
