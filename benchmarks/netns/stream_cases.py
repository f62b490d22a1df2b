"""The cases of the bench in which sidecars alone are at work, between two hosts with two cards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.netns.faults import (
    Fault,
    bridge_lost,
    card_lost,
    host_cut_off,
    port_lost,
    prepared,
    switch_out,
)
from benchmarks.netns.hosts import Hosts, lay_hosts
from benchmarks.netns.outcomes import Outcome
from benchmarks.netns.stream_end import RECEIVER, SENDER
from benchmarks.netns.streams import MB, Stream, StreamError, run_stream

GOOD_MBIT, MODEST_MBIT, BAD_MBIT = 1000.0, 100.0, 10.0
OUTAGE_S = 2.0
_ROUNDS = 3
_LEFT_OUT = 20  # messages, in which the lanes find out what their cards can do
_MESSAGES = _LEFT_OUT + 80
_GOOD, _BAD = 0, 1
_FAULTS = (
    card_lost(SENDER, "sender"),
    card_lost(RECEIVER, "receiver"),
    port_lost(SENDER, "sender"),
    port_lost(RECEIVER, "receiver"),
    bridge_lost(),
    host_cut_off(SENDER, "sender", OUTAGE_S),
    host_cut_off(RECEIVER, "receiver", OUTAGE_S),
    switch_out(OUTAGE_S),
)


@dataclass(frozen=True)
class FaultyStream:
    """A stream that a fault happened to.

    Attributes:
        stream: All of it.
        ended_s: When the fault had been undone, by the stream's clock; None: it lasted.
    """

    stream: Stream
    ended_s: float | None

    def resumed_s(self) -> float:
        """How long after the network was whole again the next message came."""
        assert self.ended_s is not None
        return next(at for at in self.stream.landed_s if at > self.ended_s) - self.ended_s


def stream_with_fault(
    hosts: Hosts,
    fault: Fault,
    num_messages: int = 160,
    message_bytes: int = 4 * MB,
    after: int = 40,
    delay_s: float = 0.008,
) -> FaultyStream:
    """A stream over all cards with one fault in it.

    Args:
        message_bytes: How long each message is: 17 ms on two cards of 1 Gbit/s.
        after: The number of the message after which it happens.
        delay_s: How long after it: in the middle of the next.

    Raises:
        StreamError: If a message is lost, doubled, out of order or changed.
        RuntimeError: If the stream was over before the fault was.
    """
    with prepared(hosts, fault, delay_s) as course:

        def on_message(number: int) -> None:
            if number >= after:
                course.start()

        stream = run_stream(hosts, num_messages, message_bytes, range(hosts.num_nics), on_message)
    if not course.was_over_by(stream.landed_s[-1]):
        raise RuntimeError(f"{fault.name}: {num_messages} messages were over too soon for it")
    return FaultyStream(stream, course.ended_s)


def stream_outcomes() -> Iterator[Outcome]:
    """Each case's figures, as they come."""
    with lay_hosts(2) as hosts:
        _set_rates(hosts, GOOD_MBIT)
        yield from _throughput_outcomes(hosts)
        for fault in _FAULTS:
            yield _fault_outcome(fault.name, partial(stream_with_fault, hosts, fault))
        _set_rates(hosts, MODEST_MBIT)
        for fault in _FAULTS[:2]:
            # A message takes 0.17 s on both cards, and the fault comes in the middle of one.
            stream = partial(stream_with_fault, hosts, fault, 60, 4 * MB, after=20, delay_s=0.08)
            yield _fault_outcome(f"{fault.name}, {MODEST_MBIT:g} Mbit/s", stream)


def _set_rates(hosts: Hosts, mbit: float) -> None:
    for host in range(2):
        for nic in range(2):
            hosts.set_rate(host, nic, mbit)


def _throughput_outcomes(hosts: Hosts) -> Iterator[Outcome]:
    """Both cards, the good one alone, and beside a bad one, in turns."""
    both, alone, beside = [], [], []
    for _ in range(_ROUNDS):
        both.append(_run(hosts, (_GOOD, _BAD)))
        alone.append(_run(hosts, (_GOOD,)))
        hosts.set_rate(SENDER, _BAD, BAD_MBIT)
        beside.append(_run(hosts, (_GOOD, _BAD)))
        hosts.set_rate(SENDER, _BAD, GOOD_MBIT)
    speed = f"{GOOD_MBIT / 1000:g} Gbit/s"
    yield _throughput(f"two cards of {speed}", both)
    yield _throughput(f"one card of {speed} alone", alone)
    case = f"one of {speed}, one of {BAD_MBIT:g} Mbit/s"
    yield _throughput(case, beside)
    ratio = _median_mb_s(beside) / _median_mb_s(alone)
    yield Outcome(case, "of the good card alone", ratio, 0.9, at_least=True)


def _run(hosts: Hosts, nics: tuple[int, ...]) -> Stream:
    return run_stream(hosts, _MESSAGES, 4 * MB, nics)


def _median_mb_s(streams: list[Stream]) -> float:
    return median(stream.throughput_mb_s(_LEFT_OUT) for stream in streams)


def _throughput(case: str, streams: list[Stream]) -> Outcome:
    each = [stream.throughput_mb_s(_LEFT_OUT) for stream in streams]
    details = {"each_mb_s": each, "last": _seen(streams[-1])}
    return Outcome(case, "MB/s", median(each), details=details)


def _fault_outcome(case: str, run: Callable[[], FaultyStream]) -> Outcome:
    """How long no message came: at all, or once the network was whole again."""
    try:
        faulty = run()
    except StreamError as error:
        return Outcome(case, "stream", None, details={"error": str(error)})
    details = {
        "longest_gap_s": faulty.stream.longest_gap_s(),
        "usual_gap_s": faulty.stream.usual_gap_s(),
        **_seen(faulty.stream),
    }
    if faulty.ended_s is None:
        return Outcome(case, "longest gap, s", details["longest_gap_s"], 0.5, details=details)
    return Outcome(case, "messages again after, s", faulty.resumed_s(), 1.0, details=details)


def _seen(stream: Stream) -> dict[str, Any]:
    return {"statistics": stream.statistics, "events": stream.events}
