"""The direct route: transfers are programs on the accelerators' queues, where both ends meet.

When a transfer fails, only the receiver knows what has come: `received` counts it, channel by
channel. A sender that keeps its outputs until those counts cover them can send the rest again, in
the next epoch, on this route or another.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Channel, channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.routes import (
    Moved,
    Posting,
    TransferIdentity,
    TransferMismatchError,
    require_live,
)
from jaxmorph.stage.mesh import AXES, DATA, STAGE, spare_mesh

_WORD = 0xFFFFFFFF

IDENTITY_WORDS = 8
"""32-bit words by which each end of a transfer says to the other which transfer it is at."""


class LinkExhaustedError(RuntimeError):
    """All communicators of a direct link have failed; its processes can make no other."""


class LinkProgram:
    """The compiled program that moves one payload over one direction of a link by `ppermute`.

    Both ends call it, at the same point of their queues. It runs on a mesh of the two stages'
    devices only, matching shards with matching shards; no other rank takes part. It is compiled
    once, for a fixed shape. The sender's identity of the transfer travels in front of the payload.

    Args:
        mesh: The link mesh, (stage=2, data, tensor).
        payload: Shape and type of a message on one shard.
        source: Which of the mesh's two stages sends: 0 or 1.
        home: Where this process keeps payloads; its device of the mesh may be a spare one.
        answered: Whether a message of the same size, with the receiver's identity, goes the other
            direction in the same collective, so that the sender too learns where its peer is.
    """

    def __init__(
        self, mesh: Mesh, payload: PayloadShape, *, source: int, home: Any, answered: bool
    ) -> None:
        self._payload = payload
        # Identity and payload travel as one array of words as wide as the payload's elements.
        self._word = np.dtype(f"uint{8 * payload.dtype.itemsize}")
        self._identity_length = IDENTITY_WORDS * 4 // payload.dtype.itemsize
        self._sharding = NamedSharding(mesh, PartitionSpec((STAGE, DATA)))
        self._num_shards = mesh.devices.size
        self._device, self._home = _own_device(mesh), home
        destination = 1 - source
        hops = [(source, destination), (destination, source)]
        self._pack = self._compile_pack()
        self._program = self._compile(mesh, hops if answered else hops[:1])
        self._blank = jax.device_put(np.zeros(payload.shape, payload.dtype), home)

    def _compile_pack(self) -> jax.stages.Compiled:
        """Identity and payload as one message: given to a program, an identity costs least."""
        place = SingleDeviceSharding(self._home)
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
            value: The payload, where this process keeps it, at the sending end; None at the other.

        Returns:
            (the peer's identity as words of the program's width, see `read_identity`; the payload
            at the receiving end). Both are ready when the transfer is over; the identity is zeros
            at the sending end of a program that isn't answered.
        """
        words = np.asarray(identity, np.uint32).view(self._word)
        message = self._pack(words, self._blank if value is None else value)
        peer, moved = self._program(self._as_shard(self._put(message, self._device)))
        received = moved.addressable_data(0)
        if value is None:
            received = self._put(received, self._home)
        return peer.addressable_data(0), received

    def _put(self, value: jax.Array, device: Any) -> jax.Array:
        return value if self._device == self._home else jax.device_put(value, device)


def _own_device(mesh: Mesh) -> Any:
    return next(each for each in mesh.devices.flat if each.process_index == jax.process_index())


def read_identity(words: jax.Array) -> tuple[int, ...]:
    """The eight numbers of an identity; waits until they are there."""
    return tuple(np.asarray(words).view(np.uint32).tolist())


Programs = Mapping[Channel, LinkProgram]


