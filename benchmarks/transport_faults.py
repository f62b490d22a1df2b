"""Messages over a link that fails all the time: `python -m benchmarks.transport_faults`.

Two ranks with real sidecars exchange 10,000 messages while at least 300 faults happen: the link is
cut, healed, throttled, delayed; connections are reset in the middle of chunks; sidecars are killed.
Every message must arrive once, in order, with the same bytes. Then frames that were tampered with
are sent to a live sidecar, which must go on working.
"""

import argparse
import json
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.leftovers import resident_bytes
from benchmarks.results import provenance, write_json
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.connecting import sign_introduction, transcript
from jaxmorph.transport.link import BACKENDS, TCP
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, TransportSettings
from jaxmorph.transport.secret import Check, new_nonce, plain_check, seals
from jaxmorph.transport.wire import (
    TO_DIALLER,
    Acknowledge,
    Challenge,
    Chunk,
    Credit,
    FrameReader,
    Gone,
    Introduce,
    Ping,
    Pong,
    Welcome,
    pack,
)

CHANNELS = (ChannelName(1, 0, 1), ChannelName(1, 1, 0), ChannelName(2, 0, 1))
SLOT_BYTES, NUM_SLOTS, CHUNK_BYTES = 400_000, 4, 16_384
PATIENCE_S = 60.0
KILLS_APART_S = 13.0  # a sidecar is started again five times a minute
_MOST_BYTES = 256 << 20
FAULTS = ("cut", "throttle", "delay", "reset", "reset", "reset", "kill")


def content(channel: ChannelName, number: int, seed: int) -> np.ndarray:
    """A message's payload: mostly short, sometimes many chunks, sometimes empty."""
    rng = np.random.default_rng((seed, *channel, number))
    longest = (0, 100, 5_000, 60_000, SLOT_BYTES)[rng.choice(5, p=(0.05, 0.4, 0.3, 0.2, 0.05))]
    return rng.integers(0, 256, rng.integers(0, longest + 1), np.uint8)


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        received: Messages that were correct.
        wrong: What was wrong, in words; empty in the end.
        faults: How many of each kind.
        seconds: How long it took.
        longest_gap_s: The longest time between two messages of a channel.
    """

    received: int = 0
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_gap_s: float = 0.0


class FaultyLink:
    """Two connected planes, and faults of their connections and sidecars.

    Args:
        backend: What carries long messages, "tcp" or "nixl".
    """

    def __init__(self, seed: int, backend: str = TCP) -> None:
        specs = [ChannelSpec(name, SLOT_BYTES, NUM_SLOTS) for name in CHANNELS]
        settings = TransportSettings(
            first_sequence=2**32 - 50,
            chunk_bytes=CHUNK_BYTES,
            lanes=None if backend == TCP else 2,  # so that one can take over from another
            backend=backend,
        )
        self.planes = [
            SidecarPlane(
                rank,
                [each for each in specs if each.name.source == rank],
                [each for each in specs if each.name.destination == rank],
                settings,
            )
            for rank in (0, 1)
        ]
        self.secret = secrets.token_bytes(32)
        for rank, plane in enumerate(self.planes):
            plane.connect({1 - rank: self.planes[1 - rank].addresses()}, self.secret)
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._killed_s = [-KILLS_APART_S, -KILLS_APART_S]

    @property
    def num_faults(self) -> int:
        """The number of faults so far."""
        return sum(self.done.values()) - self.done["heal"]

    def harm(self, fault: str) -> None:
        """Inject a fault at a random rank."""
        rank = self._random.randrange(2)
        if fault == "kill":
            if time.monotonic() < self._killed_s[rank] + KILLS_APART_S:
                return
            self._killed_s[rank] = time.monotonic()
            os.kill(self.planes[rank].sidecar_pid, signal.SIGKILL)
        elif fault == "reset":
            self.planes[rank].break_lanes(1 - rank, self._random.choice((None, 0, 1)))
        else:
            self.planes[rank].emulate(self._conditions(fault))
        self.done[fault] += 1

    def heal(self) -> None:
        """Remove the emulated conditions of the link."""
        for rank in (0, 1):
            self.planes[rank].emulate([])
        self.done["heal"] += 1

    def close(self) -> None:
        """End both ranks."""
        for plane in self.planes:
            plane.close()

    def _conditions(self, fault: str) -> list[LinkCondition]:
        if fault == "cut":
            return [LinkCondition((0, 1), cut=True)]
        if fault == "throttle":
            return [LinkCondition((0, 1), bandwidth_mbps=self._random.choice((20.0, 100.0)))]
        return [LinkCondition((0, 1), latency_ms=self._random.uniform(1, 30), jitter_ms=3.0)]


@dataclass
class Exchange:
    """Messages on all channels at once, while faults happen.

    Attributes:
        count: Of the messages of each channel.
        seed: Of messages and faults.
        allowed: How many messages of each channel may be sent by now.
    """

    link: FaultyLink
    count: int
    seed: int
    outcome: Outcome = field(default_factory=Outcome)
    allowed: int = 0
    progress: threading.Condition = field(default_factory=threading.Condition)

    def harm(self, num_faults: int, log: Callable[[str], None]) -> None:
        """Let messages be sent in portions, with a fault in the midst of each, healed soon after.

        Args:
            num_faults: At least so many happen before the last message is sent.
            log: Called with a line now and then.
        """
        rng, link, outcome = random.Random(self.seed), self.link, self.outcome
        while self.allowed < self.count and not outcome.wrong:
            faults = link.num_faults
            share = (faults + 2) / (num_faults + 2)
            with self.progress:
                # The portion before this one has arrived for the most part.
                self.progress.wait_for(
                    lambda: outcome.wrong or outcome.received >= 0.9 * len(CHANNELS) * self.allowed,
                    PATIENCE_S,
                )
                self.allowed = min(self.count, max(self.allowed + 1, int(share * self.count)))
                self.progress.notify_all()
            time.sleep(rng.uniform(0, 0.02))  # anywhere in the middle of a message
            fault = rng.choice(FAULTS)
            link.harm(fault)
            if fault in ("cut", "throttle", "delay"):
                time.sleep(rng.uniform(0.02, 0.3))
                link.heal()
            if faults // 50 != link.num_faults // 50:
                log(f"{outcome.received} messages, {dict(link.done)}")

    def send(self, name: ChannelName) -> None:
        """Send a channel's messages as they are allowed."""
        number = 0
        try:
            for number in range(self.count):
                with self.progress:
                    self.progress.wait_for(
                        lambda number=number: number < self.allowed or self.outcome.wrong
                    )
                payload = content(name, number, self.seed)
                _post(self.link.planes[name.source], name, number, payload)
        except Exception as error:
            self.outcome.wrong.append(f"sending message {number} of {name}: {error!r}")

    def receive(self, name: ChannelName) -> None:
        """Receive a channel's messages: each must come once, in order, intact."""
        plane, last_s, number = self.link.planes[name.destination], None, 0
        try:
            for number in range(self.count):
                slot = plane.take(name, time.monotonic() + PATIENCE_S)
                payload = content(name, number, self.seed)
                got = (slot.tag[2], slot.tag[3], _crc(slot.payload), len(slot.payload))
                expected = (number, _crc(payload), _crc(payload), len(payload))
                if got != expected:
                    raise ValueError(f"got {got}, expected {expected} (number, CRC, CRC, bytes)")
                slot.release()
                now_s = time.monotonic()
                gap_s = now_s - (last_s or now_s)
                self.outcome.longest_gap_s = max(self.outcome.longest_gap_s, gap_s)
                last_s = now_s
                with self.progress:
                    self.outcome.received += 1
                    self.progress.notify_all()
            _expect_nothing_more(plane, name)
        except Exception as error:
            self.outcome.wrong.append(f"receiving message {number} of {name}: {error!r}")


