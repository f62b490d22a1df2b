"""Says every few seconds what starting ranks do, so that a slow start doesn't look dead."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from jaxmorph.progress import progress

_EVERY_S = 10.0
_LOOK_S = 0.5
_MOST_GROUPS = 3  # in one line
_WAITS = "waits for rank "  # as `rendezvous` stamps it
_NOTHING_YET = "loads Python and its libraries"

Doing = Mapping[int, str]
"""What each rank does, in words; empty for a rank that has not reported yet."""


def in_words(doing: Doing) -> str:
    """What ranks do, in one line, without ranks that only wait for others.

    >>> in_words({0: "starts, waits for rank 1", 1: "starts, compiling 4 of 7 programs"})
    'rank 1: starts, compiling 4 of 7 programs'
    """
    busy = {rank: text for rank, text in doing.items() if _WAITS not in text} or doing
    ranks_by_text: dict[str, list[str]] = {}
    for rank, text in sorted(busy.items()):
        ranks_by_text.setdefault(text or _NOTHING_YET, []).append(f"{rank}")
    groups = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}"
        for text, ranks in ranks_by_text.items()
    ]
    more = len(groups) - _MOST_GROUPS
    return "; ".join(groups[:_MOST_GROUPS]) + (f"; and {more} more" if more > 0 else "")


class StartLines:
    """Shows lines about each start of the ranks.

    Args:
        say: Takes a line.
        clock: Monotonic seconds.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._said_s = 0.0
        self._is_over = threading.Event()
        self._is_over.set()

    def begin(self) -> None:
        """Ranks start now."""
        self._said_s = self._clock()
        self._is_over.clear()

    def end(self) -> None:
        """The ranks have started."""
        self._is_over.set()

    def look(self, doing: Callable[[], Doing | str]) -> None:
        """Say what ranks do, if they are starting and a line is due."""
        now_s = self._clock()
        if not self._is_over.is_set() and now_s - self._said_s >= _EVERY_S:
            self._said_s = now_s
            found = doing()
            self._say(found if isinstance(found, str) else in_words(found))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within this context, say on a thread what this process does or waits for."""
        self.begin()
        threading.Thread(target=self._look_regularly, name="start lines", daemon=True).start()
        try:
            yield
        finally:
            self.end()

    def _look_regularly(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look(progress.in_words)
