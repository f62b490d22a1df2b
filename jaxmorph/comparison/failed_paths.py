"""Direct paths that failed in one round of a comparison, before the next one begins.

A round is to show what its own condition does. So what has failed in the one before begins again;
what can't is told of anew in each round, as it is without its direct path from its first step on.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from jaxmorph.adapting.path_reports import FAILURES, path_news
from jaxmorph.records import Message
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.schedule.costs import Link

_FAILED = "failed"
_PATIENCE_S = 3.0  # a path that is up is found so in a fraction of a second
_LOOK_AGAIN_S = 0.02


class RestoresPaths(Protocol):
    """A rank's stage, as far as its direct paths are concerned (`StageTrainer`)."""

    def link_failures(self) -> list[Message]:
        """The links whose direct paths were given up here since the last call."""
        ...

    def path_is_up(self, link: Link) -> bool | None:
        """Whether a failed link's path is up again; None: it hasn't failed, or not here."""
        ...

    def can_restore(self, link: Link) -> bool:
        """Whether a failed link can begin again."""
        ...

    def restore_direct(self, link: Link) -> None:
        """Has it begin again."""
        ...


class FailedPaths:
    """One rank's.

    Args:
        rendezvous: The meeting place of all ranks; they all make the same calls.
        links: All links of the pipeline.
        pause: Lets some seconds pass.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        trainer: RestoresPaths,
        links: Collection[Link],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._links = sorted(links)
        self._pause = pause

    def begin_again(self) -> list[Message]:
        """Have failed direct paths begin again, if both their ends can and find them up.

        That is between two rounds, while nothing is emulated.

        Returns:
            What this rank has to tell of its ends that stay delegated, as of new failures.
        """
        untold = {each["link"]: each for each in self._trainer.link_failures()}
        failed = [link for link in self._links if self._trainer.path_is_up(link) is not None]
        own = {str(link): self._can_begin(link) for link in failed}
        told = [report[_FAILED] for report in self._rendezvous.exchange({_FAILED: own})]
        stay: list[Message] = []
        for link in failed:
            if all(told[rank].get(str(link), False) for rank in link):
                self._trainer.restore_direct(link)
            else:
                stay.append(untold.get(str(link)) or self._told_anew(link))
        return stay

    def failures(self, stayed: Sequence[Message]) -> Mapping[str, int]:
        """How many direct paths failed in a round that nobody else watched, as events.

        Args:
            stayed: What `begin_again` has returned before it.
        """
        own = [*stayed, *self._trainer.link_failures()]
        failures = path_news(self._rendezvous.exchange({FAILURES: own})).failures
        return {"link_failed": len(failures)} if failures else {}

    def _can_begin(self, link: Link) -> bool:
        if not self._trainer.can_restore(link):
            return False
        for _ in range(round(_PATIENCE_S / _LOOK_AGAIN_S)):
            if self._trainer.path_is_up(link):
                return True
            self._pause(_LOOK_AGAIN_S)  # the other end's host is asked beside this
        return False

    def _told_anew(self, link: Link) -> Message:
        message = {"link": str(link), "detail": "its direct path failed in an earlier round"}
        return message if self._trainer.can_restore(link) else message | {"lives_left": 0}