class LinkCommunicators:
    """The communicators that a direct link can use, one after another, and programs over each.

    XLA keeps a communicator for each tuple of devices, and one whose transfer has failed stays
    closed: then the link's devices are taken in the other order, and after that with a spare device
    (`have_spare_device`) in the place of one or both, where processes have one.

    Args:
        mesh: Of all ranks.
        payloads: What a message of each channel carries.
        answered: Whether the sender learns when its peer has come.

    Attributes:
        count: How many each link has.
    """

    def __init__(
        self, mesh: Mesh, payloads: Mapping[Channel, PayloadShape], *, answered: bool
    ) -> None:
        self._meshes = [each for each in (mesh, spare_mesh(mesh)) if each is not None]
        self._home = _own_device(mesh)
        self._payloads, self._answered = payloads, answered
        self.count = 2 * len(self._meshes) ** 2

    def first_programs(self) -> Programs:
        """Compile all links' programs over their first communicators."""
        links = {channel.link for channel in self._payloads}
        compiled = [self.programs(link, 0) for link in sorted(links)]
        return {channel: program for each in compiled for channel, program in each.items()}

    def programs(self, link: Link, number: int) -> Programs:
        """Compile a link's programs over one of its communicators.

        Raises:
            LinkExhaustedError: If it has no more.
        """
        if number >= self.count:
            raise LinkExhaustedError(
                f"link {link} has failed {number} times, and a direct link can begin {self.count} "
                "times: delegate it, or start its processes again"
            )
        mesh = self._mesh(link, number)
        return {
            channel: LinkProgram(
                mesh,
                payload,
                source=(link.index(channel.source) + number) % 2,
                home=self._home,
                answered=self._answered,
            )
            for channel, payload in self._payloads.items()
            if channel.link == link
        }

    def _mesh(self, link: Link, number: int) -> Mesh:
        """The link's stages: in order where the number is even, and reversed where it is odd."""
        ends = ([mesh.devices[rank] for mesh in self._meshes] for rank in link)
        pair = list(product(*ends))[number // 2]
        return Mesh(np.stack(pair[::-1] if number % 2 else pair), AXES)


class KeptOutputs:
    """The last outputs of each channel, in the order of sending, up to what their receiver has.

    The authority is the receiver's count of the messages that it has taken. Counts go on through
    all epochs: what is sent again has the number it had.

    Queue thread: `keep`, `let_go`. A link's own thread: `take_uncovered`. Lock: all of it.
    """

    def __init__(self) -> None:
        self._kept: dict[Channel, deque[tuple[TransferIdentity, jax.Array]]] = {}
        self._covered: Counter[Channel] = Counter()
        self._lock = threading.Lock()

    def keep(self, identity: TransferIdentity, value: jax.Array) -> None:
        """Hold an output that is about to be sent."""
        with self._lock:
            outputs = self._kept.setdefault(channel_of(identity.transfer), deque())
            outputs.append((identity, value))

    def let_go(self, link: Link) -> None:
        """Let go of all that was sent over a link: its receiver has taken every message of it."""
        with self._lock:
            for channel in self._kept:
                if channel.link == link:
                    self._covered[channel] += len(self._kept[channel])
                    self._kept[channel].clear()

    def cover(self, channel: Channel, received: int) -> None:
        """Let go of what has come: so many messages, counted from the run's first one.

        Raises:
            ValueError: If that is fewer than it said before, or more than were sent.
        """
        with self._lock:
            outputs = self._kept.setdefault(channel, deque())
            covered = self._covered[channel]
            if not covered <= received <= covered + len(outputs):
                raise ValueError(
                    f"{channel}: got a count of {received}, expected {covered} up to "
                    f"{covered + len(outputs)}"
                )
            for _ in range(received - covered):
                outputs.popleft()
            self._covered[channel] = received

    def take_uncovered(
        self, channel: Channel, received: int
    ) -> list[tuple[TransferIdentity, jax.Array]]:
        """Returns what to send again, in order; it is no longer kept."""
        self.cover(channel, received)
        with self._lock:
            outputs = self._kept[channel]
            rest = list(outputs)
            outputs.clear()
            return rest


@dataclass
class DirectRoute:
    """`ppermute` on the accelerator's queue: a rendezvous that both ends reach in the same order.

    The deadline of a transfer is that of the backend's collectives, which is set for all of them
    before JAX starts (`join`); `take` can't choose another one, but for an emulated link that is
    cut: then neither end begins, and each gives up at its own deadline.

    Queue thread: `post`, `take`. Training thread, while the queue is empty: `replace_programs`. A
    link's own thread reads `received`, while no transfer of the link is under way here. No lock.

    Attributes:
        programs: What moves the payloads of each channel.
        answered: Whether the programs bring the sender its peer's identity too. A paced queue needs
            to know when the peer came; elsewhere the sender has no reason to wait for it.
        links: What is emulated on the links; both ends hold their queues for as long as that takes.
        timeout_s: How long either end waits for a cut link to heal.
        kept: What has been sent and may not have come; None: nothing is kept.
        given_up: Whether a link's cut need not be waited for any longer (`EmulatedLinks`).
        received: How many messages of each channel have come, in all epochs together.
        abandoned: Transfers of this epoch, and of earlier ones, are refused.
    """

    programs: Programs
    answered: bool
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    timeout_s: float = 60.0
    kept: KeptOutputs | None = None
    given_up: Callable[[Link], bool] = lambda link: False
    received: Counter[Channel] = field(default_factory=Counter, init=False)
    abandoned: int = field(default=-1, init=False)

    @property
    def holds_queue(self) -> bool:
        """True: both ends wait for each other on their queues."""
        return True

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """The whole message: it needs no room."""
        del deadline_s
        yield partial(self.post, identity)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Dispatch the sender's end."""
        program = self._program(identity)
        if self.kept is not None:
            self.kept.keep(identity, value)
        deadline_s = time.monotonic() + self.timeout_s
        begun_s = self._wait_until_whole(identity, arrived_s, deadline_s)
        peer, _ = program.run((*identity.words(), *_time_words(begun_s)), value)
        moved = Moved(peer, _check(peer, identity) if self.answered else None)
        if begun_s == arrived_s and not self.links.concern(identity.transfer):
            return moved
        return self._emulated(moved, identity, value.nbytes, begun_s, deadline_s)

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Run the receiver's end and check what came."""
        program = self._program(identity)
        deadline_s = min(deadline_s, time.monotonic() + self.timeout_s)
        begun_s = self._wait_until_whole(identity, arrived_s, deadline_s)
        peer, value = program.run((*identity.words(), *_time_words(begun_s)))
        moved = Moved(value, _check(peer, identity))
        if begun_s != arrived_s or self.links.concern(identity.transfer):
            moved = self._emulated(moved, identity, value.nbytes, begun_s, deadline_s)
        self.received[channel_of(identity.transfer)] += 1
        return moved

    def abandon(self, epoch: int) -> None:
        """Refuse what is left of an epoch: its ends may be out of step."""
        self.abandoned = max(self.abandoned, epoch)

    def replace_programs(self, programs: Programs) -> None:
        """Take transfers of some channels by other programs, while the queue is empty."""
        self.programs = {**self.programs, **programs}

    def settle(self) -> None:
        """Nothing to wait for: what was posted is on the queue, and over when that is drained."""

    def _emulated(
        self,
        moved: Moved,
        identity: TransferIdentity,
        num_bytes: int,
        begun_s: float,
        deadline_s: float,
    ) -> Moved:
        """The transfer with the time until which an emulated link keeps both its ends."""
        met_s = self._met_s(moved, begun_s)
        given_up = partial(self.given_up, identity.transfer.link)
        over_s = self.links.over_s(identity, num_bytes, met_s, deadline_s, given_up)
        return replace(moved, over_s=over_s)

    def _wait_until_whole(
        self, identity: TransferIdentity, arrived_s: float, deadline_s: float
    ) -> float:
        given_up = partial(self.given_up, identity.transfer.link)
        return self.links.wait_until_whole(identity, arrived_s, deadline_s, given_up)

    def _met_s(self, moved: Moved, begun_s: float) -> float:
        """When both ends had come: where each knows the other's time, the same number at both."""
        if self.answered and moved.peer_arrived_s is not None:
            return max(_time_of(*_time_words(begun_s)), moved.peer_arrived_s)
        jax.block_until_ready(moved.value)
        return time.monotonic()

    def _program(self, identity: TransferIdentity) -> LinkProgram:
        require_live(identity, self.abandoned)
        return self.programs[channel_of(identity.transfer)]


def _check(words: jax.Array, expected: TransferIdentity) -> float:
    """When the peer came to the transfer; an error if it is at another one."""
    *found, high, low = read_identity(words)
    if tuple(found) != expected.words():
        raise TransferMismatchError(f"expected {expected}, but the peer is at {found}")
    return _time_of(high, low)


def _time_words(time_s: float) -> tuple[int, int]:
    """A time in whole microseconds, as two words."""
    time_us = round(time_s * 1e6)
    return time_us >> 32 & _WORD, time_us & _WORD


def _time_of(high: int, low: int) -> float:
    """The time that two words stand for, in seconds."""
    return (high << 32 | low) / 1e6