def run(
    num_messages: int, num_faults: int, seed: int, log: Callable[[str], None], backend: str = TCP
) -> Outcome:
    """Exchange so many messages in all, through at least so many faults (`Exchange.harm`)."""
    link = FaultyLink(seed, backend)
    exchange = Exchange(link, -(-num_messages // len(CHANNELS)), seed)
    outcome, began_s = exchange.outcome, time.monotonic()
    works = [(work, name) for name in CHANNELS for work in (exchange.send, exchange.receive)]
    threads = [threading.Thread(target=work, args=(name,), daemon=True) for work, name in works]
    for thread in threads:
        thread.start()
    try:
        exchange.harm(num_faults, log)
        for thread in threads:
            thread.join(3 * PATIENCE_S)
            if thread.is_alive():
                outcome.wrong.append("a thread hangs")
    finally:
        outcome.faults, outcome.seconds = link.done, time.monotonic() - began_s
        link.close()
    return outcome


def _post(plane: SidecarPlane, name: ChannelName, number: int, payload: np.ndarray) -> None:
    slot = plane.reserve(name, time.monotonic() + PATIENCE_S)
    slot.payload[: len(payload)] = payload
    slot.post(len(payload), (0, 0, number, _crc(payload)))
    slot.complete()


def _crc(payload: np.ndarray) -> int:
    return zlib.crc32(payload.data)


def _expect_nothing_more(plane: SidecarPlane, name: ChannelName) -> None:
    try:
        slot = plane.take(name, time.monotonic() + 0.3)
    except TimeoutError:
        return
    raise ValueError(f"message {slot.tag[2]} came once too often")


def tampered_frames(rng: random.Random, gone: bool, check: Check) -> bytes:
    """Some frames, of which any bytes may have been changed, lost or added.

    Args:
        gone: Whether one may say that its rank is gone: a member would be believed.
        check: Of the frames before they are tampered with.
    """
    channel = rng.choice((CHANNELS[0], CHANNELS[1], ChannelName(*rng.choices(range(65536), k=4))))
    number, small = rng.randrange(2**32), rng.randrange(64)
    frames = [
        Chunk(channel, number, rng.randrange(1 << 40), small, small, (0,) * 8, number, number),
        Acknowledge(channel, number, rng.randrange(1 << 40), small, number),
        Credit(channel, number, small),
        Ping(number),
        Pong(number, small, number),
        *[Gone(small, "x" * small)] * gone,
    ]
    data = bytearray(b"".join(pack(rng.choice(frames), check) for _ in range(rng.randrange(1, 5))))
    for _ in range(rng.choice((0, 1, 1, 2, 10))):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
    return bytes(data)


def fuzz(link: FaultyLink, connections: int, seed: int) -> int:
    """Connect to a sidecar many times, as a stranger or as a member, and send wrong frames.

    Returns:
        How many connections it let in as members.
    """
    rng, members = random.Random(seed), 0
    for _ in range(connections):
        with socket.create_connection(link.planes[1].addresses()[0], timeout=20) as guest:
            as_member = rng.random() < 0.7
            try:
                check = _become_member(guest, link.secret) if as_member else plain_check
                members += check is not plain_check
                guest.sendall(tampered_frames(rng, not as_member, check))
                guest.shutdown(socket.SHUT_WR)
                while guest.recv(4096):
                    pass
            except ConnectionError:
                continue
    return members


def _become_member(guest: socket.socket, secret: bytes) -> Check:
    """The check of what a member sends; the plain one if it wasn't let in."""
    reader = FrameReader(TO_DIALLER)
    challenge = _next_frame(guest, reader)
    if not isinstance(challenge, Challenge):
        return plain_check
    frame = Introduce(0, 1, 1, 60, CHUNK_BYTES, (2,), new_nonce())
    frame = sign_introduction(secret, challenge, frame)
    guest.sendall(pack(frame))
    answer = _next_frame(guest, reader)
    if not isinstance(answer, Welcome):
        return plain_check
    return seals(secret, *transcript(challenge, frame, answer), is_caller=True)[0]


def _next_frame(guest: socket.socket, reader: FrameReader) -> Any:
    while (frame := reader.next_frame()) is None:
        data = guest.recv(4096)
        if not data:
            return None
        reader.feed(data)
    return frame


def fuzz_and_check(connections: int, seed: int) -> tuple[int, list[str]]:
    """Fuzz a sidecar; afterwards the same process must still move messages, in little memory.

    Returns:
        How many connections were let in as members, and what was wrong.
    """
    link, wrong = FaultyLink(seed), []
    try:
        _exchange(link, 0, seed)
        pid = link.planes[1].sidecar_pid
        members = fuzz(link, connections, seed)
        _exchange(link, 1, seed)
        if link.planes[1].sidecar_pid != pid:
            wrong.append("the sidecar died of tampered frames")
        if resident_bytes(pid) > _MOST_BYTES:
            wrong.append(f"the sidecar takes {resident_bytes(pid)} bytes, at most {_MOST_BYTES}")
    finally:
        link.close()
    return members, wrong


def _exchange(link: FaultyLink, number: int, seed: int) -> None:
    for name in CHANNELS:
        payload = content(name, number, seed)
        _post(link.planes[name.source], name, number, payload)
        taken = link.planes[name.destination].take(name, time.monotonic() + PATIENCE_S)
        if taken.tag[2] != number or not np.array_equal(taken.payload, payload):
            raise ValueError(f"message {number} of {name} is not what was sent")
        taken.release()


def main() -> int:
    """Run it all; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--connections", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--backend", choices=BACKENDS, default=TCP, help="nixl without RDMA hardware: UCX_TLS=tcp"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    values = provenance("benchmarks.transport_faults")
    outcome = run(arguments.messages, arguments.faults, arguments.seed, print, arguments.backend)
    members, wrong = fuzz_and_check(arguments.connections, arguments.seed)
    num_faults = sum(outcome.faults.values()) - outcome.faults["heal"]
    enough = num_faults >= arguments.faults
    result = {
        **values,
        "backend": arguments.backend,
        "messages": outcome.received,
        "faults": dict(outcome.faults),
        "num_faults": num_faults,
        "seconds": round(outcome.seconds, 1),
        "longest_gap_s": round(outcome.longest_gap_s, 3),
        "tampered_connections": arguments.connections,
        "of_members": members,
        "wrong": outcome.wrong + wrong,
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        write_json(arguments.out, result)
    return int(bool(result["wrong"]) or not enough)


if __name__ == "__main__":
    sys.exit(main())
