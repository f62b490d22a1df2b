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
        begin: Does it.
        end: Undoes it.
        lasts_s: After how long it is undone; None: when all is over.
    """

    name: str
    begin: Callable[[Hosts], None]
    end: Callable[[Hosts], None]
    lasts_s: float | None = None


def card_lost(host: int, whose: str, nic: int = 0, lasts_s: float | None = None) -> Fault:
    """A host's card goes down, and its routes with it."""
    how_long = "" if lasts_s is None else f" for {lasts_s:g} s"
    return Fault(
        f"{whose}'s {_CARDS[nic]} card down{how_long}",
        lambda hosts: hosts.link_down(host, nic),
        lambda hosts: hosts.link_up(host, nic),
        lasts_s,
    )


def card_unplugged(host: int, whose: str) -> Fault:
    """Nothing passes from or to a host's first card, and the card doesn't notice."""
    return Fault(
        f"switch: {whose}'s first card cut off",
        lambda hosts: hosts.unplug(host, 0),
        lambda hosts: hosts.plug_in(host, 0),
    )


def port_lost(host: int, whose: str) -> Fault:
    """The switch's port of a host's first card goes down: the card loses its carrier."""
    return Fault(
        f"switch: port of the {whose}'s first card down",
        lambda hosts: hosts.link_down(host, 0, "switch"),
        lambda hosts: hosts.link_up(host, 0, "switch"),
    )


def bridge_lost() -> Fault:
    """Nothing passes between first cards, and none of them notices."""
    return Fault(
        "switch: nothing passes between first cards",
        lambda hosts: hosts.bridges_down(0),
        lambda hosts: hosts.bridges_up(0),
    )


def host_cut_off(host: int, whose: str, lasts_s: float) -> Fault:
    """All of a host's cards are down for a while."""
    return Fault(
        f"{whose}'s cards down for {lasts_s:g} s",
        lambda hosts: hosts.host_down(host),
        lambda hosts: hosts.host_up(host),
        lasts_s,
    )


def switch_out(lasts_s: float) -> Fault:
    """Nothing passes between any cards for a while, and none of them notices."""
    return Fault(
        f"switch: nothing passes for {lasts_s:g} s",
        lambda hosts: hosts.bridges_down(*range(hosts.num_nics)),
        lambda hosts: hosts.bridges_up(*range(hosts.num_nics)),
        lasts_s,
    )


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
            self._fault.end(self._hosts)

    def was_over_by(self, time_s: float) -> bool:
        """Whether the fault was over before a time or, if it lasts, had begun."""
        last_s = self.begun_s if self._fault.lasts_s is None else self.ended_s
        return last_s is not None and last_s < time_s

    def _run(self) -> None:
        self._fault.begin(self._hosts)
        self.begun_s = time.monotonic()
        if self._fault.lasts_s is not None:
            time.sleep(self._fault.lasts_s)
            self._fault.end(self._hosts)
            self.ended_s = time.monotonic()


@contextlib.contextmanager
def prepared(hosts: Hosts, fault: Fault, delay_s: float = 0.0) -> Iterator[FaultCourse]:
    """A fault that begins when it is started, and is undone on leaving the context.

    Args:
        hosts: Whose network.
        fault: What breaks.
        delay_s: From `start` to the fault.
    """
    course = FaultCourse(hosts, fault, delay_s)
    try:
        yield course
    finally:
        course.undo()
