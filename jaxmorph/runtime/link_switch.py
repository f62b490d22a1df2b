"""How the two ends of a link leave a direct path that has failed, and agree on what has come.

A link's *epochs* count up from 0. A failure of its direct path begins the next epoch, and a restore
the one after that: in even epochs the link takes the plan's route, in odd ones it is delegated.

Before each direct transfer both ends send a *word*, that they are there, over a connection of their
own. So the deadline of a transfer begins when both have come, and a late peer isn't taken for a
dead path; and an end that has its peer's word knows that all transfers before have been taken.

An end whose transfer fails gives the path up, and so does one that learns of it, as soon as it is
in none of the link's transfers: it completes no more of this epoch, and sends its *state*, how many
messages of each channel it has taken. An end that has given up and has its peer's state switches:
it sends again what the peer's counts don't cover, and all that follows, delegated. No third message
is needed. An end never goes back on its state, so its counts are final, and with the second message
each end knows all that the other will ever know of the old epoch. It can't know that the peer has
this message until the peer sends; until then early messages wait in a slot.

The queue's thread comes to transfers, waits for its peer's words and leaves them; a thread for each
link waits for its peer's states, and switches when the queue is elsewhere, maybe waiting for a rank
that waits for what is to be sent again. As the two read different connections, an end that gives a
path up says so in a last word too.
"""

import json
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxmorph.control.link_state import PathFailure
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import Connection, ConnectionLostError
from jaxmorph.transport.names import PeerGoneError

Counts = Mapping[Channel, int]
"""How many messages of each channel."""

_CLOSING_S = 1.0
_SHORTEST_S = 0.001
_NUMBERS = struct.Struct("!IQ")
_GIVEN_UP = (1 << 64) - 1


@dataclass(frozen=True)
class LinkWires:
    """What a rank has to the other end of a link.

    Attributes:
        words: Carries `Word`s, one for each direct transfer. The queue's thread reads it by itself,
            as nothing is quicker than to wait for the socket where the word is waited for.
        states: Carries `EndState`s, which a thread of its own waits for.
    """

    words: Connection
    states: Connection

    def close(self) -> None:
        """Let both ends know that this one is gone."""
        self.words.close()
        self.states.close()


@dataclass(frozen=True)
class EndState:
    """What an end sends when it has given a direct epoch up.

    Attributes:
        epoch: The delegated epoch that follows.
        received: How many messages of each channel it has taken on the direct route, in all epochs.
        is_closed: Whether a collective failed here: its communicator can't be used again.
        reason: What failed; nothing where the end follows its peer.
    """

    epoch: int
    received: Counts
    is_closed: bool
    reason: str

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads."""
        counts = [[*channel, count] for channel, count in self.received.items()]
        return json.dumps([self.epoch, counts, self.is_closed, self.reason]).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> "EndState":
        """The state that `to_bytes` wrote; any exception if it is none."""
        epoch, counts, is_closed, reason = json.loads(message)
        received = {
            Channel(Payload(payload), source, destination, index): count
            for payload, source, destination, index, count in counts
        }
        return cls(epoch, received, is_closed, reason)


class Word(NamedTuple):
    """An end has come to the so-manieth transfer of a direct epoch; later words are greater."""

    epoch: int
    number: int

    @classmethod
    def given_up(cls, epoch: int) -> "Word":
        """The last word of an epoch: an end has given its path up, and sends its state."""
        return cls(epoch, _GIVEN_UP)

    @property
    def is_last(self) -> bool:
        """Whether the path has been given up."""
        return self.number == _GIVEN_UP

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads."""
        return _NUMBERS.pack(*self)

    @classmethod
    def from_bytes(cls, message: bytes) -> "Word":
        """The word that `to_bytes` wrote; `struct.error` if it is none."""
        return cls(*_NUMBERS.unpack(message))


class LinkSwitchError(RuntimeError):
    """The ends of a link that failed could not agree: their counts of its messages can't be."""


