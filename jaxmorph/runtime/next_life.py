"""The programs of a link's next direct life, compiled beside the steps that go on without it."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxmorph.program.instructions import Channel

Programs = Mapping[Channel, Any]


class NextLife:
    """Compiles what a link needs to begin again, once for each time its devices were closed.

    Args:
        compiled: The programs of the link, given how often it has been closed.
    """

    def __init__(self, compiled: Callable[[int], Programs]) -> None:
        self._compiled = compiled
        self._made: dict[int, Future[Programs]] = {}

    def prepare(self, times_closed: int) -> None:
        """Begin to compile, if that is needed; waits for nothing.

        Args:
            times_closed: How often the link's devices have been made useless as they were.
        """
        if times_closed == 0 or times_closed in self._made:
            return
        self._made[times_closed] = Future()
        threading.Thread(
            target=self._make, args=(times_closed,), name="next life of a link", daemon=True
        ).start()

    def programs(self, times_closed: int) -> Programs:
        """What the link begins again with; waits until it is compiled.

        Args:
            times_closed: As for `prepare`; 0: what it has goes on.

        Raises:
            LinkExhaustedError: If it has no other life.
        """
        self.prepare(times_closed)
        return self._made[times_closed].result() if times_closed else {}

    def _make(self, times_closed: int) -> None:
        made = self._made[times_closed]
        try:
            made.set_result(self._compiled(times_closed))
        except Exception as error:  # raised where the programs are wanted
            made.set_exception(error)
