"""What the ranks of a run tell one another, over the host network and in one fixed order."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import jax

from jaxmorph.runtime.coordination import KeyValueStore

Message = dict[str, Any]

# Old rounds are forgotten a block at a time, so that the store doesn't grow with the run.
_ROUNDS_PER_BLOCK = 64


class RendezvousTimeoutError(RuntimeError):
    """A rank didn't come to a meeting in time."""


class Rendezvous(Protocol):
    """How ranks exchange control messages; every rank calls the same methods in the same order."""

    rank: int
    num_ranks: int

    def exchange(self, message: Message) -> list[Message]:
        """All ranks' messages, in rank order; also a barrier."""
        ...


class SoleRank:
    """The rendezvous of a run with one rank: it hears only itself."""

    rank = 0
    num_ranks = 1

    def exchange(self, message: Message) -> list[Message]:
        """The own message, as it would come back from the network."""
        return [json.loads(json.dumps(message))]


class CoordinationRendezvous:
    """Messages through JAX's coordination service: gathered by rank 0, which sends all to all.

    Args:
        deadline_s: How long a rank waits for the others before it gives up.
        store: The run's key-value store.
        rank: This process's rank.
        num_ranks: How many ranks there are.
    """

    def __init__(self, deadline_s: float, store: KeyValueStore, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._store = store
        self._round = 0
        self._threads = ThreadPoolExecutor(max(1, num_ranks - 1), "jaxmorph-rendezvous")

    def exchange(self, message: Message) -> list[Message]:
        """All ranks' messages, in rank order; also a barrier.

        Args:
            message: What this rank says; anything JSON can hold.

        Returns:
            One message per rank, this rank's own included.

        Raises:
            RendezvousTimeoutError: If a rank doesn't come within the deadline; it names the rank.
        """
        prefix = f"{self._block(self._round)}{self._round}"
        mine = json.dumps(message)
        if self.rank == 0:
            # All at once: each look-up is a round trip, also when the message is there already.
            others = self._threads.map(partial(self._get, prefix), range(1, self.num_ranks))
            text = f"[{','.join([mine, *others])}]"
            self._store.key_value_set(f"{prefix}/all", text)
            self._forget_old_rounds()
        else:
            self._store.key_value_set(f"{prefix}/{self.rank}", mine)
            text = self._get(prefix, "all")
        self._round += 1
        return json.loads(text)

    @staticmethod
    def _block(number: int) -> str:
        return f"jaxmorph/{number // _ROUNDS_PER_BLOCK}/"

    def _get(self, prefix: str, who: int | str) -> str:
        try:
            return self._store.blocking_key_value_get(
                f"{prefix}/{who}", int(self._deadline_s * 1000)
            )
        except jax.errors.JaxRuntimeError as error:
            late = f"rank {who}" if who != "all" else "rank 0, which waits for all others,"
            reason = (
                f"{late} did not come to meeting {self._round} within {self._deadline_s:g} s"
                if "DEADLINE_EXCEEDED" in str(error)
                else f"the coordination service is gone ({str(error).splitlines()[0]})"
            )
            raise RendezvousTimeoutError(reason) from error

    def _forget_old_rounds(self) -> None:
        """In the second round of a block every rank has read all of the block before: drop it."""
        if self._round > 1 and self._round % _ROUNDS_PER_BLOCK == 1:
            self._store.key_value_delete(self._block(self._round - _ROUNDS_PER_BLOCK))
