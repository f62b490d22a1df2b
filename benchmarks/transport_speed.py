"""The data plane's speed beside raw sockets: `python -m benchmarks.transport_speed [--out FILE]`.

Two processes, and a sidecar of each, on one machine. Throughput: messages of 1, 16 and 64 MB, from
shared memory to shared memory, against Python sockets that do nothing else, and a copy in memory.
Latency: half of the way there and back of 1 to 64 KB. All are measured in turn, in rounds, so that
other work on the machine slows down all alike.
"""

import argparse
import contextlib
import multiprocessing
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.results import Bar, finish, provenance
from jaxmorph.compare.provenance import load_averages
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, PayloadChecks, TransportSettings
from jaxmorph.transport.slots import Slots

MB, KB = 1 << 20, 1 << 10
LARGE, SMALL = (MB, 16 * MB, 64 * MB), (KB, 4 * KB, 16 * KB, 64 * KB)
LARGEST, NUM_SLOTS = 64 * MB, 4
SHORTEST, NUM_SHORT_SLOTS = MB, 16  # messages up to this length have slots of their own
LAP_BYTES, LAP_MESSAGES = 256 * MB, 200
CHUNK_BYTES = 512 * KB  # what is quickest where both ends share a machine's cache
LONG, SHORT = 1, 2
THROUGHPUT_BAR, LATENCY_BAR = 0.9, 3.0
PATIENCE_S = 120.0

Measures = dict[str, Callable[[int], float]]


class Raw:
    """A TCP connection and shared memory at one end of it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._slots = connection, Slots.create(NUM_SLOTS, LARGEST)
        for number in range(NUM_SLOTS):
            self._slots.payload(number)[:] = 1
        self._number = 0

    def send(self, num_bytes: int) -> None:
        """Send a message from the next slot."""
        self._socket.sendall(self._next(num_bytes))

    def receive(self, num_bytes: int) -> None:
        """Receive a message into the next slot."""
        memory = self._next(num_bytes)
        at = 0
        while at < num_bytes:
            at += self._socket.recv_into(memory[at:])

    def close(self) -> None:
        """End."""
        self._socket.close()

    def _next(self, num_bytes: int) -> memoryview:
        self._number = (self._number + 1) % NUM_SLOTS
        return self._slots.view(self._number, num_bytes)


class Planes:
    """One rank's data plane."""

    def __init__(self, plane: SidecarPlane, rank: int) -> None:
        self.plane, self._rank = plane, rank

    def there(self, num_bytes: int) -> ChannelName:
        """The channel that messages of this length leave on."""
        return ChannelName(SHORT if num_bytes <= SHORTEST else LONG, self._rank, 1 - self._rank)

    def back(self, num_bytes: int) -> ChannelName:
        """The channel that messages of this length come on."""
        return ChannelName(SHORT if num_bytes <= SHORTEST else LONG, 1 - self._rank, self._rank)

    def send(self, num_bytes: int) -> None:
        """Send a message whose payload is in its slot already."""
        slot = self.plane.reserve(self.there(num_bytes), time.monotonic() + PATIENCE_S)
        slot.post(num_bytes, ())
        slot.complete()

    def receive(self, num_bytes: int) -> None:
        """Receive a message and leave it where it is."""
        self.plane.take(self.back(num_bytes), time.monotonic() + PATIENCE_S).release()

    def close(self) -> None:
        """End."""
        self.plane.close()


End = Raw | Planes


