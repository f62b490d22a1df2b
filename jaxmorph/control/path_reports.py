"""What ranks report of direct paths that fail and come back, and what follows from it on rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, verdict_event
from jaxmorph.control.link_state import FailedPaths, PathFailure
from jaxmorph.control.measurements import LinkSample
from jaxmorph.plain_json import written_as
from jaxmorph.records import EventKind, Link, Route, Routes


@dataclass(frozen=True)
class PathReport:
    """What one rank reports of direct paths with the meeting that ends a step.

    Attributes:
        failures: Of the links whose direct paths this rank gave up in the step.
        up: Of each link whose direct path has failed, whether this end finds it up.
        restore: From rank 0, the links whose direct paths are to begin again after the step.
    """

    failures: tuple[PathFailure, ...] = ()
    up: Mapping[Link, bool] = field(default_factory=dict)
    restore: tuple[Link, ...] = ()


@dataclass(frozen=True)
class PathNews:
    """What all ranks have reported of direct paths in a step.

    Attributes:
        failures: One for each link that failed.
        up: Of links that failed before, whether both ends find their direct paths up.
        restored: The links whose direct paths begin again after the step.
        restores_left: Of links of which that was reported, how often their direct paths can begin
            again; by an end that reported a failure later than the other, too.
        is_disturbed: Whether any end reported a failure: what waited for its link may have waited
            in the step's times.
    """

    failures: tuple[PathFailure, ...] = ()
    up: Mapping[Link, bool] = field(default_factory=dict)
    restored: tuple[Link, ...] = ()
    restores_left: Mapping[Link, int] = field(
        default_factory=dict, metadata=written_as("lives_left")
    )
    is_disturbed: bool = False


NO_NEWS = PathNews()


def path_news(reports: Sequence[PathReport]) -> PathNews:
    """What all ranks have reported; all of them come to the same.

    Args:
        reports: All ranks', in rank order.
    """
    failures: dict[Link, PathFailure] = {}
    for rank, report in enumerate(reports):
        for end in report.failures:
            failure = replace(end, reported_by=(rank,))
            before = failures.get(failure.link)
            failures[failure.link] = failure if before is None else before.joined(failure)
    named = {link for report in reports for link in report.up}
    up = {link: _is_up_at_both_ends(link, reports) for link in sorted(named)}
    # An end may have found it down since.
    restored = tuple(link for link in reports[0].restore if up.get(link, False))
    lives = ((link, failure.restores_left) for link, failure in sorted(failures.items()))
    return PathNews(
        tuple(failure for _, failure in sorted(failures.items())),
        up,
        restored,
        {link: left for link, left in lives if left is not None},
        is_disturbed=bool(failures),
    )


def _is_up_at_both_ends(link: Link, reports: Sequence[PathReport]) -> bool:
    return all(reports[rank].up.get(link, False) for rank in link)


@dataclass(frozen=True)
class PathsOfStep:
    """What a step has shown of direct paths, to rank 0.

    Attributes:
        news: What ranks have reported; a failure that was reported before is not among it.
        events: Of failures, and of links that are back on their direct paths.
        samples: What the step's messages took, apart from those that were delegated for want of a
            direct path.
        routes: The routes that messages took by the end of the step.
    """

    news: PathNews
    events: tuple[ControlEvent, ...]
    samples: Sequence[LinkSample]
    routes: dict[Link, Route]


def read_paths(
    paths: FailedPaths,
    news: PathNews,
    samples: Sequence[LinkSample],
    routes: Routes,
) -> tuple[FailedPaths, PathsOfStep]:
    """Take in a step, whether or not the run adapts.

    Args:
        routes: Those of the plan that it ran.
    """
    paths, new = paths.record(news.failures)
    paths, restored = paths.take_restored(routes)
    events = (*map(_of_failure, new), *map(_of_restored, restored))
    news = replace(news, failures=new)
    return paths, PathsOfStep(
        news, events, paths.valid_samples(samples), paths.actual_routes(routes)
    )


def judge_paths(
    paths: FailedPaths, detector: Detector, step: int, news: PathNews, routes: Routes
) -> tuple[FailedPaths, Detector, list[ControlEvent]]:
    """Turn what ranks have reported of direct paths into verdicts on both directions of a link.

    Args:
        news: Its failures are new ones.
        routes: Those of the plan in force.

    Returns:
        And the events that follow; those of the failures themselves are `read_paths`'.
    """
    events: list[ControlEvent] = []
    for failure in news.failures:
        detector = _with_failure(detector, step, failure.link, failure.detail)
    for link, left in sorted(news.restores_left.items()):
        paths, was_last = paths.limit_restores(link, left)
        events += [_of_given_up(link)] if was_last else []
    delegated = {link for link, route in routes.items() if route == "delegated"}
    paths, turns = paths.observe(news.up, delegated)
    for link in turns.lost:
        detector = _with_failure(detector, step, link, "its direct path is down again")
        events.append(_of_path_down(link))
    for link, up_steps in turns.returned.items():
        for source, destination in (link, link[::-1]):
            before = detector.verdicts
            detector, changed = detector.observe_return(step, source, destination, up_steps)
            events += filter(None, (verdict_event(each, before) for each in changed))
    return paths, detector, events


def _with_failure(detector: Detector, step: int, link: Link, detail: str) -> Detector:
    for source, destination in (link, link[::-1]):
        detector, _ = detector.observe_failure(step, source, destination, detail)
    return detector


def _of_failure(failure: PathFailure) -> ControlEvent:
    resent = f"{failure.resent} message{'' if failure.resent == 1 else 's'} sent again"
    detail = f"{failure.detail}; delegated from there on, {resent}"
    return ControlEvent(EventKind.LINK_FAILED, detail, str(failure.link), failure.to_json())


def _of_restored(link: Link) -> ControlEvent:
    return ControlEvent(EventKind.LINK_RESTORED, "on its direct path again", str(link))


def _of_path_down(link: Link) -> ControlEvent:
    detail = "the direct path, which had come back, is down again; the link stays delegated"
    return ControlEvent(EventKind.LINK_PATH_DOWN, detail, str(link))


def _of_given_up(link: Link) -> ControlEvent:
    detail = (
        "the direct path has failed as often as it can begin while these processes live: the link "
        "stays delegated until the run is started again"
    )
    return ControlEvent(EventKind.LINK_GIVEN_UP, detail, str(link))
