"""The direct route: a transfer is a program on both accelerators' queues, a rendezvous.

When a transfer fails, only the receiver knows what it received: `received` counts messages per
channel. A sender keeps its outputs until those counts cover them, and can resend the rest in the
next epoch, on this route or another.
"""

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Channel, Payload, SendReceive, channel_of
from jaxmorph.progress import progress
from jaxmorph.records import Link
from jaxmorph.runtime.emulated_links import EmulatedLinks, never
from jaxmorph.runtime.payloads import IDENTITY_WORDS, SEAL_WORDS, seal, unseal
from jaxmorph.runtime.routes import (
    Moved,
    Posting,
    TransferIdentity,
    TransferMismatchError,
    require_live,
)
from jaxmorph.stage.mesh import AXES, STAGE, spare_mesh

_WORD = 0xFFFFFFFF


class LinkExhaustedError(RuntimeError):
    """All communicators of a direct link have failed; its processes can't make another."""


class PathFailedError(RuntimeError):
    """A direct transfer's collective failed: by its path, or by the rank at its other end.

    Attributes:
        reason: What the backend reports, in short.
        waited_for: The rank at the other end.
    """

    def __init__(self, identity: TransferIdentity, peer: int, error: Exception) -> None:
        self.reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        super().__init__(
            f"{identity}: rank {peer} did not complete it, or the direct path of link "
            f"{identity.transfer.link} failed: {self.reason}"
        )
        self.waited_for = peer


_LONGEST_REASON = 200
_STATUS = re.compile("[A-Z_]+: ")
_OF_THIS_RANK = re.compile(
    "RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|CUDA_ERROR|(?i:cuda (error|failure))"
    "|(?i:out of memory)|(?i:callback error)|(?i:python callback)"
)


def is_of_path(error: Exception) -> bool:
    """Whether a transfer's error is a failed collective, not a failure of this rank alone.

    A rank may run out of memory, or its device may fail, in the middle of a transfer. Such errors
    are raised as they are: another route would not help, and would hide them. JAX raises a
    `ValueError` with a status where a collective fails while it is dispatched.
    """
    # XLA adds NCCL's last warning to each error, however old and unrelated that is.
    text = str(error).partition("Last NCCL warning")[0]
    of_backend = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _STATUS.match(text) is not None
    )
    return of_backend and _OF_THIS_RANK.search(text) is None


@contextmanager
def _naming_path(
    identity: TransferIdentity, peer: int, value: jax.Array | None = None
) -> Iterator[None]:
    """Turn the error of a failed collective, which sends `value`, into a `PathFailedError`."""
    try:
        yield
    except Exception as error:
        if not is_of_path(error):
            raise
        jax.block_until_ready(value)  # raises the error of the op that made it, if it failed
        raise PathFailedError(identity, peer, error) from error


