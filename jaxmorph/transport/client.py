"""The trainer's handle on its data plane: the trainer owns all memory, its sidecar moves bytes.

The trainer (the rank's own process) creates slots, doorbells and listening sockets, and lends them
to its sidecar. When a sidecar is killed, the next one continues with the same memory and ports.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.errors import UserError
from jaxmorph.progress import progress
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.lanes import family_of
from jaxmorph.transport.link import check_backend
from jaxmorph.transport.names import NotAtRestError, TransportError
from jaxmorph.transport.plane import (
    Address,
    ChannelSpec,
    DataPlane,
    IncomingEnd,
    OutgoingEnd,
    TransportSettings,
)
from jaxmorph.transport.sidecar_process import Record, RecordWithFds, SidecarProcess
from jaxmorph.transport.slots import Slots

_ANSWER_S = 5.0
FLUSH_S = 5.0
"""How long a closing plane gives messages on their way."""
_BACKLOG = 128


class SidecarPlane(DataPlane):
    """A `DataPlane` whose bytes are moved by a process of their own.

    Raises:
        UserError: If this host can't listen on one of the addresses, or lacks the backend.
    """

    def __init__(
        self,
        rank: int,
        outgoing: Sequence[ChannelSpec],
        incoming: Sequence[ChannelSpec],
        settings: TransportSettings | None = None,
    ) -> None:
        _check_directions(rank, outgoing, incoming)
        settings = settings or TransportSettings()
        check_backend(settings.backend)
        self._rank, self._settings = rank, settings
        self._member = rank if settings.member is None else settings.member
        self._state: dict[str, Record] = {}  # the last record of each kind, for the next sidecar
        self._gone: dict[int, str] = {}
        self._met: set[int] = set()
        self._connects = 0
        self._peers_lock = threading.RLock()  # guards what is known of peers since the last connect
        self._closed = self._failed = False
        try:
            self._open(outgoing, incoming, settings)
        except OSError as error:
            raise UserError(
                f"rank {self._member} can't open its data plane on "
                f"{', '.join(settings.addresses)}: {error}"
            ) from error

    def _open(
        self,
        outgoing: Sequence[ChannelSpec],
        incoming: Sequence[ChannelSpec],
        settings: TransportSettings,
    ) -> None:
        with contextlib.ExitStack() as undo:
            self._doorbell = Doorbell.create()
            undo.callback(self._doorbell.close)
            self._listeners = _listen_on(settings.addresses)
            undo.callback(lambda: [listener.close() for listener in self._listeners])
            undo.callback(lambda: [end.close() for end in self._ends()])
            super().__init__(outgoing, incoming, settings.first_sequence, self._doorbell.ring)
            self._sidecar = SidecarProcess(
                self._set_up, self._handle, self._fail, settings.silent_s, settings.number
            )
            self._undo = undo.pop_all()

    @property
    def sidecar_pid(self) -> int:
        """The id of the sidecar's process; it changes with a restart."""
        return self._sidecar.pid

    def addresses(self) -> list[Address]:
        """Where peers reach this rank: one host and port for each network card."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def connect(self, peers: Mapping[int, Sequence[Address]], secret: bytes) -> None:
        """Connect to peers; returns at once."""
        with self._peers_lock:
            self._connects += 1
            number = self._connects
            for rank in peers:
                self._gone.pop(rank, None)
                self._met.discard(rank)
            for end in self._ends():
                if end.peer in peers:
                    end.recover()
        addresses = {str(rank): [list(address) for address in at] for rank, at in peers.items()}
        record = {"kind": "connect", "number": number, "peers": addresses, "secret": secret.hex()}
        with self._sidecar.changing:
            self._state["connect"] = record
            self._sidecar.send(record)

    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        """Replace the emulated conditions, for all messages posted from now on."""
        record = {
            "kind": "emulate",
            "conditions": [_described(each) for each in conditions if self._rank in each.between],
            "origin_s": time.monotonic() if origin_s is None else origin_s,
        }
        with self._sidecar.changing:
            self._state["emulate"] = record
            # A request, so that the sidecar emulates before the caller posts its next message.
            self._sidecar.request(record, (), _ANSWER_S)

    def statistics(self) -> dict[str, Any]:
        """Counts and rates of each peer and lane; none while the sidecar is being restarted."""
        answer = self._sidecar.request({"kind": "statistics"}, (), _ANSWER_S) or {}
        return {"generation": self._sidecar.generation, **answer.get("statistics", {})}

    def break_lanes(self, peer: int, lane: int | None = None) -> None:
        """Break the connections to and from a peer, or one of them, for tests and benchmarks."""
        self._sidecar.send({"kind": "break_lanes", "peer": peer, "lane": lane})

    def flush(self, deadline_s: float) -> None:
        """Wait until messages are delivered, their receivers are gone, or the deadline passes."""
        for end in self._outgoing.values():
            if "connect" in self._state:
                end.doorbell.wait_until(lambda end=end: self._is_flushed(end), deadline_s)

    def close(self, *, flush: bool = True) -> None:
        """Deliver what can be delivered soon, end the sidecar and free the memory."""
        if self._closed:
            return
        self._closed = True
        if flush:
            self.flush(time.monotonic() + FLUSH_S)
        self._sidecar.close()
        self._undo.close()

    def _resize(self, end: OutgoingEnd | IncomingEnd, num_slots: int, deadline_s: float) -> None:
        new = Slots.create(num_slots, end.slots.slot_bytes, end.slots.consumed)
        with self._sidecar.changing:
            record = {"kind": "resize", **_channel_record(end, new)}
            left_s = max(deadline_s - time.monotonic(), _ANSWER_S)
            answer = self._sidecar.request(record, (new.fd,), left_s)
            if answer is None:
                self._sidecar.kill()  # it may use either memory; the next gets the right one
            if not end.at_rest() or (answer is not None and "error" in answer):
                new.close()
                raise NotAtRestError(f"{end.name} is not at rest: its slots can't change now")
            end.replace_slots(new)

    def _is_flushed(self, end: OutgoingEnd) -> bool:
        delivered = end.slots.consumed == end.slots.produced
        return delivered or end.peer in self._gone or self._failed

    def _set_up(self, generation: int) -> list[RecordWithFds]:
        start = {
            "kind": "start",
            "rank": self._rank,
            "generation": generation,
            "settings": {**asdict(self._settings), "member": self._member},
        }
        listeners = (listener.fileno() for listener in self._listeners)
        fds = (progress.share(), self._doorbell.fileno(), *listeners)
        records: list[RecordWithFds] = [(start, fds)]
        for end in self._ends():
            record = {"kind": "channel", **_channel_record(end, end.slots)}
            records.append((record, (end.slots.fd, end.doorbell.fileno())))
        # `emulate` first: posted messages leave as soon as the peers are known.
        records.extend(
            (self._state[kind], ()) for kind in ("emulate", "connect") if kind in self._state
        )
        with self._peers_lock:
            records.append(({"kind": "met", "peers": sorted(self._met)}, ()))
        return records

    def _handle(self, record: Record) -> None:
        number = record.pop("connect_number", None)
        if record["kind"] == "peer_refuses":
            # The peer's trainer holds its listening sockets: it is gone, or the path refuses.
            if record["peer"] in self._gone or self.peer_lives(record["peer"]):
                return
            record = {**record, "kind": "peer_gone", "reason": "its address refuses connections"}
        self._report(record)
        if record["kind"] == "sidecar_restarted":
            for end in self._ends():
                end.doorbell.ring()  # the dead one may have changed a count without ringing
            return
        with self._peers_lock:
            if number != self._connects:
                return  # it concerns the peers of an earlier connect
            if record["kind"] == "lane_up":
                self._met.add(record["peer"])
            elif record["kind"] == "peer_gone":
                self.lose(record["peer"], record["reason"])
        if record["kind"] == "peer_gone":
            self.on_gone(record["peer"], record["reason"])

    def lose(self, rank: int, reason: str) -> None:
        """End all waits for a peer that is gone, now and until the next `connect`."""
        with self._peers_lock:
            self._gone[rank] = reason
            super().lose(rank, reason)

    def _fail(self, error: TransportError) -> None:
        self._failed = True
        for end in self._ends():
            end.fail(error)


def _listen_on(hosts: Sequence[str]) -> list[socket.socket]:
    """A non-blocking listening socket on each address, on ports that the system chooses."""
    listeners: list[socket.socket] = []
    try:
        for host in hosts:
            listener = socket.socket(family_of(host), socket.SOCK_STREAM)
            listeners.append(listener)
            listener.bind((host, 0))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _channel_record(end: OutgoingEnd | IncomingEnd, slots: Slots) -> Record:
    return {
        "channel": list(end.name),
        "outgoing": isinstance(end, OutgoingEnd),
        "num_slots": slots.num_slots,
        "slot_bytes": slots.slot_bytes,
    }


def _described(condition: LinkCondition) -> Record:
    """A condition as a record, without defaults: a trace has thousands of conditions."""
    defaults = vars(LinkCondition(condition.between))
    others = {name: value for name, value in vars(condition).items() if value != defaults[name]}
    return {"between": condition.between, **others}


def _check_directions(
    rank: int, outgoing: Sequence[ChannelSpec], incoming: Sequence[ChannelSpec]
) -> None:
    for spec in outgoing:
        if spec.name.source != rank or spec.name.destination == rank:
            raise TransportError(f"{spec.name} can't be an outgoing channel of rank {rank}")
    for spec in incoming:
        if spec.name.destination != rank or spec.name.source == rank:
            raise TransportError(f"{spec.name} can't be an incoming channel of rank {rank}")
