"""How the two ends of a link leave a direct path that failed and agree on what was received.

A link counts *epochs* from 0. A failure of its direct path starts the next epoch, and a restore the
one after that. In even epochs the link takes the plan's route; in odd epochs it is delegated.

Before each direct transfer each end sends a *ready* message over a separate connection. The
deadline of a transfer therefore starts when both ends are there, and a late peer is not mistaken
for a dead path. An end that has its peer's ready message also knows that the peer has received all
earlier transfers.

An end leaves the path when one of its transfers fails, or between two transfers when transfers have
become slow (`control.handover`). When its peer has left, it leaves too, as soon as it is in no
transfer of the link. It then completes no more transfers of this epoch and sends its *state*: how
many messages of each channel it has received. An end that has left and has its peer's state
switches: it resends, delegated, what the peer's counts don't cover. All later messages are
delegated too.

Two messages are enough. An end never changes its state, so its counts are final. An end cannot
confirm that its peer received these counts until the peer sends; early messages wait in a slot.

Between states an end also forwards what a rank reports to all others: a `Wait` (see `causes`), or
that a link has become slow, after which rank 0 plans at once.

Two threads take part. The queue's thread waits for the peer's ready messages. A thread for each
link waits for the peer's state, and switches even while the queue is elsewhere, perhaps waiting for
a rank that needs the resent messages. The two threads read different connections, so an end that
leaves also sends a last ready message.
"""

import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from jaxmorph.control.handover import SlowLink
from jaxmorph.control.link_state import PathFailure
from jaxmorph.plain_json import dump, parse_line, tagged
from jaxmorph.program.instructions import Channel
from jaxmorph.records import Link
from jaxmorph.runtime.causes import LongWaits, Wait
from jaxmorph.runtime.connection import Connection, ConnectionLostError
from jaxmorph.transport.names import PeerGoneError

Counts = Mapping[Channel, int]
"""How many messages of each channel."""

LateMessages = Mapping[str, tuple[float, ...]]
"""See `control.handover.EndWatch`."""

_CLOSING_S = 1.0
_SHORTEST_S = 0.001
_NUMBERS = struct.Struct("!IQ")
_LAST = (1 << 64) - 1


@dataclass(frozen=True)
class PeerConnections:
    """A rank's connections to the other end of a link.

    Attributes:
        ready: Carries a `Ready` before each direct transfer. The queue's thread reads the socket
            itself: handing messages over from another thread would add latency to each transfer.
        states: Carries each `EndState` and `Wait`; the link's own thread reads them.
    """

    ready: Connection
    states: Connection

    def close(self) -> None:
        """Close both; the peer sees that this end is gone."""
        self.ready.close()
        self.states.close()


@dataclass(frozen=True)
class EndState:
    """What an end sends when it leaves its direct path.

    Attributes:
        epoch: The delegated epoch that follows.
        received: How many messages of each channel came over the direct route, in all epochs.
        retires_communicator: Whether a collective failed here, so its communicator is unusable.
        reason: What failed, or was slow; empty where the end follows its peer.
        late_ms: The late messages, where nothing failed: see `EndWatch`.
    """

    epoch: int
    received: Counts
    retires_communicator: bool
    reason: str
    late_ms: LateMessages = field(default_factory=dict)

    @property
    def has_cause(self) -> bool:
        """Whether this end itself found that the path failed."""
        return bool(self.reason) and not self.late_ms


@dataclass(frozen=True)
class Notice:
    """Reports to all ranks that a link has become slow.

    Attributes:
        number: The epoch that begins with the handover; the step if the link was delegated already.
    """

    slow: SlowLink
    number: int

    @property
    def key(self) -> tuple[Link, bool, tuple[str, ...], int]:
        """Equal for all notices of one finding."""
        is_handover = self.slow.left is not None
        directions = () if is_handover else tuple(self.slow.late_ms)
        return self.slow.link, is_handover, directions, self.number