@dataclass(frozen=True)
class Peer:
    """The other process, which does what this one sends it.

    Attributes:
        link: Where it gets its commands.
        ends: This process's ends of everything that is measured.
    """

    link: Connection
    ends: dict[str, End]

    def throughput(self, what: str, num_bytes: int) -> float:
        """Bytes per second of messages that are sent one after another."""
        count = max(2, LAP_BYTES // num_bytes)
        self.link.send(("receive", what, num_bytes, count))
        self.link.recv()
        began_s = time.monotonic()
        for _ in range(count):
            self.ends[what].send(num_bytes)
        return count * num_bytes / (self.link.recv() - began_s)

    def latency_s(self, what: str, num_bytes: int) -> float:
        """Median of half of the way there and back."""
        end = self.ends[what]
        self.link.send(("echo", what, num_bytes, LAP_MESSAGES))
        self.link.recv()
        times = []
        for _ in range(LAP_MESSAGES):
            began_s = time.monotonic()
            end.send(num_bytes)
            end.receive(num_bytes)
            times.append(time.monotonic() - began_s)
        self.link.recv()
        return median(times) / 2

    def parts(self, what: str, num_bytes: int, count: int) -> dict[str, float]:
        """Medians of where the time of a lone message goes, in seconds."""
        end = self.ends[what]
        assert isinstance(end, Planes)
        data = np.ones(num_bytes, np.uint8)
        self.link.send(("parts", what, num_bytes, count))
        self.link.recv()
        copies, posts = [], []
        for _ in range(count):
            slot = end.plane.reserve(end.there(num_bytes), time.monotonic() + PATIENCE_S)
            began_s = time.monotonic()
            slot.payload[:num_bytes] = data
            copied_s = time.monotonic()
            slot.post(num_bytes, ())
            slot.complete()
            copies.append(copied_s - began_s)
            posts.append(time.monotonic() - copied_s)
            end.receive(1)
        return {"copy in": median(copies), "post": median(posts), **self.link.recv()}


def serve(link: Connection, listening: Connection) -> None:
    """The other process: receives, echoes, and reports its times."""
    ends = _open_peer(link, listening)
    while True:
        todo = link.recv()
        if todo is None:
            break
        what, num_bytes, count = todo[1:]
        end = ends[what]
        link.send("ready")
        if todo[0] == "parts":
            link.send(_take_apart(end, num_bytes, count))
            continue
        for _ in range(count):
            end.receive(num_bytes)
            if todo[0] == "echo":
                end.send(num_bytes)
        link.send(time.monotonic())
    for end in ends.values():
        end.close()


def _take_apart(end: End, num_bytes: int, count: int) -> dict[str, float]:
    assert isinstance(end, Planes)
    into = np.ones(num_bytes, np.uint8)
    socket_and_land, signal, copies = [], [], []
    for _ in range(count):
        slot = end.plane.take(end.back(num_bytes), time.monotonic() + PATIENCE_S)
        taken_s = time.monotonic()
        into[:] = slot.payload
        copies.append(time.monotonic() - taken_s)
        # The two ranks' clocks are one here; the estimated offset would only add its error.
        socket_and_land.append(slot.received_s - slot.posted_s)
        signal.append(taken_s - slot.received_s)
        slot.release()
        end.send(1)
    return {
        "socket and land": median(socket_and_land),
        "signal": median(signal),
        "copy out": median(copies),
    }


def _planes(rank: int, checksum: PayloadChecks) -> SidecarPlane:
    def specs(source: int, destination: int) -> list[ChannelSpec]:
        return [
            ChannelSpec(ChannelName(LONG, source, destination), LARGEST, NUM_SLOTS),
            ChannelSpec(ChannelName(SHORT, source, destination), SHORTEST, NUM_SHORT_SLOTS),
        ]

    settings = TransportSettings(checksum=checksum, chunk_bytes=CHUNK_BYTES)
    return SidecarPlane(rank, specs(rank, 1 - rank), specs(1 - rank, rank), settings)


KINDS: dict[str, PayloadChecks] = {
    "sidecar": True, "sidecar, no checksum": False, "sidecar, mac": "mac",
}  # fmt: skip


def _open_peer(link: Connection, listening: Connection) -> dict[str, End]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listening.send(listener.getsockname()[1])
        ends: dict[str, End] = {"raw": Raw(listener.accept()[0])}
    for kind, checksum in KINDS.items():
        plane = _planes(1, checksum)
        link.send(plane.addresses())
        addresses, secret = link.recv()
        plane.connect({0: addresses}, secret)
        ends[kind] = Planes(plane, 1)
    return ends


@contextlib.contextmanager
def peer() -> Any:
    """Start the other process, and join everything to it."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    listening, reporting = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(theirs, reporting))
    process.start()
    address = ("127.0.0.1", listening.recv())
    ends: dict[str, End] = {"raw": Raw(socket.create_connection(address))}
    for kind, checksum in KINDS.items():
        plane, secret = _planes(0, checksum), secrets.token_bytes(32)
        plane.connect({1: link.recv()}, secret)
        link.send((plane.addresses(), secret))
        ends[kind] = Planes(plane, 0)
    try:
        yield Peer(link, ends)
    finally:
        link.send(None)
        for end in ends.values():
            end.close()
        process.join()


def memcpy_bytes_per_s(num_bytes: int) -> float:
    """A copy from one piece of shared memory to another."""
    slots = Slots.create(2, num_bytes)
    slots.payload(0)[:] = 1
    slots.payload(1)[:] = 2
    count = max(2, LAP_BYTES // num_bytes)
    began_s = time.monotonic()
    for _ in range(count):
        slots.payload(1)[:] = slots.payload(0)
    return count * num_bytes / (time.monotonic() - began_s)


def in_rounds(
    rounds: int, sizes: Sequence[int], measures: Measures
) -> dict[int, dict[str, list[float]]]:
    """All measures of all sizes, again and again; the first round only warms up."""
    found = {size: {name: [] for name in measures} for size in sizes}
    for at in range(rounds + 1):
        for size in sizes:
            for name, measure in measures.items():
                value = measure(size)
                if at:
                    found[size][name].append(value)
    return found


def _summary(values: dict[str, list[float]], scale: float) -> dict[str, dict[str, float]]:
    """Medians, and medians of the ratios to raw sockets in the same round."""
    return {
        name: {
            "median": round(scale * median(each), 3),
            "to_raw": _ratio(each, values["raw"]),
        }
        for name, each in values.items()
    }


def _ratio(values: Sequence[float], yardstick: Sequence[float]) -> float:
    return round(median(each / one for each, one in zip(values, yardstick, strict=True)), 3)


def _table(title: str, found: dict[int, dict[str, dict[str, float]]], unit: int) -> None:
    names = list(next(iter(found.values())))
    print(f"\n{title}\n{'':>10} " + " ".join(f"{name:>22}" for name in names))
    for size, row in found.items():
        cells = ("{median:.2f} ({to_raw:.2f})".format(**row[name]) for name in names)
        print(f"{size // unit:>10} " + " ".join(f"{cell:>22}" for cell in cells))


def _part_table(found: dict[str, dict[str, dict[str, float]]]) -> None:
    for kind, parts in found.items():
        print(f"\n{kind}: microseconds per message, and per MB beyond that")
        for part, cost in parts.items():
            print(f"{part:>18} {cost['us_per_message']:>10.1f} {cost['us_per_mb']:>10.1f}")


def _parts(peer_: Peer) -> dict[str, dict[str, dict[str, float]]]:
    """Fixed costs from 1 KB, costs per MB from what 16 MB take more."""
    found = {}
    for kind in KINDS:
        peer_.parts(kind, 16 * MB, NUM_SLOTS)  # touches all memory once
        small, large = peer_.parts(kind, KB, 200), peer_.parts(kind, 16 * MB, 20)
        found[kind] = {
            part: {
                "us_per_message": round(1e6 * small[part], 1),
                "us_per_mb": round(1e6 * (large[part] - small[part]) / 16, 1),
            }
            for part in small
        }
    return found


def main() -> int:
    """Measure, print tables, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = provenance("benchmarks.transport_speed")
    with peer() as other:
        kinds = ("raw", *KINDS)
        large: Measures = {name: partial(other.throughput, name) for name in kinds}
        large["memcpy"] = memcpy_bytes_per_s
        small: Measures = {name: partial(other.latency_s, name) for name in kinds}
        throughput = in_rounds(arguments.rounds, LARGE, large)
        latency = in_rounds(arguments.rounds, SMALL, small)
        parts = _parts(other)
    result |= {
        "load_after": load_averages(),
        "gb_per_s": {size: _summary(row, 1e-9) for size, row in throughput.items()},
        "one_way_us": {size: _summary(row, 1e6) for size, row in latency.items()},
        "parts": parts,
    }
    loads = "load {load_before[0]:.1f} before, {load_after[0]:.1f} after; {machine}"
    print(loads.format(**result))
    _table("GB/s by message size in MB (ratio to raw)", result["gb_per_s"], MB)
    _table(
        "one-way microseconds by message size in KB (ratio to raw)",
        result["one_way_us"],
        KB,
    )
    _part_table(parts)
    return finish([*_bars(result)], arguments.out, result)


def _bars(result: dict[str, Any]) -> Iterator[Bar]:
    for size, row in result["gb_per_s"].items():
        ratio = row["sidecar"]["to_raw"]
        yield Bar(f"throughput over raw sockets, {size // MB} MB", ratio, at_least=THROUGHPUT_BAR)
    for size, row in result["one_way_us"].items():
        ratio = row["sidecar"]["to_raw"]
        yield Bar(f"latency over raw sockets, {size // KB} KB", ratio, at_most=LATENCY_BAR)


if __name__ == "__main__":
    sys.exit(main())
