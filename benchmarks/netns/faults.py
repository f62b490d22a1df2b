"""What happens to a network while hosts talk over it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.netns.hosts import Hosts

_CARDS = ("first", "second")


@dataclass(frozen=True)
class Fault:
    """Something that happens to the network.

    Attributes:
        name: For the table.
        set_works: Called with False to break it, and with True to mend it.
        lasts_s: After how long it is undone; None: when all is over.
    """

    name: str
    set_works: Callable[[Hosts, bool], None]
    lasts_s: float | None = None


def card_lost(host: int, whose: str, nic: int = 0, lasts_s: float | None = None) -> Fault:
    """A host's card goes down, and its routes with it."""
    how_long = "" if lasts_s is None else f" for {lasts_s:g} s"
    return Fault(
        f"{whose}'s {_CARDS[nic]} card down{how_long}",
        lambda hosts, works: hosts.set_card(host, nic, up=works),
        lasts_s,
    )


def card_unplugged(host: int, whose: str) -> Fault:
    """Nothing passes from or to a host's first card, and the card doesn't notice."""
    return Fault(
        f"switch: {whose}'s first card cut off",
        lambda hosts, works: hosts.set_plugged(host, 0, plugged=works),
    )


def port_lost(host: int, whose: str) -> Fault:
    """The switch's port of a host's first card goes down: the card loses its carrier."""
    return Fault(
        f"switch: port of the {whose}'s first card down",
        lambda hosts, works: hosts.set_port(host, 0, up=works),
    )


def bridge_lost() -> Fault:
    """Nothing passes between first cards, and none of them notices."""
    return Fault(
        "switch: nothing passes between first cards",
        lambda hosts, works: hosts.set_bridge(0, up=works),
    )


def host_cut_off(host: int, whose: str, lasts_s: float) -> Fault:
    """All of a host's cards are down for a while."""

    def set_works(hosts: Hosts, works: bool) -> None:
        for nic in range(hosts.num_nics):
            hosts.set_card(host, nic, up=works)

    return Fault(f"{whose}'s cards down for {lasts_s:g} s", set_works, lasts_s)


def switch_out(lasts_s: float) -> Fault:
    """Nothing passes between any cards for a while, and none of them notices."""

    def set_works(hosts: Hosts, works: bool) -> None:
        for nic in range(hosts.num_nics):
            hosts.set_bridge(nic, up=works)

    return Fault(f"switch: nothing passes for {lasts_s:g} s", set_works, lasts_s)


class FaultCourse:
    """A fault from its start to its end, in its own thread.

    Attributes:
        begun_s: When the fault was there, by the monotonic clock; None: not yet.
        ended_s: When it had been undone after its time; None: not yet, or it lasts.
    """

    def __init__(self, hosts: Hosts, fault: Fault, delay_s: float) -> None:
        self._hosts, self._fault = hosts, fault
        self._thread = threading.Timer(delay_s, self._run)
        self.begun_s: float | None = None
        self.ended_s: float | None = None

    def start(self) -> None:
        """Start the fault; later calls do nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def undo(self) -> None:
        """Wait for a started fault, and end it if it lasts."""
        if self._thread.ident is not None:
            self._thread.join()
        if self.begun_s is not None and self.ended_s is None:
            self._fault.set_works(self._hosts, True)

    def was_over_by(self, time_s: float) -> bool:
        """Whether the fault was over before a time or, if it lasts, had begun."""
        last_s = self.begun_s if self._fault.lasts_s is None else self.ended_s
        return last_s is not None and last_s < time_s

    def _run(self) -> None:
        self._fault.set_works(self._hosts, False)
        self.begun_s = time.monotonic()
        if self._fault.lasts_s is not None:
            time.sleep(self._fault.lasts_s)
            self._fault.set_works(self._hosts, True)
            self.ended_s = time.monotonic()


@contextlib.contextmanager
def prepared(hosts: Hosts, fault: Fault, delay_s: float = 0.0) -> Iterator[FaultCourse]:
    """A fault that begins when it is started, and is undone on leaving the context."""
    course = FaultCourse(hosts, fault, delay_s)
    try:
        yield course
    finally:
        course.undo()
