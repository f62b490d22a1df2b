"""The direct route of links that fail over: when a link's path fails, the hosts carry its messages.

If the run adapts (`hands_over`), they also carry them when a path becomes slow.

Transfers on this route always occupy the queue. After a failure the data plane carries them:
receives still wait on the queue, and sends wait only for a free slot. So the order of the rank's
instructions stays the one that was checked for deadlocks.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import jax

from jaxmorph.control.handover import EndWatch, SlowLink, late_in_words
from jaxmorph.control.link_state import PathFailure
from jaxmorph.program.instructions import Payload, SendReceive
from jaxmorph.progress import progress
from jaxmorph.records import Link
from jaxmorph.runtime.causes import LongWaits
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct import DirectRoute, KeptOutputs, PathFailedError
from jaxmorph.runtime.link_connections import PathPings
from jaxmorph.runtime.link_programs import LinkCommunicators, Programs
from jaxmorph.runtime.link_switch import Counts, EndState, LinkEnd, Notice, PeerConnections
from jaxmorph.runtime.routes import Moved, Posting, TransferIdentity, require_live
from jaxmorph.stage.compiling import in_background


class FailoverRoute:
    """Each link uses its direct path until that fails; `link_switch` describes how its ends agree.

    A path fails when a collective raises an error, when an emulated cut outlasts its deadline, when
    `PathWatch` finds it dead, or when the peer has left it. An unexpected message, a peer that
    doesn't come and a peer that is gone are errors instead.

    Only a link's `LinkEnd` knows the link's state. Identities carry its epoch.

    Queue thread: `post`, `take`, `post_and_take`. Training thread: `_watch_delegated`, and while
    the queue is empty all other methods. A link's own thread: `_received`, `_resend`. Any thread:
    `_pass_on`.

    Args:
        direct: Carries messages while a link's path works, and keeps what it sends.
        connections: To the other end of each link that may be direct.
        communicators: Those over which a restored link starts again.
        watch: Finds the paths that died together with one whose transfer hangs.
        waits: The delegated route's waits, forwarded over the links' connections.
        hands_over: Whether a slow link leaves its path in mid-step.
        await_queue: Waits for the ops before a transfer, where the host may be ahead of them.

    Attributes:
        on_slow: Called on every rank as soon as any link has turned slow, by any thread.
        judges: Whether slow messages count against their links. An evaluation sends messages faster
            than links carry them, so they also wait for each other.
    """

    holds_queue = True  # receives wait there, whatever carries their messages

    def __init__(
        self,
        direct: DirectRoute,
        delegated: DelegatedRoute,
        connections: Mapping[Link, PeerConnections],
        rank: int,
        timeout_s: float,
        communicators: LinkCommunicators,
        watch: "PathWatch",
        waits: LongWaits | None = None,
        *,
        hands_over: bool = False,
        await_queue: Callable[[], None],
    ) -> None:
        self._await_queue = await_queue
        self._direct, self._delegated = direct, delegated
        self._direct_watches = {link: EndWatch(link) for link in connections if hands_over}
        self._delegated_watches = {link: EndWatch(link) for link in connections}
        self.on_slow: Callable[[SlowLink], None] = lambda slow: None
        self.judges = True
        self._passed_on: set[object] = set()  # the keys of notices
        self._passing_on = threading.Lock()
        self.kept = direct.kept = KeptOutputs()
        self._timeout_s = timeout_s
        self._rank, self._watch = rank, watch
        self._waits = waits or LongWaits(rank)
        self._ends = {
            link: LinkEnd(
                link,
                rank,
                to_peer,
                received=partial(self._received, link),
                resend=partial(self._resend, link),
                on_peer_state=direct.links.look_again,
                timeout_s=timeout_s,
                waits=self._waits,
                on_notice=self._pass_on,
            )
            for link, to_peer in connections.items()
        }
        self._waits.forward = {link: end.forward for link, end in self._ends.items()}
        self._communicators = communicators
        self._compiled: dict[tuple[Link, int], Future[Programs]] = {}
        direct.links.peer_has_left = lambda link: self._ends[link].peer_has_left
        delegated.path_failure = self._path_failure
        delegated.on_taken = self._watch_delegated

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """One posting for the whole message; on the delegated route it waits for slots itself."""
        del deadline_s
        yield partial(self.post, identity)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send on the link's current route and wait until the message has left.

        Raises:
            TimeoutError: If the peer doesn't come; `PeerGoneError` if it is gone.
            LinkSwitchError: If the ends of a failed link disagree.
        """
        end = self._end(identity)
        jax.block_until_ready(value)  # an error of the op that made it is not the link's
        if not end.await_peer(str(identity)):
            return self._post_delegated(end, identity, value, arrived_s)
        progress.stamp_queue(identity.transfer)
        self.kept.release(end.link)  # the peer is here, so it has received everything before
        met_s = time.monotonic()
        try:
            with self._watch.transfer(end.link):
                moved = self._direct.post(identity._replace(epoch=end.epoch), value, arrived_s)
        except _FAILURES as error:
            self._leave(end, error)
            # The switch resends the message if the peer has not received it.
            end.await_switch(str(identity))
            return Moved(value, over_s=time.monotonic())
        self._end_transfer(end, moved, arrived_s, met_s, identity)
        return moved

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive the expected message on the link's current route; raises the errors of `post`."""
        end = self._end(identity)
        if end.await_peer(str(identity)):
            progress.stamp_queue(identity.transfer)
            met_s = time.monotonic()
            try:
                with self._watch.transfer(end.link):
                    in_epoch = identity._replace(epoch=end.epoch)
                    moved = self._direct.take(in_epoch, arrived_s, deadline_s)
            except _FAILURES as error:
                self._leave(end, error)
            else:
                self._end_transfer(end, moved, arrived_s, met_s, identity)
                return moved
        return self._take_delegated(end, identity, arrived_s, deadline_s)

    def post_and_take(
        self,
        sent: TransferIdentity,
        value: jax.Array,
        received: TransferIdentity,
        arrived_s: float,
        deadline_s: float,
    ) -> Moved:
        """Move a pair while the link's path works, else two single messages; raises as `post`.

        If the path fails during a pair, one message may have come without the other.
        """
        end, pair = self._end(sent), SendReceive(sent.transfer, received.transfer)
        jax.block_until_ready(value)  # an error of the op that made it is not the link's
        if end.await_peer(str(sent)):
            progress.stamp_queue(pair)
            self.kept.release(end.link)  # the peer is here, so it has received everything before
            now = [each._replace(epoch=end.epoch) for each in (sent, received)]
            met_s = time.monotonic()
            try:
                with self._watch.transfer(end.link):
                    moved = self._direct.post_and_take(now[0], value, now[1], arrived_s, deadline_s)
            except _FAILURES as error:
                self._leave(end, error)  # the switch resends `sent` if the peer lacks it
            else:
                self._end_transfer(end, moved, arrived_s, met_s, sent, received)
                return moved
            return self._take_delegated(end, received, arrived_s, deadline_s)
        posted = self._post_delegated(end, sent, value, arrived_s)
        moved = self._take_delegated(end, received, arrived_s, deadline_s)
        ends_s = [each.over_s for each in (posted, moved) if each.over_s is not None]
        return replace(moved, over_s=max(ends_s, default=None))

    def abandon(self, epoch: int) -> None:
        """Refuse all further transfers: see `DirectRoute.abandon`."""
        self._direct.abandon(epoch)

    def settle(self) -> None:
        """Raise the error of a switch that no transfer has waited for."""
        for end in self._ends.values():
            end.raise_error()

    def end_step(self) -> None:
        """Keep no outputs of the step: all ranks have exchanged reports, so all was received."""
        for link in self._ends:
            self.kept.release(link)
        self._watch.end_step([link for link in self._ends if self.has_failed_over(link)])
        for watch in (*self._direct_watches.values(), *self._delegated_watches.values()):
            watch.end_step()

    def take_failures(self) -> list[PathFailure]:
        """The path failures since the last call."""
        found = []
        for link, end in self._ends.items():
            for failure in end.take_failures():
                retired = end.retired_communicators
                if 0 < retired < self._communicators.count:
                    self._programs(link, retired)  # begin to compile: only `restore` waits for it
                found.append(replace(failure, restores_left=self._communicators.count - retired))
        return found

    def has_failed_over(self, link: Link) -> bool:
        """Whether this rank is an end of the link and the link has failed over."""
        return link in self._ends and self._ends[link].has_failed_over

    def path_is_up(self, link: Link) -> bool | None:
        """Whether a direct path that was left seems to work; None if it was not left.

        The first call starts to ping the other end's host in the background; no call waits.
        """
        if not self.has_failed_over(link):
            return None
        return self._ends[link].is_handed_over or self._watch.is_up(link)

    def begin_failed_over(self, link: Link) -> None:
        """Start a link without its direct path; both ends do so before anything is sent."""
        self._ends[link].begin_failed_over()

    def can_restore(self, link: Link) -> bool:
        """Whether a link that has switched can return to the direct route."""
        if not self.has_failed_over(link):
            return False
        return self._ends[link].retired_communicators < self._communicators.count

    def restore(self, link: Link) -> None:
        """Start a link's next direct epoch; both ends do so at the same step boundary."""
        end = self._ends[link]
        if end.retired_communicators:
            self._direct.replace_programs(self._programs(link, end.retired_communicators).result())
        end.begin_direct()
        self._watch.forget(link)
        if link in self._direct_watches:
            self._direct_watches[link].restart()

    def close(self) -> None:
        """Close the connections; the other ends see that this rank is gone."""
        self._watch.close()
        for end in self._ends.values():
            end.close()

    def _programs(self, link: Link, number: int) -> "Future[Programs]":
        """A link's programs over another communicator, compiled in the background."""
        if (link, number) not in self._compiled:
            programs = partial(self._communicators.programs, link, number)
            self._compiled[link, number] = in_background(programs, "link programs")
        return self._compiled[link, number]

    def _end(self, identity: TransferIdentity) -> LinkEnd:
        require_live(identity, self._direct.abandoned)
        end = self._ends[identity.transfer.link]
        if end.link in self._direct_watches and not end.has_failed_over:
            self._await_queue()  # else the ops' time would count as the message's, at both ends
        if not end.has_failed_over and self._watch.is_dead(end.link):
            found = "its path was found dead while a transfer of another link hung"
            # A connection through a dead card may stay open and never report an error, so its
            # communicator isn't used again. An emulated cut breaks no connection.
            retires_communicator = not self._direct.links.is_cut(end.link, identity.step)
            end.leave_path(found, retires_communicator=retires_communicator)
        return end

    @staticmethod
    def _leave(end: LinkEnd, error: PathFailedError | TimeoutError) -> None:
        progress.stamp_queue(f"link {end.link}, whose path has failed")
        if isinstance(error, PathFailedError):
            end.end_transfer(error.reason, retires_communicator=True)
        else:  # an emulated cut, which breaks no collective
            end.end_transfer(str(error))

    def _end_transfer(
        self,
        end: LinkEnd,
        moved: Moved,
        arrived_s: float,
        met_s: float,
        *identities: TransferIdentity,
    ) -> None:
        """End a transfer, or a pair; hand the link over if its messages have become slow.

        Args:
            arrived_s: When this end's queue came to it.
            met_s: When both ends were there, by this host's clock.
        """
        end.end_transfer()
        watch = self._direct_watches.get(end.link) if self.judges else None
        transfers = [each.transfer for each in identities]
        if watch is None or any(each.payload is Payload.TIED for each in transfers):
            return  # a tied gradient comes once a step and has another length
        over_s = time.monotonic()
        if moved.over_s is not None:  # by the clock of paced queues
            over_s, met_s = moved.over_s, max(arrived_s, moved.peer_arrived_s or met_s)
        ends_s = moved.each_over_s or [over_s] * len(transfers)
        took_ms = {
            (each.source, each.destination): 1e3 * max(0.0, end_s - met_s)
            for each, end_s in zip(transfers, ends_s, strict=True)
        }
        if late_ms := watch.late_messages(took_ms, 1e3 * over_s):
            end.leave_path(late_in_words(late_ms), late_ms=late_ms)

    def _watch_delegated(
        self, identity: TransferIdentity, posted_s: float, received_s: float
    ) -> None:
        """Report a delegated link that has become slow, in the direction to this end."""
        transfer = identity.transfer
        watch = self._delegated_watches.get(transfer.link) if self.judges else None
        if watch is None or transfer.payload is Payload.TIED or identity.epoch % 2:
            return  # in odd epochs the message waits for the queue
        took_ms = {(transfer.source, transfer.destination): 1e3 * (received_s - posted_s)}
        late_ms = watch.late_messages(took_ms, 1e3 * received_s)
        name = f"{transfer.source}>{transfer.destination}"
        if name in late_ms:
            slow = SlowLink(transfer.link, {name: late_ms[name]})
            self._pass_on(Notice(slow, identity.step), None)

    def _pass_on(self, notice: Notice, came_over: Link | None) -> None:
        """Notify all ranks, once, that a link is slow."""
        with self._passing_on:
            if notice.key in self._passed_on:
                return
            self._passed_on.add(notice.key)
        self.on_slow(notice.slow)
        for link, end in self._ends.items():
            if link != came_over:
                end.forward(notice)

    def _post_delegated(
        self, end: LinkEnd, identity: TransferIdentity, value: jax.Array, arrived_s: float
    ) -> Moved:
        identity = identity._replace(epoch=end.await_switch(str(identity)))
        progress.stamp_queue(identity.transfer)
        is_free = self._delegated.has_free_slot(identity)
        moved = self._delegated.post(identity, value, arrived_s, self._timeout_s)
        return moved if is_free else replace(moved, over_s=time.monotonic())

    def _take_delegated(
        self, end: LinkEnd, identity: TransferIdentity, arrived_s: float, deadline_s: float
    ) -> Moved:
        epoch = end.await_switch(str(identity))
        progress.stamp_queue(identity.transfer)
        # The failed transfer may have used up the deadline.
        deadline_s = max(deadline_s, time.monotonic() + self._timeout_s)
        return self._delegated.take(identity._replace(epoch=epoch), arrived_s, deadline_s)

    def _path_failure(self, link: Link) -> str:
        return self._ends[link].path_failure if link in self._ends else ""

    def _received(self, link: Link) -> Counts:
        return {
            channel: self._direct.received[channel]
            for channel in self._direct.channels(link)
            if channel.destination == self._rank
        }

    def _resend(self, link: Link, peer: EndState) -> int:
        """Resend, in order and in the next epoch, the messages that the peer has not received."""
        rest = [
            self.kept.take_uncovered(channel, peer.received[channel])
            for channel in self._direct.channels(link)
            if channel.source == self._rank
        ]
        for identity, value in chain.from_iterable(rest):
            again = identity._replace(epoch=peer.epoch)
            self._delegated.post(again, value, time.monotonic(), self._timeout_s)
        return sum(map(len, rest))


