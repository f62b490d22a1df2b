"""What rank 0 books of direct paths that fail and come back, whether or not the run adapts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxmorph.adapting.path_events import of_failure, of_restored
from jaxmorph.adapting.path_reports import PathNews, path_news
from jaxmorph.control.failed_links import FailedLinks, in_words
from jaxmorph.control.measurements import LinkSample
from jaxmorph.records import Message
from jaxmorph.schedule.costs import Link, Route, Routes

Happening = dict[str, Any]


class TakesRestored(Protocol):
    """What else is told that direct paths have begun again (`control_loop`)."""

    def begin_again(self, links: Sequence[Link]) -> None:
        """Takes note of it."""
        ...


@dataclass(frozen=True)
class PathsOfStep:
    """What a step has shown of direct paths.

    Attributes:
        news: What ranks have told; a failure that was told before is not among it.
        happened: Of failures and of links that are back on their direct paths.
        samples: What the step's messages took, apart from those that went by hosts for want of a
            direct path.
        routes: The routes that messages took by the end of the step.
    """

    news: PathNews
    happened: tuple[Happening, ...]
    samples: Sequence[LinkSample]
    routes: dict[Link, Route]


class PathBooks:
    """Keeps account of the links that do without their direct paths; one thread does.

    Args:
        loop: Is told too when direct paths begin again; None: nobody is.
    """

    def __init__(self, loop: TakesRestored | None, failed: Iterable[Link] = ()) -> None:
        self._links = FailedLinks(failed)
        self._loop = loop

    def read(
        self, reports: Sequence[Message], samples: Sequence[LinkSample], routes: Routes
    ) -> PathsOfStep:
        """Take in a step.

        Args:
            reports: All ranks' messages of the meeting that ended it, in rank order.
            routes: Those of the plan that it ran.
        """
        told = path_news(reports)
        news = replace(told, failures=self._links.note(told.failures))
        return PathsOfStep(
            news,
            (*map(of_failure, news.failures), *of_restored(self._links.restored(routes))),
            self._links.of_paths(samples),
            self._links.as_run(routes),
        )

    def in_words(self) -> dict[str, str]:
        """The links that do without their direct paths, each in a few words."""
        return in_words(self._links.now)

    def begin_again(self, links: Sequence[Link]) -> None:
        """Take note that direct paths have begun again after the step that was read last."""
        self._links.begin_again(links)
        if self._loop is not None:
            self._loop.begin_again(links)