class LinkProgram:
    """The compiled program that moves one payload over one direction of a link by `ppermute`.

    Both ends call it at the same point of their queues. It runs on a mesh of the two stages'
    devices and sends each shard to the matching one; no other rank takes part. The sender's
    identity of the transfer travels in front of the payload. One that is answered carries a pair of
    transfers where both ends send a payload.

    Args:
        mesh: The link mesh, (stage=2, data, tensor).
        payload: The array that a stage sends or receives.
        source: Which of the mesh's two stages sends: 0 or 1.
        home: This stage's mesh, where it keeps payloads; its devices of the link's may be spare
            ones.
        answered: Whether the same collective sends a message of the same size, with the receiver's
            identity, back to the sender, which then learns when its peer came.
        sealed: Whether a sum of the message travels with it, by which the receiver knows that it
            has come whole: where XLA aborts NCCL's communicators, a transfer may end in its middle
            without an error.
    """

    def __init__(
        self,
        mesh: Mesh,
        payload: PayloadShape,
        *,
        source: int,
        home: Mesh,
        answered: bool,
        sealed: bool = False,
    ) -> None:
        self._payload, self._sealed = payload, sealed
        # Identity and payload travel as one array, so that a transfer is one collective.
        self._word = np.dtype(f"uint{8 * payload.dtype.itemsize}")
        self._identity_length = IDENTITY_WORDS * 4 // payload.dtype.itemsize
        self._sharding = NamedSharding(mesh, PartitionSpec(AXES))
        self._num_shards = mesh.devices.size
        self._devices, self._home = _own_devices(mesh), home
        self._of_payload = NamedSharding(home, payload.spec)
        destination = 1 - source
        hops = [(source, destination), (destination, source)]
        self._pack = self._compile_pack()
        self._program = self._compile(mesh, hops if answered else hops[:1])
        self._blank = jax.device_put(np.zeros(payload.shape, payload.dtype), self._of_payload)

    def _compile_pack(self) -> jax.stages.Compiled:
        """Joins identity and payload on each of the stage's devices.

        As a program's argument the identity costs least.
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
            (self._num_shards * num_words,), self._word, sharding=self._sharding
        )
        return jax.jit(sharded).lower(message).compile()

    def _as_shards(self, message: jax.Array) -> jax.Array:
        """This stage's shards of the array over both ends; the peer has the others."""
        shards = [shard.data for shard in message.addressable_shards]
        num_words = self._num_shards * shards[0].size
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
        return peer.addressable_data(0), self._as_payload(moved)

    def _put(self, shards: list[jax.Array], devices: list[Any]) -> list[jax.Array]:
        if self._devices == list(self._home.devices.flat):
            return shards
        return [jax.device_put(*pair) for pair in zip(shards, devices, strict=True)]


def _own_devices(mesh: Mesh) -> list[Any]:
    own = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == own]


def read_identity(words: jax.Array) -> tuple[int, ...]:
    """The eight numbers of an identity; waits until the transfer is over.

    Raises:
        JaxRuntimeError: If they are a sealed message's, and it has not come whole.
    """
    found = tuple(np.asarray(words).view(np.uint32).tolist())
    if len(found) > IDENTITY_WORDS and not found[IDENTITY_WORDS]:
        raise jax.errors.JaxRuntimeError("DATA_LOSS: the message has not come whole")
    return found[:IDENTITY_WORDS]


Programs = Mapping[Channel | Link, LinkProgram]
"""The programs of channels, and of a link the one for its pairs."""


