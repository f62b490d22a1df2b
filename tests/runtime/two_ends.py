"""Both ends of a link in one process: tests choose which collectives fail; all else is real."""

import queue
import threading
import time
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from oracles.loopback import LoopbackNetwork

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.host_memory import ImmediateSend, host_callback_backends
from jaxmorph.program.instructions import Payload, SendReceive, Transfer, channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.connection import ConnectionLostError
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct import DirectRoute
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.failover_route import FailoverRoute
from jaxmorph.runtime.link_switch import PeerConnections
from jaxmorph.runtime.payloads import channel_name
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.transport.plane import ChannelSpec

SHAPE = (3, 5)
LIMIT_S, COMMUNICATORS = 20.0, 2
LINK = Link(0, 1)
FAILED = ValueError("UNKNOWN: Gloo collective permute failed: reset by peer")


def up(microbatch):
    return Transfer(Payload.ACTIVATION, 0, 1, microbatch)


def down(microbatch):
    return Transfer(Payload.GRADIENT, 1, 0, microbatch)


TIED = Transfer(Payload.TIED, 0, 1, 0)
CHANNELS = [channel_of(transfer) for transfer in (up(0), down(0), TIED)]


def payload_of(transfer, step=0):
    seed = [transfer.source, transfer.microbatch, step, transfer.payload is Payload.TIED]
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def kept_bytes(outputs):
    return sum(value.nbytes for sent in outputs._kept.values() for _, value in sent)


@cache
def backend():
    return ImmediateSend(host_callback_backends()[0])


class QueueWire:
    """One end of a connection in memory."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing
        self.is_cut, self.deadline_s = False, None

    def limit(self, deadline_s, *, starts=False):
        self.deadline_s = deadline_s

    def send(self, message):
        if self.is_cut:
            raise ConnectionLostError("the connection was closed")
        self.outgoing.put(message)

    def receive(self):
        try:
            message = self.incoming.get(timeout=self.deadline_s)
        except queue.Empty:
            raise TimeoutError from None
        if message is None:
            raise ConnectionLostError("the connection was closed")
        return message

    def close(self):
        self.is_cut = True
        self.incoming.put(None)
        self.outgoing.put(None)


def connections():
    """Both ends' connections to each other."""
    ready, states = _wire(), _wire()
    return tuple(PeerConnections(*each) for each in zip(ready, states, strict=True))


def _wire() -> tuple[Any, Any]:
    one, other = queue.SimpleQueue(), queue.SimpleQueue()
    return QueueWire(one, other), QueueWire(other, one)


class Collectives:
    """A link's collectives, where both ends meet; one fails, and all after it.

    Args:
        fails_at: Which one, counted over both directions; None: none.
        raises_at: The ends at which that one raises: "source", "destination" or both. The other
            one has done its part, and goes on.
        error: What it raises: by default what JAX does while it dispatches.
        timeout_s: When an end gives up that is alone in a collective.
    """

    def __init__(
        self,
        fails_at=None,
        raises_at=("source", "destination"),
        error=FAILED,
        timeout_s=LIMIT_S,
    ):
        self.fails_at, self.raises_at = fails_at, raises_at
        self.error, self.timeout_s = error, timeout_s
        self.is_closed = False
        self.brought = {}
        self.counts = [0, 0]
        self.changed = threading.Condition()

    def run(self, rank, role, words, value):
        with self.changed:
            number = self.counts[rank]
            self.counts[rank] += 1
            if self.is_closed:
                raise jax.errors.JaxRuntimeError("the communicator is closed")
            self.brought[number, rank] = (words, value)
            self.changed.notify_all()
            if not self.changed.wait_for(
                lambda: (number, 1 - rank) in self.brought, self.timeout_s
            ):
                self.is_closed = True
                raise jax.errors.JaxRuntimeError("Gloo: timed out")
            if number == self.fails_at:
                self.is_closed = role in self.raises_at or self.is_closed
                if role in self.raises_at:
                    raise self.error
            return self.brought[number, 1 - rank]


class Program:
    """A rank's end of one direction: like `LinkProgram`, answered."""

    def __init__(self, collectives, channel, rank):
        self.collectives, self.rank = collectives, rank
        self.role = "source" if channel.source == rank else "destination"

    def run(self, identity, value=None):
        words, brought = self.collectives.run(self.rank, self.role, identity, value)
        moved = jnp.zeros(SHAPE) if brought is None else jnp.asarray(brought)
        return jnp.asarray(np.array(words, np.uint32)), moved


class Communicators:
    """A rank's communicators; each may fail once."""

    def __init__(self, collectives, rank):
        self.collectives, self.rank = collectives, rank
        self.count = max(COMMUNICATORS, len(collectives))

    def programs(self, link, number):
        collectives = self.collectives[number]
        programs = {channel: Program(collectives, channel, self.rank) for channel in CHANNELS}
        return {**programs, LINK: programs[CHANNELS[0]]}


class NothingFound:
    """A watch that finds no dead path."""

    def transfer(self, link):
        return nullcontext()

    def is_dead(self, link) -> bool:
        return False

    def forget(self, link):
        pass

    def end_step(self, failed):
        pass

    def close(self):
        pass


