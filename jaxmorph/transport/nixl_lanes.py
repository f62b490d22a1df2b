"""Lanes on which the sender writes chunks into the receiver's memory by RDMA, through NIXL.

Each is a TCP lane with a NIXL agent at both ends, bound to the lane's network card. The TCP
connection carries frames and short chunks as usual; a long chunk takes four steps:

====================  ==========================================================================
the sender            the receiver
====================  ==========================================================================
`Offer`               decides the place, as for any chunk: the slot; or, if another lane is
                      writing this chunk, memory of the lane's own
                      `Grant`: the place's address
writes; `Written`     compares the checksum of what was written
                      `Acknowledge`, as for any chunk
====================  ==========================================================================

A sender writes only with a grant, and at most one lane has a grant for a place in a slot. But a
granted write can't be revoked: if a network holds it up, it may arrive after the slot has been
reused. So when another lane brings the chunk first, the slow lane's receiving agent is torn down
before the message is handed over (`fence`).
"""

import contextlib
import importlib
import importlib.util
import itertools
import logging
import math
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jaxmorph.transport.host import interface_address
from jaxmorph.transport.incoming import IncomingChunk, Place
from jaxmorph.transport.lanes import ChecksumError, ChunkHandler, LaneError, PayloadMac, TcpLane
from jaxmorph.transport.wire import (
    MAX_PART_BYTES,
    TO_WRITER,
    TO_WRITTEN,
    AgentPart,
    Chunk,
    FrameError,
    Grant,
    Offer,
    Written,
)

MODULES = ("nixl_cu12", "nixl_cu13")
_NETWORK_CLASS = Path("/sys/class/net")
_DEVICES, _TRANSPORTS = "UCX_NET_DEVICES", "UCX_TLS"
_FENCED_TRANSPORTS = "^tcp,sm"
_NO_RDMA = (
    "UCX finds no RDMA on the network card of {host} (UCX_TLS=tcp emulates it, for networks on "
    "which everyone is trusted)"
)
_numbers = itertools.count()


def missing() -> str | None:
    """Why NIXL is unavailable here; None: it is available."""
    if any(importlib.util.find_spec(name) for name in MODULES):
        return None
    return f"none of the packages {', '.join(each.replace('_', '-') for each in MODULES)} is here"


