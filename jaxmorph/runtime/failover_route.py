"""The direct route of links whose path may fail: what it can't carry goes on delegated at once.

It stands on the queue like the direct route, whatever carries its messages: where a link has
switched, a receive waits on the queue for what the data plane brings, and a send waits for no more
than a slot. So the order of the rank's program stays as it was checked.
"""

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import jax

from jaxmorph.control.link_state import PathFailure
from jaxmorph.records import Link
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct import DirectRoute, KeptOutputs, LinkCommunicators, Programs
from jaxmorph.runtime.link_connections import PathEchoes
from jaxmorph.runtime.link_switch import Counts, EndState, LinkEnd, LinkWires
from jaxmorph.runtime.routes import Moved, Posting, TransferIdentity, require_live


class FailoverRoute:
    """Direct, link by link, until a link's path fails; see `link_switch` for how its ends agree.

    An error of a collective and an emulated cut that outlasts its deadline are failures of a path.
    A message that isn't the expected one, a peer that doesn't come and one that is gone are not:
    they are raised.

    What a link's state is only its `LinkEnd` knows. A transfer's identity carries its link's epoch.

    Queue thread: `post`, `take`. Training thread, while the queue is empty: all other methods. A
    link's own thread: `_received`, `_resend`.

    Args:
        direct: What carries messages while a link's path is whole; it keeps what it sends.
        wires: To the other end of each link that may be direct.
        timeout_s: How long to wait for the peer.
        communicators: What a link begins again over.
        watch: What the hosts at the other ends of links say of paths.

    Attributes:
        kept: What was sent directly and may not have come.
    """

    def __init__(
        self,
        direct: DirectRoute,
        delegated: DelegatedRoute,
        wires: Mapping[Link, LinkWires],
        rank: int,
        timeout_s: float,
        communicators: LinkCommunicators,
        watch: "PathWatch",
    ) -> None:
        self._direct, self._delegated = direct, delegated
        self.kept = direct.kept = KeptOutputs()
        self._timeout_s = timeout_s
        self._channels = {
            link: [channel for channel in direct.programs if channel.link == link] for link in wires
        }
        self._rank, self._watch = rank, watch
        self._ends = {link: self._make_end(link, to_peer) for link, to_peer in wires.items()}
        self._communicators = communicators
        self._compiled: dict[tuple[Link, int], Future[Programs]] = {}
        direct.given_up = lambda link: self._ends[link].peer_gave_up

    @property
    def holds_queue(self) -> bool:
        """True: receives wait on the queue, whatever carries their messages."""
        return True

    def reserve(self, identity: TransferIdentity, deadline_s: float) -> Iterator[Posting]:
        """The whole message: where it needs room it waits for that on the queue."""
        del deadline_s
        yield partial(self.post, identity)

    def post(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Send, and wait until the message has left; on whichever route it does.

        Raises:
            TimeoutError: If the peer doesn't come; `PeerGoneError` if it is gone.
            LinkSwitchError: If the ends of a link that failed disagree.
        """
        end = self._end(identity)
        jax.block_until_ready(value)  # an error of the op that made it is none of the link's
        if not end.meet(str(identity)):
            return self._post_delegated(end, identity, value, arrived_s)
        self.kept.let_go(end.link)  # the peer is here: it has all that was before
        try:
            with self._watch.transfer(end.link):
                moved = self._direct.post(identity._replace(epoch=end.epoch), value, arrived_s)
                jax.block_until_ready(moved.value)
        except _FAILURES as error:
            self._give_up(end, error)
            end.await_switch(str(identity))  # by then it has been sent again, if it needs to be
            return Moved(value, over_s=time.monotonic())
        end.leave()
        return moved

    def take(self, identity: TransferIdentity, arrived_s: float, deadline_s: float) -> Moved:
        """Receive the expected message, on whichever route it comes; errors are as of `post`."""
        end = self._end(identity)
        if end.meet(str(identity)):
            try:
                with self._watch.transfer(end.link):
                    in_epoch = identity._replace(epoch=end.epoch)
                    moved = self._direct.take(in_epoch, arrived_s, deadline_s)
            except _FAILURES as error:
                self._give_up(end, error)
            else:
                end.leave()
                return moved
        epoch = end.await_switch(str(identity))
        deadline_s = max(deadline_s, time.monotonic() + self._timeout_s)
        return self._delegated.take(identity._replace(epoch=epoch), arrived_s, deadline_s)

    def abandon(self, epoch: int) -> None:
        """Refuse all that comes: see `DirectRoute.abandon`."""
        self._direct.abandon(epoch)

    def settle(self) -> None:
        """Raise what went wrong in a switch that no transfer has waited for."""
        for end in self._ends.values():
            end.raise_error()

    def let_go(self) -> None:
        """Keep nothing that was sent: all ranks have met, so everything has been taken."""
        for link in self._ends:
            self.kept.let_go(link)
        self._watch.end_step([link for link in self._ends if self.is_delegated(link)])

    def failures(self) -> list[PathFailure]:
        """What has failed since the last call, as a rank reports it."""
        found = []
        for link, end in self._ends.items():
            for failure in end.take_failures():
                if 0 < end.times_closed < self._communicators.count:
                    self._programs(link, end.times_closed)  # no step waits for it
                restores_left = self._communicators.count - end.times_closed
                found.append(replace(failure, restores_left=restores_left))
        return found

    def is_delegated(self, link: Link) -> bool:
        """Whether this rank is an end of a link that has left its direct path."""
        return link in self._ends and self._ends[link].is_delegated

    def path_is_up(self, link: Link) -> bool | None:
        """Whether the direct path of a link that failed seems whole again; None if none failed.

        The other end's host is asked beside training; nothing is waited for.
        """
        return self._watch.is_up(link) if self.is_delegated(link) else None

    def begin_delegated(self, link: Link) -> None:
        """Begin a link without its direct path, at both its ends, before anything has been sent."""
        self._ends[link].begin_delegated()

    def can_restore(self, link: Link) -> bool:
        """Whether a link that has switched can begin again on the direct route."""
        if not self.is_delegated(link):
            return False
        return self._ends[link].times_closed < self._communicators.count

    def restore(self, link: Link) -> None:
        """Begin a link's next direct epoch, at the same boundary at both its ends."""
        end = self._ends[link]
        if end.times_closed:
            self._direct.replace_programs(self._programs(link, end.times_closed).result())
        end.begin_direct()
        self._watch.forget(link)

    def close(self) -> None:
        """Let the other ends know that this rank is gone."""
        self._watch.close()
        for end in self._ends.values():
            end.close()

    def _make_end(self, link: Link, wires: LinkWires) -> LinkEnd:
        return LinkEnd(
            link,
            self._rank,
            wires,
            received=partial(self._received, link),
            resend=partial(self._resend, link),
            on_peer_state=self._direct.links.look_again,
            timeout_s=self._timeout_s,
        )

    def _programs(self, link: Link, number: int) -> "Future[Programs]":
        """What a link begins again with; compiled beside the steps that go on without it."""
        if (link, number) not in self._compiled:
            compiled = self._compiled[link, number] = Future()
            # A daemon: a process that ends doesn't wait for programs that nothing needs any more.
            arguments = compiled, partial(self._communicators.programs, link, number)
            threading.Thread(
                target=_compile, args=arguments, name="link programs", daemon=True
            ).start()
        return self._compiled[link, number]

    def _end(self, identity: TransferIdentity) -> LinkEnd:
        require_live(identity, self._direct.abandoned)
        end = self._ends[identity.transfer.link]
        if not end.is_delegated and self._watch.is_dead(end.link):
            found = "its path was found dead while a transfer of another link hung"
            # What a card that is gone has held open may never be heard of again.
            is_closed = not self._direct.links.is_cut(end.link, identity.step)
            end.give_up(found, is_closed=is_closed)
        return end

    def _give_up(self, end: LinkEnd, error: Exception) -> None:
        is_closed = _is_of_backend(error)
        if not is_closed and not isinstance(error, TimeoutError):
            raise error
        end.leave(_in_short(error), is_closed=is_closed)

    def _post_delegated(
        self, end: LinkEnd, identity: TransferIdentity, value: jax.Array, arrived_s: float
    ) -> Moved:
        identity = identity._replace(epoch=end.await_switch(str(identity)))
        has_room = self._delegated.has_room(identity)
        moved = self._send(identity, value, arrived_s)
        return moved if has_room else replace(moved, over_s=time.monotonic())

    def _send(self, identity: TransferIdentity, value: jax.Array, arrived_s: float) -> Moved:
        """Copy a message into a slot, or several parts of it one after another."""
        postings = self._delegated.reserve(identity, time.monotonic() + self._timeout_s)
        *_, last = [posting(value, arrived_s) for posting in postings]
        return last

    def _received(self, link: Link) -> Counts:
        return {
            channel: self._direct.received[channel]
            for channel in self._channels[link]
            if channel.destination == self._rank
        }

    def _resend(self, link: Link, peer: EndState) -> int:
        """Send what the peer hasn't taken once more, in order, in the epoch that follows."""
        outgoing = [each for each in self._channels[link] if each.source == self._rank]
        rest = [self.kept.take_uncovered(channel, peer.received[channel]) for channel in outgoing]
        for identity, value in chain.from_iterable(rest):
            self._send(identity._replace(epoch=peer.epoch), value, time.monotonic())
        return sum(map(len, rest))


def _compile(compiled: "Future[Programs]", programs: Callable[[], Programs]) -> None:
    try:
        compiled.set_result(programs())
    except Exception as error:  # raised where the programs are needed
        compiled.set_exception(error)


_FAILURES = (TimeoutError, jax.errors.JaxRuntimeError, ValueError)
_STATUS = re.compile("[A-Z_]+: ")
_LONGEST_REASON = 200


def _is_of_backend(error: Exception) -> bool:
    """Whether a collective has failed: while it is dispatched JAX raises that as a ValueError."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__


_LOOKS = 4  # how often a transfer is looked at before it hangs
_TRIES, _BETWEEN_S = 10, 0.5


class PathWatch:
    """What the hosts at the other ends of a rank's links say of its direct paths.

    A network card that dies takes all links of its host with it. Each would be found by a transfer
    of its own that hangs until its deadline, one after another; so the other ends are asked while
    the first one hangs, until the end of the step, and dead paths are given up without a transfer.
    The other end of a path that failed is asked until the link is restored. Which ends are asked
    only the `PathEchoes` know.

    Queue thread: `transfer`, `is_dead`. Training thread: all other methods. The watch's own thread:
    `_look`. Lock: asking other ends while a transfer hangs, against the end of the step.

    Args:
        links: The rank's direct ones. Those whose hosts don't even answer at the run's start, as
            where a host knows itself by a name of its own, are never taken for dead.
        after_s: How long a transfer takes that hangs: half of when it is given up. By then others
            have been asked, and haven't answered.
        is_cut: Whether an emulated link is cut.
    """

    def __init__(
        self,
        links: Collection[Link],
        echoes: PathEchoes,
        after_s: float,
        is_cut: Callable[[Link], bool],
    ) -> None:
        self._links, self._echoes = tuple(links), echoes
        self._after_s, self._is_cut = after_s, is_cut
        self._inside: tuple[Link, float] | None = None
        self._reached: frozenset[Link] = frozenset()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="path watch", daemon=True)
        self._thread.start()

    @contextmanager
    def transfer(self, link: Link) -> Iterator[None]:
        """While this lasts, a link's transfer is under way, and may hang."""
        self._inside = link, time.monotonic()
        try:
            yield
        finally:
            self._inside = None

    def is_dead(self, link: Link) -> bool:
        """Whether a link's path was found dead while a transfer of another one hung."""
        if not self._echoes.is_watched(link):
            return False
        return self._is_cut(link) or (link in self._reached and self._echoes.is_down(link))

    def is_up(self, link: Link) -> bool:
        """Whether the other end of a path that failed answers; it is asked from now on."""
        self._echoes.watch(link)
        return self._echoes.is_up(link) and not self._is_cut(link)

    def forget(self, link: Link) -> None:
        """Ask the other end of a link no more."""
        self._echoes.forget(link)

    def end_step(self, failed: Collection[Link]) -> None:
        """Ask no more for the sake of a transfer that hangs; go on with links that failed."""
        with self._lock:
            for link in self._links:
                if link not in failed:
                    self._echoes.forget(link)

    def close(self) -> None:
        """Look at no more transfers."""
        self._closed.set()
        self._thread.join(self._after_s)

    def _look(self) -> None:
        self._meet_hosts()
        while not self._closed.wait(self._after_s / _LOOKS):
            inside = self._inside
            if inside is not None and time.monotonic() - inside[1] >= self._after_s:
                self._ask_others(inside)

    def _meet_hosts(self) -> None:
        """Have all hosts answer once; they may be busy, as they start too."""
        for _ in range(_TRIES):
            missing = [link for link in self._links if link not in self._reached]
            self._reached |= {link for link in missing if self._echoes.reaches(link)}
            if len(self._reached) == len(self._links) or self._closed.wait(_BETWEEN_S):
                return

    def _ask_others(self, inside: tuple[Link, float]) -> None:
        with self._lock:
            if self._inside != inside:  # it was over meanwhile, and maybe the step
                return
            for link in self._links:
                if link != inside[0]:
                    self._echoes.watch(link, self._after_s / 2)
