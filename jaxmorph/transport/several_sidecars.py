"""A rank's data plane with several sidecars, for messages that one processor core can't move.

Each sidecar is a data plane of its own: a process with slots, ports, and lanes to its peers'
sidecars of the same number. A channel's messages take turns: of k sidecars, number n % k carries
message n, and the receiver takes messages in the same turns. So each sidecar guarantees only its
own messages, and the turns give their order in the channel.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.errors import UserError
from jaxmorph.progress import MOST_SIDECARS
from jaxmorph.transport.client import FLUSH_S, SidecarPlane
from jaxmorph.transport.names import WRAP, ChannelName, TransportError, add
from jaxmorph.transport.plane import (
    Address,
    ChannelSpec,
    DataPlane,
    IncomingEnd,
    IncomingSlot,
    MemoryRegistry,
    OutgoingEnd,
    OutgoingSlot,
    TransportSettings,
)
from jaxmorph.transport.secret import derived

StartOne = Callable[
    [int, Sequence[ChannelSpec], Sequence[ChannelSpec], TransportSettings], DataPlane
]

_APART = WRAP // MOST_SIDECARS
_BUSY = 0.7
"""How busy a sidecar may be before its messages wait for it: steps send them in bursts."""


def sidecars_needed(busy: float, cores: float) -> int:
    """How many sidecars a rank needs: 1, 2, 4 or 8.

    Args:
        busy: How much of its time one sidecar alone would compute; above 1: more than it has.
        cores: Processor cores that the rank's sidecars may keep busy.
    """
    count = 1
    while busy > _BUSY * count and 2 * count <= min(cores, MOST_SIDECARS):
        count *= 2
    return count


class SeveralSidecars(DataPlane):
    """A `DataPlane` whose messages `settings.sidecars` processes move in turns.

    Args:
        start_one: Starts the plane of one sidecar.
    """

    def __init__(
        self,
        rank: int,
        outgoing: Sequence[ChannelSpec],
        incoming: Sequence[ChannelSpec],
        settings: TransportSettings | None = None,
        start_one: StartOne = SidecarPlane,
    ) -> None:
        super().__init__((), (), 0, lambda: None)  # the sidecars' planes have the ends
        self._rank, self._settings = rank, settings or TransportSettings()
        self._specs = tuple(outgoing), tuple(incoming)
        self._num_slots = {spec.name: spec.num_slots for spec in (*outgoing, *incoming)}
        self._start_one = start_one
        self._registry: MemoryRegistry | None = None
        self._conditions: tuple[Sequence[LinkCondition], float] | None = None
        self._turns = dict.fromkeys(self._num_slots, 0)
        self._gone: set[int] = set()
        self.planes: list[DataPlane] = []
        self._open(self._settings.sidecars)

    @property
    def peer_ranks(self) -> list[int]:
        """The ranks at the other ends of its channels."""
        ends = {rank for name in self._num_slots for rank in (name.source, name.destination)}
        return sorted(ends - {self._rank})

    def addresses(self) -> list[Address]:
        """Where peers reach this rank: each sidecar in turn has one host and port for each card."""
        return [address for plane in self.planes for address in plane.addresses()]

    def connect(self, peers: Mapping[int, Sequence[Address]], secret: bytes) -> None:
        """Connect each sidecar to the peers' sidecars of the same number."""
        count = len(self.planes)
        for rank, addresses in peers.items():
            if len(addresses) % count:
                found = f"rank {rank} has {len(addresses)} addresses"
                raise TransportError(f"{found}, expected as many for each of {count} sidecars")
        self._gone -= peers.keys()
        for number, plane in enumerate(self.planes):
            # Each number has its own secret, so a sidecar of another number is rejected.
            own = derived(secret, f"sidecar {number} of {count}")
            plane.connect({rank: _share(at, number, count) for rank, at in peers.items()}, own)

    def reopen(self, count: int) -> None:
        """Let so many sidecars move all further messages; `connect` must follow.

        All ranks do so between two steps: messages that nobody has taken are lost.
        """
        self.close(flush=False)
        self._turns = dict.fromkeys(self._turns, 0)
        self._open(count)
        if self._registry is not None:
            self.report_memory(self._registry)
        if self._conditions is not None:
            self.emulate(*self._conditions)

    def reserve(self, channel: ChannelName, deadline_s: float) -> OutgoingSlot:
        """Wait for a slot for the next message; see `DataPlane.reserve`."""
        slot = self._next(channel).reserve(channel, deadline_s)
        self._turns[channel] += 1
        return slot

    def take(self, channel: ChannelName, deadline_s: float) -> IncomingSlot:
        """Wait for the channel's next message; see `DataPlane.take`."""
        slot = self._next(channel).take(channel, deadline_s)
        self._turns[channel] += 1
        return slot

    def has_free_slot(self, channel: ChannelName) -> bool:
        """Whether a slot for the next message is free now; see `DataPlane.has_free_slot`."""
        return self._next(channel).has_free_slot(channel)

    def resize(self, channel: ChannelName, num_slots: int, timeout_s: float = 60.0) -> None:
        """Give this rank's end of a channel other slots, shared among its sidecars.

        Changes no slots before all are at rest. If it fails half-way, call it again.
        """
        deadline_s = time.monotonic() + timeout_s
        own = _slots_each(num_slots, len(self.planes))
        others = [plane for plane in self.planes if plane.num_slots(channel) != own]
        for plane in others:
            plane.await_rest(channel, deadline_s)
        for plane in others:
            plane.resize(channel, own, max(0.0, deadline_s - time.monotonic()))
        self._num_slots[channel] = num_slots

    def num_slots(self, channel: ChannelName) -> int:
        """The slots that this rank's end of a channel has, of all sidecars together."""
        return self._num_slots[channel]

    def report_memory(self, registry: MemoryRegistry) -> None:
        """Add the memory of all slots to a registry, and keep it up to date."""
        self._registry = registry
        for plane in self.planes:
            plane.report_memory(registry)

    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        """Replace the emulated conditions, for all messages posted from now on.

        Raises:
            UserError: If several sidecars would share a bandwidth, or a device's copies.
        """
        shared = (
            rate for each in conditions for rate in (each.bandwidth_mbps, each.host_copy_gbps)
        )
        if len(self.planes) > 1 and any(shared):
            raise UserError(
                f"transport.sidecars: got {len(self.planes)}, expected 1, as the bandwidth of a "
                "link or of copies is emulated, and each sidecar would have all of it"
            )
        origin_s = time.monotonic() if origin_s is None else origin_s
        self._conditions = conditions, origin_s
        for plane in self.planes:
            plane.emulate(conditions, origin_s)

    def events(self) -> list[dict[str, Any]]:
        """Events since the last call, each with its sidecar's number where there are several."""
        found = []
        for number, plane in enumerate(self.planes):
            for event in plane.events():
                if event["kind"] == "peer_gone":
                    if event["peer"] in self._gone:
                        continue  # each sidecar has lost it
                    self._gone.add(event["peer"])
                found.append({**event, "sidecar": number} if len(self.planes) > 1 else event)
        return sorted(found, key=lambda event: event["time_s"])

    def statistics(self) -> dict[str, Any]:
        """The counts of each sidecar: see `SidecarPlane.statistics`."""
        return {"sidecars": [plane.statistics() for plane in self.planes]}

    def processor_s(self) -> float | None:
        """The processor time that its sidecars have used so far; None: not all have answered."""
        found = [each.get("processor_s") for each in self.statistics()["sidecars"]]
        return None if None in found else sum(found)

    def lose(self, rank: int, reason: str) -> None:
        """End all waits for a peer that is gone, whichever sidecar has found that out."""
        for plane in self.planes:
            plane.lose(rank, reason)

    def flush(self, deadline_s: float) -> None:
        """Wait until the messages of all sidecars are delivered; see `DataPlane.flush`."""
        for plane in self.planes:
            plane.flush(deadline_s)

    def close(self, *, flush: bool = True) -> None:
        """End all sidecars at once and free the memory."""
        if flush:  # all before any ends: a peer gives up all once one is gone
            self.flush(time.monotonic() + FLUSH_S)
        planes, self.planes = self.planes, []
        if len(planes) == 1:
            planes[0].close(flush=False)
        elif planes:  # each may have to wait for its process
            with ThreadPoolExecutor(len(planes)) as threads:
                list(threads.map(lambda plane: plane.close(flush=False), planes))

    def _open(self, count: int) -> None:
        outgoing, incoming = (
            [
                replace(spec, num_slots=_slots_each(self._num_slots[spec.name], count))
                for spec in specs
            ]
            for specs in self._specs
        )
        try:
            for number in range(count):
                # Message numbers differ between sidecars: copies identify slots by them.
                first = add(self._settings.first_sequence, number * _APART)
                settings = replace(self._settings, number=number, first_sequence=first)
                plane = self._start_one(self._rank, outgoing, incoming, settings)
                plane.peer_lives = lambda rank: self.peer_lives(rank)
                plane.on_gone = self.lose
                self.planes.append(plane)
        except BaseException:
            self.close(flush=False)
            raise

    def _next(self, channel: ChannelName) -> DataPlane:
        if channel not in self._turns:
            raise TransportError(f"{channel} is no channel of this rank")
        if not self.planes:
            raise TransportError(f"{channel} is closed")
        return self.planes[self._turns[channel] % len(self.planes)]

    def _resize(self, end: OutgoingEnd | IncomingEnd, num_slots: int, deadline_s: float) -> None:
        raise NotImplementedError  # `resize` passes it on


def _share(addresses: Sequence[Address], number: int, count: int) -> Sequence[Address]:
    """The addresses of one of a peer's sidecars."""
    each = len(addresses) // count
    return addresses[number * each : (number + 1) * each]


def _slots_each(num_slots: int, count: int) -> int:
    """The slots that a channel has at each of its sidecars: together as many as it needs."""
    return max(1, num_slots // count)
