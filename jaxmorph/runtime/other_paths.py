"""What becomes of a rank's other direct paths while one of its transfers hangs.

A network card that dies takes all links of its host with it. Each would be found by a transfer of
its own that hangs until its deadline, one after another; so they are asked of while the first one
hangs, and given up without a transfer.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from jaxmorph.schedule.costs import Link

_LOOKS = 4  # how often a transfer is looked at before it hangs
_TRIES, _BETWEEN_S = 10, 0.5


class Echoes(Protocol):
    """Asks the other ends of links beside all else (`path_echo.PathEchoes`)."""

    def reaches(self, link: Link) -> bool:
        """Ask once, and wait for the answer."""
        ...

    def watch(self, link: Link, answer_s: float) -> bool:
        """Ask again and again, unless somebody does; then False."""
        ...

    def is_down(self, link: Link) -> bool:
        """Whether one that is watched has been asked, and didn't answer the last time."""
        ...

    def forget(self, link: Link) -> None:
        """Ask no more."""
        ...


class OtherPaths:
    """Watches a rank's links from when a transfer of one of them hangs to the end of the step.

    Args:
        links: The rank's direct ones. Those whose hosts don't even answer at the run's start, as
            where a host knows itself by a name of its own, are never taken for dead; nor are those
            that somebody else watches, as their paths have failed before.
        after_s: How long a transfer takes that hangs: half of when it is given up. By then others
            have been asked, and haven't answered.
        is_cut: Whether an emulated link is cut.
    """

    def __init__(
        self,
        links: Collection[Link],
        echoes: Echoes,
        after_s: float,
        is_cut: Callable[[Link], bool],
    ) -> None:
        self._links, self._echoes = tuple(links), echoes
        self._after_s, self._is_cut = after_s, is_cut
        self._inside: tuple[Link, float] | None = None
        self._reached: frozenset[Link] = frozenset()
        self._watched: set[Link] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="other paths", daemon=True)
        self._thread.start()

    def enter(self, link: Link) -> None:
        """Take note that a link's transfer begins, of both its ends."""
        self._inside = link, time.monotonic()

    def leave(self) -> None:
        """Take note that it is over, or given up."""
        self._inside = None

    def is_dead(self, link: Link) -> bool:
        """Whether a link's path was found dead while a transfer of another one hung."""
        with self._lock:
            if link not in self._watched:
                return False
        return self._is_cut(link) or (link in self._reached and self._echoes.is_down(link))

    def settle(self, failed: Collection[Link]) -> None:
        """Watch none of them any more, at the end of a step.

        Args:
            failed: Those that somebody else goes on to watch.
        """
        with self._lock:
            for link in self._watched.difference(failed):
                self._echoes.forget(link)
            self._watched.clear()

    def close(self) -> None:
        """Look at no more transfers."""
        self._closed.set()
        self._thread.join(self._after_s)

    def _look(self) -> None:
        self._meet_hosts()
        while not self._closed.wait(self._after_s / _LOOKS):
            inside = self._inside
            if inside is not None and time.monotonic() - inside[1] >= self._after_s:
                self._watch_others(inside)

    def _meet_hosts(self) -> None:
        """Have all hosts answer once; they may be busy, as they start too."""
        for _ in range(_TRIES):
            missing = [link for link in self._links if link not in self._reached]
            self._reached |= {link for link in missing if self._echoes.reaches(link)}
            if len(self._reached) == len(self._links) or self._closed.wait(_BETWEEN_S):
                return

    def _watch_others(self, inside: tuple[Link, float]) -> None:
        with self._lock:
            if self._inside != inside:  # it was over meanwhile, and maybe the step
                return
            for link in self._links:
                if link != inside[0] and self._echoes.watch(link, self._after_s / 2):
                    self._watched.add(link)