class LinkCommunicators:
    """The communicators that a direct link can use, one after another, and programs over each.

    XLA keeps one communicator for each tuple of devices, and it stays closed once a transfer over
    it has failed. The next one has the link's devices in the other order. Where processes have a
    spare device (`have_spare_device`), further ones use it in place of one or both.

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
                own = programs[channel] = compiled(payload, source=source, answered=self._answered)
                # One program does for all pairs: activations and gradients have one shape.
                if channel.payload is not Payload.TIED and link not in programs:
                    both = own if self._answered else compiled(payload, source=0, answered=True)
                    programs[link] = both
        return programs

    def _mesh(self, link: Link, number: int) -> Mesh:
        """The link's two stages: in order where the number is even, reversed where it is odd."""
        ends = ([mesh.devices[rank] for mesh in self._meshes] for rank in link)
        pair = list(product(*ends))[number // 2]
        return Mesh(np.stack(pair[::-1] if number % 2 else pair), AXES)


class KeptOutputs:
    """What a rank has sent and its receivers may lack, per channel in the order of sending.

    The receiver's count of its messages decides. Counts continue through all epochs: a message that
    is resent keeps its number.

    Queue thread: `keep`, `release`. A link's own thread: `take_uncovered`. Lock: all state.
    """

    def __init__(self) -> None:
        self._kept: dict[Channel, list[tuple[TransferIdentity, jax.Array]]] = {}
        self._covered: Counter[Channel] = Counter()
        self._lock = threading.Lock()

    def keep(self, identity: TransferIdentity, value: jax.Array) -> None:
        """Keep an output that is about to be sent."""
        with self._lock:
            self._kept.setdefault(channel_of(identity.transfer), []).append((identity, value))

    def release(self, link: Link) -> None:
        """Drop all that was sent over a link: its receiver has every message."""
        with self._lock:
            for channel in self._kept:
                if channel.link == link:
                    self._covered[channel] += len(self._kept[channel])
                    self._kept[channel] = []

    def take_uncovered(
        self, channel: Channel, received: int
    ) -> list[tuple[TransferIdentity, jax.Array]]:
        """What to resend, in order; nothing of the channel is kept any more.

        Args:
            received: The receiver's count, from the run's first message.

        Raises:
            ValueError: If the count is lower than it was before, or higher than what was sent.
        """
        with self._lock:
            outputs = self._kept.get(channel, [])
            covered = self._covered[channel]
            if not covered <= received <= covered + len(outputs):
                raise ValueError(
                    f"{channel}: got a count of {received}, expected {covered} up to "
                    f"{covered + len(outputs)}"
                )
            self._kept[channel], self._covered[channel] = [], received
            return outputs[received - covered :]


@dataclass
class DirectRoute:
    """`ppermute` on the accelerator's queue: a rendezvous that both ends reach in the same order.

    The deadline of a transfer is that of the backend's collectives, set once before JAX starts
    (`join`). `take` can't choose another one, except for an emulated cut: then neither end begins,
    and each gives up at its own deadline.

    Queue thread: `post`, `take`, `post_and_take`. Training thread, at an empty queue:
    `replace_programs`. A link's own thread: `received`, while no transfer of it runs. No lock.

    Attributes:
        answered: Whether the programs bring the peer's identity to the sender too. A paced queue
            needs to know when the peer came; elsewhere the sender has no reason to wait for it.
        links: What is emulated on the links; both ends hold their queues for as long as that takes.
        timeout_s: How long either end waits for an emulated cut to heal.
        kept: What was sent and may be lost; None: nothing is kept.
        peer_has_left: Whether a link's peer has left its path: a transfer then fails at once, and
            doesn't wait for an emulated cut to heal.
        received: How many messages of each channel were received, in all epochs together.
        abandoned: Transfers of this epoch and of earlier ones are refused.
    """

    holds_queue = True  # the ends wait for each other on their queues

    programs: Programs
    answered: bool
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    timeout_s: float = 60.0
    kept: KeptOutputs | None = None
    peer_has_left: Callable[[Link], bool] = never
    received: Counter[Channel] = field(default_factory=Counter, init=False)
    abandoned: int = field(default=-1, init=False)

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """One posting for the whole message; it needs no room."""
        del deadline_s
        yield partial(self.post, identity)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Dispatch the sender's end."""
        program = self._program(identity)
        if self.kept is not None:
            self.kept.keep(identity, value)
        deadline_s = time.monotonic() + self.timeout_s
        begun_s = self.links.wait_until_whole(identity, arrived_s, deadline_s, self.peer_has_left)
        progress.stamp_queue(identity.transfer)
        with _naming_path(identity, identity.transfer.destination, value):
            peer, _ = program.run((*identity.words(), *_time_words(begun_s)), value)
            if self.kept is not None:  # else a failure would show only in a later transfer
                jax.block_until_ready(peer)
            moved = Moved(peer, _check(peer, identity) if self.answered else None)
        if begun_s != arrived_s or self.links.concern(identity.transfer):
            moved = self._emulated(moved, [identity], value.nbytes, begun_s, deadline_s)
        return moved

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Run the receiver's end and check which message came."""
        program = self._program(identity)
        deadline_s = min(deadline_s, time.monotonic() + self.timeout_s)
        begun_s = self.links.wait_until_whole(identity, arrived_s, deadline_s, self.peer_has_left)
        progress.stamp_queue(identity.transfer)
        with _naming_path(identity, identity.transfer.source):
            peer, value = program.run((*identity.words(), *_time_words(begun_s)))
            moved = Moved(value, _check(peer, identity))
        if begun_s != arrived_s or self.links.concern(identity.transfer):
            moved = self._emulated(moved, [identity], value.nbytes, begun_s, deadline_s)
        self.received[channel_of(identity.transfer)] += 1
        return moved

    def post_and_take(
        self,
        sent: TransferIdentity,
        value: jax.Array,
        received: TransferIdentity,
        arrived_s: float,
        deadline_s: float,
    ) -> Moved:
        """Run this end of a pair, and check which message came."""
        require_live(sent, self.abandoned)
        pair = SendReceive(sent.transfer, received.transfer)
        program = self.programs[sent.transfer.link]
        if self.kept is not None:
            self.kept.keep(sent, value)
        deadline_s = min(deadline_s, time.monotonic() + self.timeout_s)
        begun_s = arrived_s
        for each in (sent, received):
            begun_s = self.links.wait_until_whole(each, begun_s, deadline_s, self.peer_has_left)
        progress.stamp_queue(pair)
        with _naming_path(sent, pair.peer, value):
            peer, taken = program.run((*sent.words(), *_time_words(begun_s)), value)
            moved = Moved(taken, _check(peer, received))
        if begun_s != arrived_s or any(map(self.links.concern, (pair.sent, pair.received))):
            moved = self._emulated(moved, [sent, received], value.nbytes, begun_s, deadline_s)
        self.received[channel_of(pair.received)] += 1
        return moved

    def abandon(self, epoch: int) -> None:
        """Refuse the rest of an epoch: its ends may be out of step."""
        self.abandoned = max(self.abandoned, epoch)

    def replace_programs(self, programs: Programs) -> None:
        """Use other programs for a link, while the queue is empty."""
        self.programs = {**self.programs, **programs}

    def channels(self, link: Link) -> list[Channel]:
        """The channels of a link."""
        return [each for each in self.programs if isinstance(each, Channel) and each.link == link]

    def settle(self) -> None:
        """Nothing to wait for: transfers are over when the queue is drained."""

    def _emulated(
        self,
        moved: Moved,
        identities: Sequence[TransferIdentity],
        num_bytes: int,
        begun_s: float,
        deadline_s: float,
    ) -> Moved:
        """The transfer, or pair, with the time until which an emulated link holds both its ends."""
        if self.answered and moved.peer_arrived_s is not None:
            # Each end knows the other's time, so both compute the same number.
            met_s = max(_time_of(*_time_words(begun_s)), moved.peer_arrived_s)
        else:
            jax.block_until_ready(moved.value)
            met_s = time.monotonic()
        rest = num_bytes, met_s, deadline_s, self.peer_has_left
        over_s = tuple(self.links.over_s(each, *rest) for each in identities)
        return replace(moved, over_s=max(over_s), each_over_s=over_s)

    def _program(self, identity: TransferIdentity) -> LinkProgram:
        require_live(identity, self.abandoned)
        return self.programs[channel_of(identity.transfer)]


def _check(words: jax.Array, expected: TransferIdentity) -> float:
    """When the peer came to the transfer; raises if it is at another one."""
    *found, high, low = read_identity(words)
    if tuple(found) != expected.words():
        raise TransferMismatchError(f"expected {expected}, but the peer is at {found}")
    return _time_of(high, low)


def _time_words(time_s: float) -> tuple[int, int]:
    """A time in whole microseconds, as two 32-bit words."""
    time_us = round(time_s * 1e6)
    return time_us >> 32 & _WORD, time_us & _WORD


def _time_of(high: int, low: int) -> float:
    """The time in seconds that `_time_words` encoded."""
    return (high << 32 | low) / 1e6