class TwoEnds:
    """Ranks 0 and 1, each with a route that fails over.

    Args:
        collectives: Of each communicator, in turn.
        direct_s: When each rank gives up an emulated cut.
        timeout_s: How long to wait for a peer.
        part_elements: How much of a tied gradient fits into a slot.
        hands_over: Whether a slow link leaves its path.
        await_queue: What each rank does before a transfer that may do so.
    """

    def __init__(
        self,
        *collectives,
        direct_s=(0.05, 0.05),
        timeout_s=LIMIT_S,
        part_elements=15,
        hands_over=False,
        await_queue=(lambda: None, lambda: None),
    ):
        collectives = collectives or (Collectives(),)
        placement = SingleDeviceSharding(jax.devices()[0])
        use = SlotUse(PayloadShape(SHAPE, jnp.dtype("float32")), 15)
        uses = dict.fromkeys(CHANNELS, use)
        uses[channel_of(TIED)] = SlotUse(use.payload, part_elements)
        network, self.connections = LoopbackNetwork(), connections()
        self.planes, self.routes, self.links = [], [], []
        for rank in range(2):
            ends = [
                [
                    ChannelSpec(channel_name(channel), uses[channel].slot_bytes, 2)
                    for channel in CHANNELS
                    if channel[side] == rank
                ]
                for side in (1, 2)
            ]
            outgoing, incoming = ends
            plane = network.plane(rank, outgoing, incoming)
            delegated = DelegatedRoute(plane, uses, rank, placement, backend())
            emulated, communicators = EmulatedLinks(), cast(Any, Communicators(collectives, rank))
            programs = communicators.programs(LINK, 0)
            direct = DirectRoute(programs, answered=True, links=emulated, timeout_s=direct_s[rank])
            self.planes.append(plane)
            self.links.append(emulated)
            self.routes.append(
                FailoverRoute(
                    direct,
                    delegated,
                    {LINK: self.connections[rank]},
                    rank,
                    timeout_s,
                    communicators,
                    cast(Any, NothingFound()),
                    hands_over=hands_over,
                    await_queue=await_queue[rank],
                )
            )
        for rank, plane in enumerate(self.planes):
            plane.connect({1 - rank: self.planes[1 - rank].addresses()}, b"secret")

    def close(self):
        for route in self.routes:
            route.close()
        for plane in self.planes:
            plane.close(flush=False)  # what is cut can't arrive


class RankThread(threading.Thread):
    """Runs a rank's part of some transfers in order, and keeps what it receives.

    Args:
        ends: Both ranks'.
        rank: Which one.
        transfers: Each may be a transfer, a pair as rank 0 has it, or something to be called
            between two of them.
        step: Their step.
    """

    def __init__(self, ends, rank, transfers, step=0):
        super().__init__(daemon=True)
        self.route, self.rank, self.transfers, self.step = ends.routes[rank], rank, transfers, step
        self.taken, self.error = [], None
        self.start()

    def run(self):
        try:
            for transfer in self.transfers:
                self.move(transfer)
        except BaseException as error:
            self.error = error

    def move(self, transfer):
        if callable(transfer):
            transfer()
            return
        if isinstance(transfer, SendReceive):
            self.move_pair(transfer if self.rank == 0 else transfer.other_end)
            return
        identity = TransferIdentity(0, self.step, transfer)
        if transfer.source == self.rank:
            value = jnp.asarray(payload_of(transfer, self.step))
            self.route.post(identity, value, time.monotonic())
        else:
            now_s = time.monotonic()
            moved = self.route.take(identity, now_s, now_s + LIMIT_S)
            self.taken.append((transfer, np.asarray(moved.value)))

    def move_pair(self, pair):
        sent, received = (
            TransferIdentity(0, self.step, each) for each in (pair.sent, pair.received)
        )
        value, now_s = jnp.asarray(payload_of(pair.sent, self.step)), time.monotonic()
        moved = self.route.post_and_take(sent, value, received, now_s, now_s + LIMIT_S)
        self.taken.append((pair.received, np.asarray(moved.value)))

    def finish(self):
        self.join(LIMIT_S)
        assert not self.is_alive(), f"rank {self.rank} hangs"
        if self.error is not None:
            raise self.error
        return self.taken


def move(ends, transfers, step=0):
    """Move them all; each rank must receive its messages once, in order and bit by bit."""
    ranks = [RankThread(ends, rank, transfers, step) for rank in range(2)]
    for rank, taken in zip(ranks, finish(ranks), strict=True):
        expected = [each for each in singles(transfers) if each.destination == rank.rank]
        assert [transfer for transfer, _ in taken] == expected
        for transfer, value in taken:
            assert np.array_equal(value, payload_of(transfer, step))


def finish(ranks):
    """What each rank received; raises a rank's own error before the other's timeout."""
    for rank in ranks:
        rank.join(LIMIT_S / 2)
    for rank in sorted(ranks, key=lambda rank: rank.error is None):
        rank.finish()
    return [rank.taken for rank in ranks]


def failures(ends):
    """All ranks' failures; each rank may report at most one."""
    reported = [route.take_failures() for route in ends.routes]
    assert all(len(of_rank) <= 1 for of_rank in reported)
    return [failure for of_rank in reported for failure in of_rank]


def failures_of_both(ends):
    """Both ends' reports, once both have left the path."""
    for route in ends.routes:
        route._ends[LINK].await_switch("the link's report")
    reported = failures(ends)
    assert len(reported) == 2
    return reported


def singles(transfers):
    """The transfers, and both of each pair."""
    for each in transfers:
        yield from (each.sent, each.received) if isinstance(each, SendReceive) else (each,)
