"""Finds the cause of a failure: ranks wait for each other, so one failure raises many errors.

An error of a rank that waited in vain names the rank it waited for (`waited_for`). From rank to
rank these names lead to one that waits for nobody: that rank has failed. Or they lead in a circle:
then the link between its ranks carries nothing.

The launcher follows the reports of failed ranks (`cause_of`). Where links fail over, ranks also
send each other the long waits they know of (`LongWaits`), so that each rank's own error
names the cause, on several hosts too.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from jaxmorph.messages import RankFailed
from jaxmorph.records import Link

_PLACE_TAKEN = re.compile(rb"(\d+) unexpectedly tried to connect with a different incarnation")
_END_OF_LOG_BYTES = 1 << 16
_LONG_SHARE = 1 / 4  # of a wait's timeout

Found = TypeVar("Found")


class WaitedInVainError(TimeoutError):
    """A rank waited for another one until its deadline.

    Attributes:
        waited_for: The rank that caused the wait; None: a link did, which the message names.
    """

    def __init__(self, message: str, waited_for: int | None) -> None:
        super().__init__(message)
        self.waited_for = waited_for


@dataclass(frozen=True)
class Wait:
    """What a rank reports of its waiting, when that becomes long and when it is over.

    Attributes:
        peer: The rank that it waits for; None: it waits no more.
        what: For which message, in words.
        number: Counts the rank's reports; one that a later one has overtaken is ignored.
    """

    rank: int
    peer: int | None
    what: str = ""
    number: int = 1


def follow(waits: Mapping[int, int], rank: int) -> tuple[int, ...]:
    """Where a rank's waiting leads: one rank that waits for nobody, or the ranks of a circle.

    Args:
        waits: By each rank that waits, the rank it waits for.
    """
    path = [rank]
    while (peer := waits.get(path[-1])) is not None:
        if peer in path:
            return tuple(path[path.index(peer) :])
        path.append(peer)
    return (path[-1],)


def cause_of(failures: Sequence[RankFailed]) -> RankFailed:
    """The failure that explains the others; there must be at least one.

    It is the first that is a rank's own; else the one that ranks' waiting leads to. A rank that has
    reported nothing, such as a stopped one, gets the report of a rank that waited for it.
    """
    # A rank that stalled failed when it made progress for the last time.
    in_order = sorted(failures, key=lambda each: (each.time_s - each.silent_s, each.rank))
    own = [each for each in in_order if each.waited_for is None and not each.follows_others]
    waiting = {each.rank: each for each in reversed(in_order) if each.waited_for is not None}
    if own or not waiting:
        return (own or in_order)[0]
    first = next(each for each in in_order if each.rank in waiting)
    waits = {rank: each.waited_for for rank, each in waiting.items() if each.waited_for is not None}
    guilty = follow(waits, first.rank)
    witness = next(each for each in in_order if each.waited_for in guilty)
    # A rank that ends without a report after others have failed was ended because of them.
    reported = [
        each
        for each in in_order
        if each.rank in guilty and (each.rank in waiting or each.time_s <= witness.time_s)
    ]
    if reported:
        return reported[0]
    reason = f"it has reported nothing; rank {witness.rank} reports: {witness.reason}"
    return replace(witness, rank=guilty[0], reason=reason)


def rank_of_stranger(log_of_rank_0: Path) -> int | None:
    """The number under which a process that isn't the run's has connected to JAX's service, if any.

    JAX accepts any process. When the rank itself connects, or a second process with its number, the
    service ends all ranks. The only trace is a line in the log of the rank that serves.
    """
    try:
        with log_of_rank_0.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _END_OF_LOG_BYTES))
            found = _PLACE_TAKEN.search(log.read())
    except OSError:
        return None
    return None if found is None else int(found[1])


class LongWaits:
    """The long waits that this rank knows of: its own, and those that others have sent.

    Any thread: all methods. Lock: the waits.

    Attributes:
        forward: Sends a wait to the other end of a link, by link.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.forward: Mapping[Link, Callable[[Wait], object]] = {}
        self._latest: dict[int, Wait] = {}
        self._own: list[Wait] = []  # those of this rank's threads, the oldest first
        self._lock = threading.Lock()

    def add(self, wait: Wait, came_over: Link | None = None) -> bool:
        """Record a rank's latest report of its waiting, and forward it.

        Args:
            came_over: The link whose other end has sent it; None: it is this rank's own.

        Returns:
            Whether it is later than what was known.
        """
        with self._lock:
            known = self._latest.get(wait.rank)
            if known is not None and wait.number <= known.number:
                return False
            self._latest[wait.rank] = wait
        self._forward(wait, came_over)
        return True

    def _forward(self, wait: Wait, came_over: Link | None = None) -> None:
        for link, send in self.forward.items():
            if link != came_over:
                send(wait)

    def wait(
        self,
        attempt: Callable[[float], Found | None],
        deadline_s: float,
        peer: int,
        describe: Callable[[float], str],
    ) -> Found:
        """Wait for a rank; the others learn of a long wait before their own deadlines.

        Args:
            attempt: Waits until a time, by the monotonic clock; None: nothing came by then.
            describe: What has not come, in words, after so many seconds.

        Raises:
            WaitedInVainError: The deadline is over; it names the cause.
        """
        began_s = time.monotonic()
        all_s = max(deadline_s - began_s, 0.0)
        found = attempt(began_s + _LONG_SHARE * all_s)
        if found is None:
            own = Wait(self.rank, peer, describe(_LONG_SHARE * all_s))
            self._change_own(lambda: self._own.append(own))
            found = attempt(deadline_s)
            if found is None:
                raise self.error(describe(all_s), peer)
            self._change_own(lambda: self._own.remove(own))
        return found

    def _change_own(self, change: Callable[[], None]) -> None:
        """Change this rank's own waits; if another one is the oldest now, report that.

        Others follow only one wait of a rank, but its threads may wait for several ranks at once.
        """
        with self._lock:
            before = self._own[:1]
            change()
            if self._own[:1] == before:
                return
            oldest = self._own[0] if self._own else Wait(self.rank, None)
            known = self._latest.get(self.rank)
            report = replace(oldest, number=1 if known is None else known.number + 1)
            self._latest[self.rank] = report
        self._forward(report)

    def error(self, message: str, peer: int) -> WaitedInVainError:
        """The error of this rank, which has waited for `peer` until its deadline."""
        return WaitedInVainError(*self.explain(message, peer))

    def explain(self, message: str, peer: int) -> tuple[str, int | None]:
        """Add the cause to a message about a peer, as far as it is known.

        Returns:
            The message, and the rank where the waiting leads; None: it leads to a link.
        """
        with self._lock:
            latest = self._latest.values()
            known = {each.rank: each for each in latest if each.peer is not None}
        known.pop(self.rank, None)
        waits = {each.rank: each.peer for each in known.values() if each.peer is not None}
        waits[self.rank] = peer
        guilty = follow(waits, self.rank)
        if len(guilty) == 1:
            others = (f"rank {rank} waits too: {wait.what}" for rank, wait in sorted(known.items()))
            return "; ".join([message, *others]), guilty[0]
        if len(set(guilty)) > 2:  # for example over the link of the last stage's chunk to the first
            seen = "; ".join(wait.what for rank, wait in sorted(known.items()) if rank in guilty)
            ranks = ", ".join(map(str, sorted(guilty)))
            return f"one link of ranks {ranks} carries nothing: {message}; {seen}", None
        link = Link.of(*guilty)
        if self.rank in guilty:
            return f"link {link} carries nothing: {message}", None
        cause = f"link {link} carries nothing: {known[guilty[0]].what}"
        return f"{cause}; that is why {message}", None
