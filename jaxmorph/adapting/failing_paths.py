"""Rank 0's watch over direct paths that have failed: verdicts by what their ends tell."""

from collections.abc import Iterator

from jaxmorph.adapting.control_events import Happening, of_verdict
from jaxmorph.adapting.path_events import of_no_life_left, of_path_down
from jaxmorph.adapting.path_reports import PathNews
from jaxmorph.control.detector import Detector
from jaxmorph.control.fail_back import FailBack
from jaxmorph.control.verdicts import dead_links
from jaxmorph.schedule.costs import Link, Routes


class FailingPaths:
    """Turns what ranks tell of direct paths into verdicts on both directions of a link.

    Args:
        fail_back: Says when a path has returned.
        detector: Keeps the verdicts. The paths of links that are dead to it already have failed.
    """

    def __init__(self, fail_back: FailBack, detector: Detector) -> None:
        self._fail_back = fail_back
        self._detector = detector
        for link in dead_links(detector.verdicts.values()):
            fail_back.fail(link)

    @property
    def failed(self) -> frozenset[Link]:
        """The links that do without their direct paths now."""
        return self._fail_back.failed

    def begin_again(self, link: Link) -> None:
        """Take note that a direct path has begun again."""
        self._fail_back.begin_again(link)

    def observe(self, step: int, news: PathNews, routes: Routes) -> list[Happening]:
        """Take in what ranks have told of a step.

        Args:
            news: Its failures are new ones.
            routes: Those of the plan in force.

        Returns:
            What follows. Of the failures themselves others tell.
        """
        for failure in news.failures:
            self._fail_back.fail(failure.link)
            self._take_for_dead(step, failure.link, failure.detail)
        lives = sorted(news.lives_left.items())
        happened = [
            of_no_life_left(link) for link, left in lives if self._fail_back.limit(link, left)
        ]
        delegated = {link for link, route in routes.items() if route == "delegated"}
        turns = self._fail_back.observe(news.up, delegated)
        for link in turns.lost:
            self._take_for_dead(step, link, "its direct path is down again")
            happened.append(of_path_down(link))
        for link, up_steps in turns.returned.items():
            happened += self._return(step, link, up_steps)
        return happened

    def _take_for_dead(self, step: int, link: Link, detail: str) -> None:
        for source, destination in (link, link[::-1]):
            self._detector.observe_failure(step, source, destination, detail)

    def _return(self, step: int, link: Link, up_steps: int) -> Iterator[Happening]:
        for source, destination in (link, link[::-1]):
            before = self._detector.verdicts
            for verdict in self._detector.observe_return(step, source, destination, up_steps):
                told = of_verdict(verdict, before)
                if told is not None:
                    yield told