class Ready(NamedTuple):
    """An end has reached transfer `number` of a direct epoch; a later message compares greater."""

    epoch: int
    number: int

    @classmethod
    def last(cls, epoch: int) -> "Ready":
        """The last message of an epoch: its sender has left the path."""
        return cls(epoch, _LAST)

    @property
    def is_last(self) -> bool:
        """Whether the sender has left the path."""
        return self.number == _LAST

    def to_bytes(self) -> bytes:
        """Two integers, as `from_bytes` reads them."""
        return _NUMBERS.pack(*self)

    @classmethod
    def from_bytes(cls, message: bytes) -> "Ready":
        """Parse what `to_bytes` wrote; raises `struct.error` for other bytes."""
        return cls(*_NUMBERS.unpack(message))


class LinkSwitchError(RuntimeError):
    """The ends of a failed link could not agree: their counts contradict each other."""


class LinkEnd:
    """One end of a link that can leave its direct path; the module describes the protocol.

    It alone holds the link's epoch, whether this end has left the path, and how often it failed.

    Queue thread: `await_peer`, `end_transfer`, `leave_path`, `await_switch`. Training thread, while
    the queue is empty: `begin_failed_over`, `begin_direct`, `take_failures`. The link's own thread:
    `_listen`. Lock (`_changed`): everything that changes, except `_last_ready` and `_transfers`,
    which belong to the queue's thread.

    Args:
        received: Returns how many messages of each of the link's channels were received here.
        resend: Sends what the peer's state doesn't cover, in the state's epoch; returns how many
            messages that was.
        on_peer_state: Called when the peer has left the path.
        timeout_s: How long to wait for the peer, in a transfer or in a switch.
        waits: Records the waits that the peer forwards, and names the cause of waits that time out.
        on_notice: Called with the notice of this link's handover, and with notices from the peer.

    Attributes:
        epoch: Even: the plan's route; odd: delegated.
        retired_communicators: How many of the link's communicators can't be used again.
        path_failure: Why the direct path was left; "" if it was not, or has been restored.
        is_handed_over: Whether the path works, and was left because it is slow.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        connections: PeerConnections,
        received: Callable[[], Counts],
        resend: Callable[[EndState], int],
        on_peer_state: Callable[[], None],
        timeout_s: float,
        waits: LongWaits | None = None,
        on_notice: Callable[[Notice, Link | None], None] = lambda notice, came_over: None,
    ) -> None:
        self._on_notice = on_notice
        self.link, self.peer = link, sum(link) - rank
        self.epoch, self.retired_communicators = 0, 0
        self.path_failure, self.is_handed_over = "", False
        self._connections, self._received, self._resend = connections, received, resend
        self._on_peer_state, self._timeout_s = on_peer_state, timeout_s
        self._waits = waits or LongWaits(rank)
        self._changed = threading.Condition()
        self._transfers, self._last_ready = 0, Ready(0, 0)
        self._arrived_s: float | None = None
        self._is_in_transfer = False
        self._state: EndState | None = None  # of the current epoch, once this end has left
        # By epoch: the peer may be restored first, and fail again before this end is restored.
        self._peer_states: dict[int, EndState] = {}
        self._failures: list[PathFailure] = []
        self._lost: str | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._listen, name=f"link {link}", daemon=True)
        self._thread.start()

    @property
    def has_failed_over(self) -> bool:
        """Whether the host data plane carries the link's transfers, whatever the plan's route."""
        return self.epoch % 2 == 1

    @property
    def peer_has_left(self) -> bool:
        """Whether the peer has left this epoch's path and joins no more of its transfers."""
        return self.epoch + 1 in self._peer_states

    def await_peer(self, what: str) -> bool:
        """Reach the link's next transfer and wait until the peer has.

        Returns:
            Whether the transfer can run on the direct path; then `end_transfer` must follow.

        Raises:
            TimeoutError: If the peer doesn't come; `PeerGoneError` if it is gone.
            LinkSwitchError: If an earlier switch failed.
        """
        due = self._send_ready()
        if due is not None:
            self._wait(
                partial(self._await_ready, due),
                lambda waited_s: (
                    f"{what}: rank {self.peer} did not come to it within {waited_s:.3g} s"
                ),
            )
        with self._changed:
            self.raise_error()
            if self._has_left_path:
                return False
            if not self._peer_is_ready:
                self._raise_lost()
            self._is_in_transfer = True
            return True

    def end_transfer(self, failure: str = "", *, retires_communicator: bool = False) -> None:
        """End the transfer that `await_peer` began; after a failure this end leaves the path.

        Args:
            retires_communicator: Whether the link's communicator can't be used again.
        """
        with self._changed:
            self._is_in_transfer = False
            if not failure:
                self._arrived_s = None
            if failure or self.peer_has_left:
                self._leave_path(failure, retires_communicator)
        self._switch_if_due()

    def leave_path(
        self,
        reason: str,
        *,
        retires_communicator: bool = False,
        late_ms: LateMessages | None = None,
    ) -> None:
        """Leave the path between two transfers; does nothing if this end has left already.

        Args:
            late_ms: The late messages, if the path works.
        """
        with self._changed:
            if not self._has_left_path:
                self._leave_path(reason, retires_communicator, late_ms)
        self._switch_if_due()

    def await_switch(self, what: str) -> int:
        """Wait until the link's transfers are delegated; returns their epoch.

        Raises:
            TimeoutError: If the peer doesn't report its counts; `PeerGoneError` if it is gone.
            LinkSwitchError: If the ends disagree.
        """
        self._wait(
            partial(self._await_change, lambda: self.has_failed_over),
            lambda waited_s: (
                f"{what}: the direct path failed, and rank {self.peer} did not report within "
                f"{waited_s:.3g} s what it has received"
            ),
        )
        with self._changed:
            self.raise_error()
            if not self.has_failed_over:
                self._raise_lost()
            self._arrived_s = None
            return self.epoch

    def forward(self, message: Wait | Notice) -> None:
        """Send a message for all ranks to the peer, which forwards it."""
        with self._changed:
            self._send(self._connections.states, dump(tagged(message)).encode())

    def begin_failed_over(self) -> None:
        """Start without a direct path, as the peer does; nothing has been sent so far."""
        with self._changed:
            self._begin_next_epoch()

    def begin_direct(self) -> None:
        """Start the next direct epoch, at the same step boundary as the peer, after a switch."""
        with self._changed:
            self._begin_next_epoch()  # a direct one again
            self._transfers, self.path_failure, self.is_handed_over = 0, "", False
            if self.peer_has_left:  # it was restored first, and its path has failed since
                self._leave_path("", retires_communicator=False)
        self._switch_if_due()

    def take_failures(self) -> list[PathFailure]:
        """The switches since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def raise_error(self) -> None:
        """Raise the error of a switch that failed, if one did."""
        if self._error is not None:
            raise LinkSwitchError(f"link {self.link}: {self._error}") from self._error

    def close(self) -> None:
        """Close the connections; the peer sees that this end is gone."""
        self._connections.close()
        self._thread.join(_CLOSING_S)

    @property
    def _has_left_path(self) -> bool:
        return self.has_failed_over or self._state is not None

    @property
    def _peer_is_ready(self) -> bool:
        return not self._last_ready.is_last and self._last_ready >= (self.epoch, self._transfers)

    @property
    def _has_lost_or_failed(self) -> bool:
        return self._lost is not None or self._error is not None

    def _begin_next_epoch(self) -> None:
        """The only place where the epoch changes; the caller holds the lock."""
        self.epoch += 1
        self._state = None
        self._changed.notify_all()

    def _send_ready(self) -> Ready | None:
        """Report that this end is at its next transfer; None if it has left the path."""
        with self._changed:
            if self._has_left_path:
                return None
            self._arrived_s = time.monotonic()
            self._transfers += 1
            ready = Ready(self.epoch, self._transfers)
            self._send(self._connections.ready, ready.to_bytes())
            return ready

    def _wait(self, attempt: Callable[[float], bool], describe: Callable[[float], str]) -> None:
        """Wait for the peer until an attempt succeeds or the link is lost."""
        deadline_s = time.monotonic() + self._timeout_s
        self._waits.wait(lambda until_s: attempt(until_s) or None, deadline_s, self.peer, describe)

    def _await_change(self, condition: Callable[[], bool], until_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: condition() or self._has_lost_or_failed,
                max(until_s - time.monotonic(), 0.0),
            )

    def _await_ready(self, due: Ready, until_s: float) -> bool:
        """Wait until the peer is ready, has left the path, or is gone; False: none by `until_s`.

        `due` is fixed by the caller: the link's own thread may start the next epoch meanwhile.
        """
        lost = None
        try:
            while self._last_ready < due:
                self._connections.ready.limit(max(until_s - time.monotonic(), _SHORTEST_S))
                self._last_ready = Ready.from_bytes(self._connections.ready.receive())
        except TimeoutError:
            return self._has_left_path or self._has_lost_or_failed
        except (ConnectionLostError, OSError) as error:
            lost = str(error)
            self._connections.states.close()  # wakes the link's own thread
        except Exception as error:  # a malformed message
            self._fail(error)
        if self._peer_is_ready:
            return True
        # The peer has left the path or is gone: wait until the link's own thread knows which.
        is_known = self._await_change(lambda: self._has_left_path, until_s)
        self._lost = self._lost or lost
        return is_known or self._lost is not None

    def _raise_lost(self) -> None:
        if self._lost is not None:
            message, rank = self._waits.explain(
                f"rank {self.peer} is gone: {self._lost}", self.peer
            )
            raise PeerGoneError(message, rank)

    def _send(self, connection: Connection, message: bytes) -> None:
        try:
            connection.send(message)
        except (ConnectionLostError, OSError) as error:
            self._lost = self._lost or str(error)

    def _leave_path(
        self, reason: str, retires_communicator: bool, late_ms: LateMessages | None = None
    ) -> None:
        """Leave this epoch's path and send the state; the caller holds the lock."""
        received = self._received()
        self._state = EndState(
            self.epoch + 1, received, retires_communicator, reason, late_ms or {}
        )
        self._send(self._connections.states, dump(tagged(self._state)).encode())
        self._send(self._connections.ready, Ready.last(self.epoch).to_bytes())
        self._changed.notify_all()

    def _listen(self) -> None:
        try:
            while True:
                line = self._connections.states.receive().decode()
                match parse_line(EndState | Wait | Notice, line, "a link's other end"):
                    case Wait() as wait:
                        self._waits.add(wait, self.link)
                    case Notice() as notice:
                        self._on_notice(notice, self.link)
                    case EndState() as state:
                        self._handle_peer_state(state)
        except (ConnectionLostError, OSError) as error:
            with self._changed:
                self._lost = self._lost or str(error)
                self._changed.notify_all()
        except Exception as error:  # a malformed message
            self._fail(error)
        self._connections.ready.close()  # wakes the queue's thread

    def _handle_peer_state(self, state: EndState) -> None:
        with self._changed:
            self._peer_states[state.epoch] = state
            if self.peer_has_left and self._state is None and not self._is_in_transfer:
                self._leave_path("", retires_communicator=False)
        self._on_peer_state()  # the queue may be waiting for an emulated cut to heal
        self._switch_if_due()

    def _switch_if_due(self) -> None:
        """Switch once both ends have left; any thread of this end may be the last to see it."""
        with self._changed:
            own = self._state
            if own is None or not self.peer_has_left:
                return
            other = self._peer_states.pop(own.epoch)  # so that only one thread switches
        try:
            resent = self._resend(other)
        except Exception as error:  # raised where the switch is waited for
            self._fail(error)
            return
        with self._changed:
            self._failures.append(failure := self._failure(own, other, resent))
            self.retired_communicators += own.retires_communicator or other.retires_communicator
            self._begin_next_epoch()
        if failure.is_handover:
            slow = SlowLink(self.link, failure.late_ms, failure)
            self._on_notice(Notice(slow, own.epoch), None)

    def _failure(self, own: EndState, other: EndState, resent: int) -> PathFailure:
        # Slowness is the reason only if neither end knows of a failure.
        first = other if other.has_cause and not own.has_cause else own
        first = first if first.reason else other
        reason = first.reason if first is own else f"rank {self.peer} reports: {first.reason}"
        self.path_failure, self.is_handed_over = reason, bool(first.late_ms)
        held_up_s = 0.0 if self._arrived_s is None else time.monotonic() - self._arrived_s
        began = own.retires_communicator
        return PathFailure(self.link, reason, held_up_s, resent, began, late_ms=dict(first.late_ms))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
