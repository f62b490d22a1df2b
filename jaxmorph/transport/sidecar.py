"""The process that moves a rank's delegated data: `python -m jaxmorph.transport.sidecar FD`.

One thread and one loop serve the trainer's records and doorbell, new connections, lanes, and time.
Everything that must survive is in the trainer's memory: this process may be killed at any moment,
and the next one resumes from there. It ends with its trainer.
"""

import contextlib
import gc
import math
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.progress import (
    LOOK_S,
    OTHERS_WAIT_S,
    Page,
    continue_when_parent_ends,
    write_stacks_of,
)
from jaxmorph.transport.connecting import Acceptor, Identity
from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.event_loop import ON_CHANGE, READ, EventLoop
from jaxmorph.transport.lanes import LaneError, TcpLane
from jaxmorph.transport.link import NIXL, Lane, prepare_backend
from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.names import ChannelName, ProtocolError
from jaxmorph.transport.receiving_link import IncomingChannel, ReceivingLink
from jaxmorph.transport.sending_link import OutgoingChannel, SendingLink
from jaxmorph.transport.sidecar_process import Record, RecordReader, send_record
from jaxmorph.transport.slots import Slots
from jaxmorph.transport.wire import Introduce

_CHECK_S = 0.1
_REFUSED_S = 1.0  # before the trainer decides whether the peer is gone, or only its path
_GOODBYE_S = 0.3


