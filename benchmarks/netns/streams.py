"""Streams of messages from one host to another, by their sidecars, over networks that fail."""

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import IO, Any, cast

from benchmarks.netns.hosts import Hosts
from benchmarks.netns.stream_end import RECEIVER, SENDER, StreamEnd

MB = 10**6
_MESSAGE_LIMIT_S = 20.0
_END_S = 5.0
_MODULE = "benchmarks.netns.stream_end"


class StreamError(RuntimeError):
    """An end of a stream failed: a message was wrong, or did not come."""


@dataclass(frozen=True)
class Stream:
    """What came of one stream, all of whose messages came once, in order and as sent.

    Attributes:
        landed_s: When each message was complete at the receiver, by the monotonic clock.
        message_bytes: How long each was.
        statistics: The planes' own counts, the sender's first.
        events: What each plane has reported, the sender first.
    """

    landed_s: tuple[float, ...]
    message_bytes: int
    statistics: tuple[dict[str, Any], dict[str, Any]]
    events: tuple[list[dict[str, Any]], list[dict[str, Any]]]

    def throughput_mb_s(self, leave_out: int) -> float:
        """10**6 bytes a second, after so many messages in which lanes find their rates."""
        landed_s = self.landed_s[leave_out:]
        return (len(landed_s) - 1) * self.message_bytes / MB / (landed_s[-1] - landed_s[0])

    def longest_gap_s(self) -> float:
        """The longest time without a message between two of them."""
        return max(later - sooner for sooner, later in itertools.pairwise(self.landed_s))

    def usual_gap_s(self) -> float:
        """The median time between two messages."""
        return median(later - sooner for sooner, later in itertools.pairwise(self.landed_s))


def run_stream(
    hosts: Hosts,
    num_messages: int,
    message_bytes: int,
    nics: Sequence[int],
    on_message: Callable[[int], None] = lambda number: None,
) -> Stream:
    """Send messages as fast as they go from the first host to the second, checking each.

    Raises:
        StreamError: If a message is lost, doubled, out of order or changed.
    """
    with contextlib.ExitStack() as stack:

        def start(rank: int) -> _Process:
            addresses = tuple(hosts.address(rank, nic) for nic in nics)
            end = StreamEnd(rank, addresses, num_messages, message_bytes, _MESSAGE_LIMIT_S)
            return stack.enter_context(_started(hosts, end))

        sender, receiver = start(SENDER), start(RECEIVER)
        addresses = [process.receive()["addresses"] for process in (sender, receiver)]
        sender.send(addresses[RECEIVER])
        receiver.send(addresses[SENDER])
        landed_s: list[float] = []
        for number in range(num_messages):
            landed_s.append(receiver.receive()["landed_s"])
            on_message(number)
        sender.leave()
        said = sender.receive(), receiver.receive()
    statistics, events = zip(*((each["statistics"], each["events"]) for each in said), strict=True)
    return Stream(tuple(landed_s), message_bytes, statistics, events)


@dataclass(frozen=True)
class _Process:
    """One end, which speaks in lines of JSON."""

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]

    def send(self, message: Any) -> None:
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()

    def receive(self) -> dict[str, Any]:
        line = cast(IO[str], self.process.stdout).readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise StreamError(f"the {self.name} ended: {self.errors.read().strip()[-2000:]}")
        return json.loads(line)

    def leave(self) -> None:
        cast(IO[str], self.process.stdin).close()


@contextlib.contextmanager
def _started(hosts: Hosts, end: StreamEnd) -> Iterator[_Process]:
    """An end that is sure to be gone afterwards, and in any case after the longest it may take."""
    command = [sys.executable, "-m", _MODULE, json.dumps(asdict(end))]
    name = "sender" if end.rank == SENDER else "receiver"
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            hosts.command(end.rank, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        watched = _Process(name, process, errors)
        try:
            yield watched
        finally:
            with contextlib.suppress(BrokenPipeError):
                watched.leave()
            watchdog = threading.Timer(_END_S, process.kill)
            watchdog.start()
            process.wait()
            watchdog.cancel()