class LinkEnd:
    """One end of a link that may leave its direct path; see the module.

    It alone holds the link's epoch, whether its path is given up, and how often it failed.

    Queue thread: `meet`, `leave`, `give_up`, `await_switch`. Training thread, while the queue is
    empty: `begin_delegated`, `begin_direct`, `take_failures`. The link's own thread: `_listen`.
    Lock (`_changed`): all that changes, but for `_peer_word` and `_here`, which are the queue's.

    Args:
        rank: Which of its ranks this is.
        received: Says how many messages of each of the link's channels have been taken here.
        resend: Sends what the peer's state doesn't cover, in the state's epoch; says how many
            messages that was.
        on_peer_state: Called when the peer has given the path up.
        timeout_s: How long to wait for the peer, in a transfer or in a switch.

    Attributes:
        epoch: The present one: see the module.
        times_closed: How many of the link's communicators have failed, and are closed.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        wires: LinkWires,
        received: Callable[[], Counts],
        resend: Callable[[EndState], int],
        on_peer_state: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.link, self.peer = link, sum(link) - rank
        self.epoch, self.times_closed = 0, 0
        self._wires, self._received, self._resend = wires, received, resend
        self._on_peer_state, self._timeout_s = on_peer_state, timeout_s
        self._changed = threading.Condition()
        self._here, self._peer_word = 0, Word(0, 0)
        self._came_s: float | None = None
        self._is_inside = False
        self._state: EndState | None = None  # of the present epoch, once this end has given it up
        self._peer_states: dict[int, EndState] = {}  # by epoch: a peer may be restored first
        self._failures: list[PathFailure] = []
        self._lost: str | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._listen, name=f"link {link}", daemon=True)
        self._thread.start()

    @property
    def is_delegated(self) -> bool:
        """Whether the link's transfers are delegated now."""
        return self.epoch % 2 == 1

    @property
    def peer_gave_up(self) -> bool:
        """Whether the peer has given this epoch's path up: nothing will come of its transfers."""
        return self.epoch + 1 in self._peer_states

    def meet(self, what: str) -> bool:
        """Come to the link's next transfer, and wait until the peer has.

        Returns:
            Whether it can begin on the direct path; then `leave` is to follow.

        Raises:
            TimeoutError: If the peer doesn't come; `PeerGoneError` if it is gone.
            LinkSwitchError: If an earlier switch went wrong.
        """
        due = self._say_here()
        if due is not None:
            self._await_word(due, time.monotonic() + self._timeout_s)
        with self._changed:
            self.raise_error()
            if self._has_left:
                return False
            if not self._has_met:
                self._raise_lost()
                raise TimeoutError(
                    f"{what}: rank {self.peer} did not come to it within {self._timeout_s:g} s"
                )
            self._is_inside = True
            return True

    def leave(self, failure: str = "", *, is_closed: bool = False) -> None:
        """Leave the transfer that both have come to; after a failure the path is given up.

        Args:
            is_closed: Whether the link's communicator can't be used again.
        """
        with self._changed:
            self._is_inside = False
            if not failure:
                self._came_s = None
            if failure or self.peer_gave_up:
                self._give_up(failure, is_closed)
        self._switch_if_due()

    def give_up(self, reason: str, *, is_closed: bool) -> None:
        """Give the path up between two transfers, unless that is done."""
        with self._changed:
            if not self._has_left:
                self._give_up(reason, is_closed)
        self._switch_if_due()

    def await_switch(self, what: str) -> int:
        """Wait until the link's transfers go on delegated; the epoch that they belong to.

        Raises:
            TimeoutError: If the peer says nothing of the failure; `PeerGoneError` if it is gone.
            LinkSwitchError: If the ends disagree.
        """
        with self._changed:
            self._changed.wait_for(self._is_over, self._timeout_s)
            self.raise_error()
            if not self.is_delegated:
                self._raise_lost()
                raise TimeoutError(
                    f"{what}: the direct path failed, and rank {self.peer} did not say within "
                    f"{self._timeout_s:g} s what it has"
                )
            self._came_s = None
            return self.epoch

    def begin_delegated(self) -> None:
        """Begin without a direct path, as the peer does; nothing has been sent so far."""
        with self._changed:
            self._begin_next_epoch()

    def begin_direct(self) -> None:
        """Begin on the direct path again, at the same boundary as the peer, after a switch."""
        with self._changed:
            self._begin_next_epoch()  # a direct one again
            self._here = 0
            if self.peer_gave_up:  # it was restored first, and has failed since
                self._give_up("", is_closed=False)
        self._switch_if_due()

    def take_failures(self) -> list[PathFailure]:
        """The switches since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def raise_error(self) -> None:
        """Raise what went wrong with a switch, if anything did."""
        if self._error is not None:
            raise LinkSwitchError(f"link {self.link}: {self._error}") from self._error

    def close(self) -> None:
        """End; the peer learns that this end is gone."""
        self._wires.close()
        self._thread.join(_CLOSING_S)

    @property
    def _has_left(self) -> bool:
        """Whether no transfer of the link may begin on the direct path."""
        return self.is_delegated or self._state is not None

    @property
    def _has_met(self) -> bool:
        return not self._peer_word.is_last and self._peer_word >= (self.epoch, self._here)

    def _begin_next_epoch(self) -> None:
        """The only step that an epoch takes; the lock is held."""
        self.epoch += 1
        self._state = None
        self._changed.notify_all()

    def _say_here(self) -> Word | None:
        """Send the word that this end is at its next transfer; None if the path is given up."""
        with self._changed:
            if self._has_left:
                return None
            self._came_s = time.monotonic()
            self._here += 1
            here = Word(self.epoch, self._here)
            self._send(self._wires.words, here.to_bytes())
            return here

    def _await_word(self, due: Word, until_s: float) -> None:
        """Wait until the peer has come, has given the path up, or is gone.

        What is due is fixed before: the link's own thread may begin the next epoch meanwhile.
        """
        lost = None
        try:
            while self._peer_word < due:
                self._wires.words.limit(max(until_s - time.monotonic(), _SHORTEST_S))
                self._peer_word = Word.from_bytes(self._wires.words.receive())
        except TimeoutError:
            return
        except (ConnectionLostError, OSError) as error:
            lost = str(error)
            self._wires.states.close()  # so that the other thread sees it too
        except Exception as error:  # what the peer says makes no sense
            self._fail(error)
        if not self._has_met:  # the other thread learns what became of the path, or of the peer
            with self._changed:
                self._changed.wait_for(self._has_ended, max(until_s - time.monotonic(), 0.0))
                self._lost = self._lost or lost

    def _has_ended(self) -> bool:
        return self._has_left or self._lost is not None or self._failed

    def _is_over(self) -> bool:
        return self.is_delegated or self._lost is not None or self._failed

    @property
    def _failed(self) -> bool:
        return self._error is not None

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise PeerGoneError(f"rank {self.peer} is gone: {self._lost}")

    def _send(self, wire: Connection, message: bytes) -> None:
        try:
            wire.send(message)
        except (ConnectionLostError, OSError) as error:
            self._lost = self._lost or str(error)

    def _give_up(self, reason: str, is_closed: bool) -> None:
        """Complete no more of this epoch, and say so; the lock is held."""
        self._state = EndState(self.epoch + 1, self._received(), is_closed, reason)
        self._send(self._wires.states, self._state.to_bytes())
        self._send(self._wires.words, Word.given_up(self.epoch).to_bytes())
        self._changed.notify_all()

    def _listen(self) -> None:
        try:
            while True:
                self._take_peer_state(EndState.from_bytes(self._wires.states.receive()))
        except (ConnectionLostError, OSError) as error:
            with self._changed:
                self._lost = self._lost or str(error)
                self._changed.notify_all()
        except Exception as error:  # what the peer says makes no sense
            self._fail(error)
        self._wires.words.close()  # wakes the queue's thread, if it waits for a word

    def _take_peer_state(self, state: EndState) -> None:
        with self._changed:
            self._peer_states[state.epoch] = state
            if self.peer_gave_up and self._state is None and not self._is_inside:
                self._give_up("", is_closed=False)
        self._on_peer_state()  # the queue may be waiting for an emulated link, in vain
        self._switch_if_due()

    def _switch_if_due(self) -> None:
        """Switch once both ends have given the path up; on the thread that finds it so."""
        with self._changed:
            own = self._state
            if own is None or not self.peer_gave_up:
                return
            other = self._peer_states.pop(own.epoch)  # one thread finds it
        try:
            resent = self._resend(other)
        except Exception as error:  # raised where the switch is waited for
            self._fail(error)
            return
        with self._changed:
            self._failures.append(self._failure(own, other, resent))
            self.times_closed += own.is_closed or other.is_closed
            self._begin_next_epoch()

    def _failure(self, own: EndState, other: EndState, resent: int) -> PathFailure:
        reported = f"rank {self.peer} reports: {other.reason}"
        held_up_s = 0.0 if self._came_s is None else time.monotonic() - self._came_s
        return PathFailure(self.link, own.reason or reported, held_up_s, resent, own.is_closed)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