class NixlAgent:
    """Lets peers write into this process's memory, and writes into theirs, by one network card.

    NIXL is NVIDIA's library over UCX. It comes as `nixl-cu12` or `nixl-cu13`; neither needs CUDA or
    PyTorch for host memory. Agents run without their progress thread, which would keep a core busy
    even when idle. No method waits.

    Raises:
        LaneError: If UCX can't use that card, or NIXL isn't here.
    """

    def __init__(self, host: str) -> None:
        module = _module()
        self._name = f"jaxmorph-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        settings = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        with _as_lane_errors(_NO_RDMA.format(host=host)), _chosen_devices(host):
            self._agent: Any = module.nixl_agent(self._name, settings)
            self._agent.create_backend("UCX", {"num_workers": "1"})
        self._memory: list[Any] = []
        self._peers: list[str] = []
        self._writes: set[Any] = set()

    def register(self, address: int, num_bytes: int) -> None:
        """Register memory for this agent's writes, and for those of peers with the `metadata`."""
        with _as_lane_errors("registering memory"):
            region = [(address, num_bytes, 0, "")]
            self._memory.append(self._agent.register_memory(region, "DRAM"))

    def metadata(self) -> bytes:
        """What a peer needs to write into the memory registered so far."""
        with _as_lane_errors("describing memory"):
            return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer by its metadata; returns its name."""
        with _as_lane_errors("a peer's description"):
            peer = self._agent.add_remote_agent(metadata)
        name = peer.decode() if isinstance(peer, bytes) else peer
        self._peers.append(name)
        return name

    def write(self, peer: str, source: int, destination: int, num_bytes: int) -> Any:
        """Begin to write from registered memory; returns a handle for `is_done`."""
        agent = self._agent
        with _as_lane_errors("writing"):
            write = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([(source, num_bytes, 0)], "DRAM"),
                agent.get_xfer_descs([(destination, num_bytes, 0)], "DRAM"),
                peer,
            )
            self._writes.add(write)
            if agent.transfer(write) == "ERR":
                raise LaneError("writing failed")
        return write

    def is_done(self, write: Any) -> bool:
        """Whether a write is complete in the peer's memory; don't ask again after True."""
        with _as_lane_errors("writing"):
            state = self._agent.check_xfer_state(write)
            if state == "PROC":
                return False
            self._writes.discard(write)
            write.release()
        if state != "DONE":
            raise LaneError("writing failed")
        return True

    def progress(self) -> None:
        """Advance peers' writes: network cards without RDMA need this call."""
        with _as_lane_errors("receiving"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Close the agent; after this nothing is written into this memory or read from it.

        The order matters: this agent's writes are cancelled, or cut off with their peer; the card
        forgets the memory; the agent's connections end with the agent.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for write in self._writes:
            with contextlib.suppress(Exception):
                write.release()
        self._writes.clear()
        for peer in self._peers:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(peer)
        for region in self._memory:
            with contextlib.suppress(Exception):
                agent.deregister_memory(region)
        self._peers.clear()
        self._memory.clear()


def device_of(host: str, network_class: Path = _NETWORK_CLASS) -> str:
    """UCX's name of the network card with an address: `mlx5_0:1`, or `eth0` if it has no RDMA.

    Raises:
        LaneError: If no interface has that IPv4 address.
    """
    name = _interface_of(host)
    adapters = network_class / name / "device" / "infiniband"
    if not adapters.is_dir():
        return name
    port = 1 + int((network_class / name / "dev_port").read_text())
    return f"{min(each.name for each in adapters.iterdir())}:{port}"


def _interface_of(host: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if host.startswith("127.") and "lo" in names:
        return "lo"
    for name in names:
        if interface_address(name) == host:
            return name
    raise LaneError(f"no network interface has the address {host}; UCX_NET_DEVICES can name one")


@contextlib.contextmanager
def _chosen_devices(host: str) -> Iterator[None]:
    """Sets the environment in which UCX creates a backend: the card, and forbidden transports.

    Unless the user has chosen transports, two kinds are left out. Those over shared memory write
    into this process even after it deregisters memory, so they can't be fenced. And UCX's emulation
    over TCP writes wherever a connection asks it to, and anyone can connect.
    """
    chosen = {_DEVICES: os.environ.get(_DEVICES), _TRANSPORTS: os.environ.get(_TRANSPORTS)}
    os.environ[_DEVICES] = chosen[_DEVICES] or device_of(host)
    os.environ[_TRANSPORTS] = chosen[_TRANSPORTS] or _FENCED_TRANSPORTS
    try:
        yield
    finally:
        for name, value in chosen.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _as_lane_errors(what: str) -> Iterator[None]:
    """NIXL's errors have no common base class; each of them costs only the lane."""
    try:
        yield
    except LaneError:
        raise
    except Exception as error:
        raise LaneError(f"{what}: {type(error).__name__} {error}") from error


def _module() -> ModuleType:
    for name in MODULES:
        with contextlib.suppress(ImportError):
            os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
            module = importlib.import_module(f"{name}._api")
            logging.getLogger(f"{name}._api").setLevel(logging.WARNING)
            return module
    raise LaneError(missing() or "NIXL can't be loaded: its libraries don't fit this system")


MIN_WRITTEN_BYTES = 16 * 1024
"""Shorter chunks go over TCP, in fewer steps."""
MAX_GRANTS = 8
"""How many chunks a sender may be writing on a lane at once."""
_MAX_OFFERS = 1 << 15  # the most that a sender has in flight, in the shortest chunks
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 30e-6, 1e-3
_BROKEN = "fenced: another lane was quicker"


class _NixlLane:
    """The common part of both ends. Writes wake no thread, so the lane must be polled.

    Args:
        control: The lane's TCP connection, after its handshake; `close` closes it.

    Raises:
        LaneError: If its network card can't be used.
    """

    def __init__(self, control: TcpLane) -> None:
        self.control = control
        self.fileno, self.enqueue, self.flush = control.fileno, control.enqueue, control.flush
        self.abort, self.finish_sending = control.abort, control.finish_sending
        self.discard_received = control.discard_received
        self._agent = NixlAgent(control.local_host)
        self.poll_s = math.inf
        self._progress_s = 0.0
        self.written_bytes = 0

    @property
    def is_busy(self) -> bool:
        return self.control.is_busy

    @property
    def mask(self) -> int:
        return self.control.mask

    @property
    def sent_bytes(self) -> int:
        return self.control.sent_bytes

    def register(self, memory: memoryview) -> None:
        self._agent.register(_address_of(memory), len(memory))

    def close(self) -> None:
        self._agent.close()
        self.control.close()

    def _pause(self, is_moving: bool) -> None:
        """Set when to poll again: soon after progress, then less and less often.

        The process sleeps in between, if only for a moment: where cores are short, the scheduler
        puts a spinning process behind all others, and its peer waits for it.
        """
        now_s = time.monotonic()
        pause_s = min(max((now_s - self._progress_s) / 4, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self.poll_s = now_s + pause_s if is_moving else math.inf


class NixlSendingLane(_NixlLane):
    """The end that offers and writes chunks."""

    def __init__(self, control: TcpLane, chunk_bytes: int) -> None:
        super().__init__(control)
        self._min_bytes = min(MIN_WRITTEN_BYTES, chunk_bytes)
        self._peer: str | None = None
        self._description = bytearray()
        self._offers: deque[tuple[Chunk, memoryview]] = deque()
        self._writes: deque[tuple[Grant, Any]] = deque()

    def open(self) -> None:
        """Accept the receiver's description of its memory."""
        self.control.reader.accept(TO_WRITER)

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Begin to send a chunk; returns whether another may follow at once."""
        if self._peer is None or chunk.length < self._min_bytes:
            return self.control.post(chunk, payload)
        self._offers.append((chunk, payload))
        self.enqueue(Offer(*chunk[:-1], checksum=self.control.checksum(payload)))
        return self.flush()

    def poll(self, mask: int, handler: ChunkHandler | None) -> list[Any]:
        """See `TcpLane.poll`."""
        frames = []
        for frame in self.control.poll(mask, handler) if mask else ():
            if type(frame) is Grant:
                self._write(frame)
            elif type(frame) is AgentPart:
                self._add_part(frame)
            else:
                frames.append(frame)
        self._report_written()
        self._pause(bool(self._writes))
        return frames

    def fence(self, chunk: IncomingChunk) -> None:
        """Nothing: this end receives no chunks."""

    def close(self) -> None:
        """Close the connection; drops what hasn't been written."""
        super().close()
        self._offers.clear()
        self._writes.clear()

    def _add_part(self, part: AgentPart) -> None:
        if part.offset != len(self._description) or self._peer is not None:
            raise FrameError(
                f"a part of a description at {part.offset}, expected {len(self._description)}"
            )
        self._description += part.data
        if len(self._description) == part.total:
            self._peer = self._agent.add_peer(bytes(self._description))

    def _write(self, grant: Grant) -> None:
        chunk, payload = self._offers.popleft() if self._offers else (None, memoryview(b""))
        if chunk is None or _place_of(chunk) != grant[:3] or self._peer is None:
            raise FrameError(f"a grant of {grant[:3]}, which wasn't offered next")
        source = _address_of(payload)
        write = self._agent.write(self._peer, source, grant.address, chunk.length)
        self._writes.append((grant, write))
        self.written_bytes += chunk.length
        self._progress_s = time.monotonic()

    def _report_written(self) -> None:
        reported = False
        while self._writes and self._agent.is_done(self._writes[0][1]):
            grant, _ = self._writes.popleft()
            self.enqueue(Written(*grant[:3]))
            reported = True
        if reported:
            self._progress_s = time.monotonic()
            self.flush()


class _Granted(NamedTuple):
    """A chunk that the sender may write, and its place."""

    offer: Offer
    chunk: IncomingChunk
    memory: memoryview


class NixlReceivingLane(_NixlLane):
    """The end that grants places and acknowledges what is written there."""

    def __init__(self, control: TcpLane, chunk_bytes: int) -> None:
        super().__init__(control)
        self._chunk_bytes = chunk_bytes
        # `PayloadMac` keeps state, and a chunk on the TCP connection may be half received.
        own = control.checksum
        self.checksum = PayloadMac(own.key) if isinstance(own, PayloadMac) else own
        # The lane's own memory outlives its agent: views of it keep it mapped.
        self._own = memoryview(mmap.mmap(-1, 2 * chunk_bytes))
        self._aside, self._junk = self._own[:chunk_bytes], self._own[chunk_bytes:]
        self._offers: deque[Offer] = deque()
        self._next: tuple[Offer, IncomingChunk] | None = None
        self._granted: deque[_Granted] = deque()
        self._is_broken = False

    def open(self) -> None:
        """Send the sender a description of the memory registered so far, and the lane's own."""
        self.register(self._own)
        self.control.reader.accept(TO_WRITTEN)
        description = self._agent.metadata()
        for offset in range(0, len(description), MAX_PART_BYTES):
            part = description[offset : offset + MAX_PART_BYTES]
            self.enqueue(AgentPart(len(description), offset, part))

    def post(self, chunk: Chunk, payload: memoryview) -> bool:
        """Not possible at this end."""
        raise LaneError("chunks go to the receiver, not from it")

    def poll(self, mask: int, handler: ChunkHandler | None) -> list[Any]:
        """See `TcpLane.poll`."""
        if self._is_broken or handler is None:
            raise LaneError(_BROKEN)
        frames = []
        for frame in self.control.poll(mask, handler) if mask else ():
            if type(frame) is Offer:
                self._take_offer(frame)
            elif type(frame) is Written:
                self._finish(frame, handler)
            else:
                frames.append(frame)
        self._grant(handler)
        if self._granted:
            self._agent.progress()
        self._pause(bool(self._granted))
        return frames

    def fence(self, chunk: IncomingChunk) -> None:
        """Tear the lane down if its sender may be writing that chunk."""
        if any(granted.chunk is chunk for granted in self._granted):
            self._is_broken = True
            self._agent.close()
            self._granted.clear()
            self.poll_s = math.inf
            self.control.abort()

    def close(self) -> None:
        """Close the connection; after this nothing is written through it."""
        super().close()
        self._granted.clear()
        self._offers.clear()
        self._next = None

    def _grant(self, handler: ChunkHandler) -> None:
        """Answer offers in the order in which they came."""
        while len(self._granted) < MAX_GRANTS and (self._next or self._offers):
            if self._next is None:
                offer = self._offers.popleft()
                self._next = offer, handler.begin(Chunk(*offer))
            offer, chunk = self._next
            if chunk.place is Place.ASIDE and any(
                granted.chunk.place is Place.ASIDE for granted in self._granted
            ):
                return  # there is memory aside for one chunk only
            self._next = None
            memory = self._memory_for(chunk, handler)
            self._granted.append(_Granted(offer, chunk, memory))
            self.enqueue(Grant(*_place_of(offer), _address_of(memory)))
            self._progress_s = time.monotonic()
        self.flush()

    def _take_offer(self, offer: Offer) -> None:
        if len(self._offers) >= _MAX_OFFERS:
            raise FrameError(f"more than {_MAX_OFFERS} chunks offered and not written")
        if not 0 < offer.length <= self._chunk_bytes:
            raise FrameError(f"{offer.length} bytes offered, expected at most {self._chunk_bytes}")
        self._offers.append(offer)

    def _memory_for(self, chunk: IncomingChunk, handler: ChunkHandler) -> memoryview:
        if chunk.place is Place.SLOT:
            return handler.memory(chunk)
        return (self._aside if chunk.place is Place.ASIDE else self._junk)[: chunk.length]

    def _finish(self, written: Written, handler: ChunkHandler) -> None:
        granted = self._granted.popleft() if self._granted else None
        if granted is None or _place_of(granted.offer) != written:
            raise FrameError(f"{written[:3]} is written, which wasn't granted next")
        offer, chunk, memory = granted
        self._progress_s = time.monotonic()
        if chunk.is_wanted and self.checksum(memory) != offer.checksum:
            raise ChecksumError(
                f"{chunk.channel} message {chunk.sequence}: wrong checksum at {chunk.offset}"
            )
        handler.finish(chunk, memory)


def _place_of(chunk: Chunk | Offer) -> tuple[Any, int, int]:
    return chunk.channel, chunk.sequence, chunk.offset


def _address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