_FAILURES = (TimeoutError, PathFailedError)
_CHECKS_BEFORE_HANGING = 4  # of a transfer, before it counts as hanging
_TRIES, _BETWEEN_S = 10, 0.5


class PathWatch:
    """Finds the direct paths that died together with one whose transfer hangs.

    A network card that dies takes all links of its host with it. Without the watch, each link would
    be found only by one of its own transfers, which hangs until its deadline, one after another. So
    while the first transfer hangs, and until the end of the step, the other ends are pinged, and
    links whose hosts don't answer fail over without a transfer. After a failure, the other end of
    the failed path is pinged until the link is restored.

    Queue thread: `transfer`, `is_dead`. Training thread: all other methods. The watch's own thread:
    `_look`. The lock keeps `_look` from starting pings after `end_step` has stopped them.

    Args:
        links: The rank's direct links. One whose host doesn't answer at the run's start, for
            example because the host knows itself by a loopback address, is never found dead,
            unless its cut is emulated.
        after_s: How long a transfer takes before it counts as hanging: half of its deadline, so
            that there is time to ping others and get no answer.
        is_cut: Whether an emulated link is cut.
    """

    def __init__(
        self,
        links: Collection[Link],
        pings: PathPings,
        after_s: float,
        is_cut: Callable[[Link], bool],
    ) -> None:
        self._links, self._pings = tuple(links), pings
        self._after_s, self._is_cut = after_s, is_cut
        self._current: tuple[Link, float] | None = None
        self._reached: frozenset[Link] = frozenset()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="path watch", daemon=True)
        self._thread.start()

    @contextmanager
    def transfer(self, link: Link) -> Iterator[None]:
        """Watch a link's transfer for as long as this lasts."""
        self._current = link, time.monotonic()
        try:
            yield
        finally:
            self._current = None

    def is_dead(self, link: Link) -> bool:
        """Whether a link's path was found dead while a transfer of another link hung."""
        if not self._pings.is_watched(link):
            return False
        return self._is_cut(link) or (link in self._reached and self._pings.is_down(link))

    def is_up(self, link: Link) -> bool:
        """Whether the other end of a failed path answers; it is pinged from now on."""
        self._pings.watch(link)
        return self._pings.is_up(link) and not self._is_cut(link)

    def forget(self, link: Link) -> None:
        """Stop pinging the other end of a link."""
        self._pings.forget(link)

    def end_step(self, failed: Collection[Link]) -> None:
        """Stop the pings that a hanging transfer has started; failed links are pinged further."""
        with self._lock:
            for link in self._links:
                if link not in failed:
                    self._pings.forget(link)

    def close(self) -> None:
        """Stop the watch's thread."""
        self._closed.set()
        self._thread.join(self._after_s)

    def _look(self) -> None:
        self._reach_hosts()
        while not self._closed.wait(self._after_s / _CHECKS_BEFORE_HANGING):
            current = self._current
            if current is not None and time.monotonic() - current[1] >= self._after_s:
                self._ping_others(current)

    def _reach_hosts(self) -> None:
        """Ping all hosts once, with retries: they may be busy, as they are starting too."""
        for _ in range(_TRIES):
            missing = [link for link in self._links if link not in self._reached]
            self._reached |= {link for link in missing if self._pings.reaches(link)}
            if len(self._reached) == len(self._links) or self._closed.wait(_BETWEEN_S):
                return

    def _ping_others(self, hanging: tuple[Link, float]) -> None:
        with self._lock:
            if self._current != hanging:  # the transfer has ended, and perhaps the step
                return
            for link in self._links:
                if link != hanging[0]:
                    self._pings.watch(link, self._after_s / 2)