class Sidecar:
    """One sidecar, serving the trainer at the other end of `control`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._records = RecordReader()
        self._loop = EventLoop()
        self._loop.add(control.fileno(), READ, self._read_records)
        self._outgoing: dict[ChannelName, OutgoingChannel] = {}
        self._incoming: dict[ChannelName, IncomingChannel] = {}
        self._sending: dict[int, SendingLink] = {}
        self._receiving: dict[int, ReceivingLink] = {}
        self._acceptor: Acceptor | None = None
        self._timed: list[ReceivingLink | Acceptor] = []
        self._gone: set[int] = set()
        self._strangers = self._connect_number = 0
        self._emulator: LinkEmulator | None = None
        self._ending: str | None = None
        self._checked_s = 0.0
        self._parent = os.getppid()
        self._polls = False
        self._page: Page | None = None
        self._looked_s = 0.0

    def run(self) -> None:
        """Move data until the trainer closes its data plane or ends."""
        while self._ending is None:
            until_s, exact_s = self._do_due(time.monotonic())
            self._loop.turn(until_s, exact_s)
        self._say_goodbye(self._ending)

    def _do_due(self, now_s: float) -> tuple[float, float]:
        """Do what is due; returns when to call this next, as `EventLoop.turn` takes it."""
        if now_s >= self._checked_s + _CHECK_S:
            self._check(now_s)
        exact_s = self._poll(now_s) if self._polls else math.inf
        next_s = self._checked_s + _CHECK_S
        for sending in self._sending.values():
            sending.after_reads(now_s)
            if sending.next_s < next_s:
                next_s = sending.next_s
            if sending.exact_s < exact_s:
                exact_s = sending.exact_s
        for timed in self._timed:
            if now_s >= timed.next_s:
                timed.turn(now_s)
            if timed.next_s < next_s:
                next_s = timed.next_s
        return next_s, exact_s

    def _poll(self, now_s: float) -> float:
        links = (*self._receiving.values(), *self._sending.values())
        return min((link.poll(now_s) for link in links), default=math.inf)

    def _check(self, now_s: float) -> None:
        """Check for counts changed without a ring, peers that refuse, and the trainer's end."""
        self._checked_s = now_s
        self._loop.turn(0.0)  # read the trainer's records before the messages it posted later
        self._look()
        for peer, sending in self._sending.items():
            receiving = self._receiving.get(peer)
            if sending.refused_for_s(now_s) > _REFUSED_S and not (receiving and receiving.is_up):
                sending.start_refusals_over()
                self._report("peer_refuses", peer=peer)
        if self._page is not None:
            self._page.beat(self._number)
            if now_s >= self._looked_s + LOOK_S:
                self._watch_trainer(self._page, now_s)
        if os.getppid() != self._parent:
            self._ending = "its trainer has ended"

    def _watch_trainer(self, page: Page, now_s: float) -> None:
        """Kill a trainer that makes no progress and can't end itself, such as a stopped one."""
        self._looked_s = now_s
        wait_s = OTHERS_WAIT_S + LOOK_S * (1 + self._number)  # after the launcher, one at a time
        stall = page.stalled(self._parent, now_s, wait_s)
        if stall is None or os.getppid() != self._parent:
            return
        member = self._settings["member"]
        print(f"error: rank {member} {stall}", file=sys.stderr, flush=True)  # noqa: T201
        write_stacks_of([self._parent])
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._parent, signal.SIGKILL)

    def _look(self) -> None:
        now_s = time.monotonic()
        for sending in self._sending.values():
            sending.look(now_s)
        for receiving in self._receiving.values():
            receiving.look()

    # Records from the trainer.

    def _read_records(self, mask: int) -> None:
        try:
            for record, fds in self._records.read(self._control):
                getattr(self, "_do_" + record.pop("kind"))(fds, **record)
        except EOFError:
            self._ending = self._ending or "its trainer has ended"

    def _do_start(
        self, fds: tuple[int, ...], rank: int, generation: int, settings: dict[str, Any]
    ) -> None:
        self._rank, self._generation, self._settings = rank, generation, settings
        self._number = settings["number"]
        try:
            prepare_backend(settings["backend"], settings["addresses"])
        except LaneError as error:
            sys.exit(f"jaxmorph sidecar of rank {settings['member']}: {error}")
        self._polls = settings["backend"] == NIXL
        page_fd, doorbell_fd, *listener_fds = fds
        self._page = Page(page_fd)
        os.close(page_fd)
        self._doorbell = Doorbell(doorbell_fd)
        self._listeners = [socket.socket(fileno=fd) for fd in listener_fds]
        self._loop.add(self._doorbell.fileno(), READ | ON_CHANGE, lambda mask: self._look())

    def _do_channel(
        self,
        fds: tuple[int, ...],
        channel: list[int],
        outgoing: bool,
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        name, slots = ChannelName(*channel), _mapped(fds[0], num_slots, slot_bytes)
        if outgoing:
            self._outgoing[name] = OutgoingChannel(name, slots, Doorbell(fds[1]))
        else:
            self._incoming[name] = IncomingChannel(name, slots, Doorbell(fds[1]))

    def _do_connect(
        self,
        fds: tuple[int, ...],
        number: int,
        peers: dict[str, list[tuple[str, int]]],
        secret: str,
    ) -> None:
        self._connect_number = number
        identity = Identity(
            self._rank,
            # Like a new sidecar, each connect starts incomplete messages over.
            self._generation + number - 1,
            bytes.fromhex(secret),
            self._settings["chunk_bytes"],
            self._settings["checksum"],
        )
        for link in (*self._sending.values(), *self._receiving.values()):
            link.close()
        self._sending.clear()
        self._receiving.clear()
        for peer, addresses in peers.items():
            self._join(identity, int(peer), [(host, port) for host, port in addresses])
        self._gone.clear()
        self._emulate()
        if self._acceptor is not None:
            self._acceptor.close()
        self._acceptor = Acceptor(
            self._loop, self._listeners, identity, self._welcome, self._reject
        )
        self._timed = [*self._receiving.values(), self._acceptor]
        self._look()

    def _do_met(self, fds: tuple[int, ...], peers: list[int]) -> None:
        """Note the peers of an earlier sidecar's lanes: one that refuses now may be gone."""
        for peer in peers:
            if peer in self._sending:
                self._sending[peer].was_up = True

    def _join(self, identity: Identity, peer: int, addresses: list[tuple[str, int]]) -> None:
        sending = SendingLink(
            self._loop,
            identity,
            peer,
            addresses,
            self._settings["addresses"],
            self._settings["lanes"],
            self._report,
            self._settings["backend"],
        )
        receiving = ReceivingLink(
            self._loop, self._rank, peer, self._report, self._settings["backend"]
        )
        for outgoing in self._outgoing.values():
            if outgoing.name.destination == peer:
                outgoing.start_over()
                sending.add_channel(outgoing)
        for incoming in self._incoming.values():
            if incoming.name.source == peer:
                receiving.add_channel(incoming)
        if sending.channels or receiving.channels:
            self._sending[peer], self._receiving[peer] = sending, receiving

    def _do_emulate(
        self,
        fds: tuple[int, ...],
        conditions: list[dict[str, Any]],
        origin_s: float,
        request: int | None = None,
    ) -> None:
        emulated = [
            LinkCondition(**{**each, "between": tuple(each["between"])}) for each in conditions
        ]
        self._emulator = LinkEmulator(emulated, origin_s) if emulated else None
        self._emulate()
        if request is not None:  # None: part of a new sidecar's set-up
            self._answer(request)

    def _emulate(self) -> None:
        for sending in self._sending.values():
            sending.engine.emulate(self._emulator)
            sending.next_s = 0.0

    def _do_resize(
        self,
        fds: tuple[int, ...],
        request: int,
        channel: list[int],
        outgoing: bool,
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        name = ChannelName(*channel)
        ends = self._outgoing if outgoing else self._incoming
        slots = _mapped(fds[0], num_slots, slot_bytes)
        link = self._sending.get(name.destination) if outgoing else self._receiving.get(name.source)
        try:
            if link is not None:
                link.resize(name, num_slots)
        except ValueError as error:
            slots.close()
            self._answer(request, error=str(error))
            return
        old, ends[name].slots = ends[name].slots, slots
        old.close()
        self._answer(request)

    def _do_statistics(self, fds: tuple[int, ...], request: int) -> None:
        peers = {
            str(peer): {
                "sending": sending.statistics(),
                "receiving": self._receiving[peer].statistics(),
            }
            for peer, sending in self._sending.items()
        }
        found = {"peers": peers, "strangers": self._strangers, "processor_s": time.process_time()}
        self._answer(request, statistics=found)

    def _do_break_lanes(self, fds: tuple[int, ...], peer: int, lane: int | None) -> None:
        if peer in self._sending:
            self._sending[peer].break_lanes(lane)
            self._receiving[peer].break_lanes(lane)

    def _do_close(self, fds: tuple[int, ...]) -> None:
        self._ending = "its trainer has closed its data plane"

    # Records to the trainer.

    def _answer(self, request: int, **answer: Any) -> None:
        self._send({"kind": "answer", "request": request, **answer})

    def _report(self, kind: str, **details: Any) -> None:
        if kind == "peer_gone":
            peer = details["peer"]
            if peer in self._gone:
                return
            self._gone.add(peer)
            self._sending[peer].give_up()
        self._send({"kind": kind, "connect_number": self._connect_number, **details})

    def _send(self, record: Record) -> None:
        try:
            send_record(self._control, record)
        except OSError:
            self._ending = self._ending or "its trainer has ended"

    # New connections.

    def _welcome(self, introduce: Introduce, lane: TcpLane) -> None:
        receiving = self._receiving.get(introduce.rank)
        try:
            if receiving is None:
                raise ProtocolError(f"rank {introduce.rank} has no channel to rank {self._rank}")
            receiving.add_lane(introduce.lane, lane, introduce.generation, introduce.chunk_bytes)
        except ProtocolError as error:
            lane.close()
            self._reject(str(error))

    def _reject(self, reason: str) -> None:
        self._strangers += 1
        if self._strangers == 1:
            print(  # noqa: T201
                f"jaxmorph sidecar of rank {self._settings['member']}: a connection was refused "
                f"({reason}); further ones are only counted",
                file=sys.stderr,
                flush=True,
            )

    # The end.

    def _say_goodbye(self, reason: str) -> None:
        """Announce to all peers that this rank is gone, and wait a moment for them to read it."""
        lanes: list[Lane] = []
        for link in (*self._sending.values(), *self._receiving.values()):
            lanes += link.send_goodbye(reason)
        until_s = time.monotonic() + _GOODBYE_S
        while lanes and time.monotonic() < until_s:
            lanes = [lane for lane in lanes if not _has_left(lane)]
            time.sleep(1e-3)


def _mapped(fd: int, num_slots: int, slot_bytes: int) -> Slots:
    """A channel's slots; the trainer keeps their descriptor."""
    slots = Slots(fd, num_slots, slot_bytes)
    slots.close_fd()
    return slots


def _has_left(lane: Lane) -> bool:
    """Send what is left; returns whether the peer has closed, or the lane has failed."""
    try:
        if lane.flush():
            lane.finish_sending()
        lane.discard_received()
    except OSError:
        return True
    return False


def main() -> None:
    """Serve the trainer at the other end of the descriptor given as the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    continue_when_parent_ends()
    # Each channel and each lane needs descriptors.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()
    Sidecar(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
