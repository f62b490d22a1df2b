"""Ranks' reports on direct paths that fail and return, and their consequences on rank 0."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, verdict_events
from jaxmorph.control.link_state import FailedPaths, PathFailure, delegated_links, directions_of
from jaxmorph.control.measurements import StepSamples
from jaxmorph.records import EventKind, Link, Route, Routes


@dataclass(frozen=True)
class PathReport:
    """One rank's report on direct paths at the end of a step.

    Attributes:
        failures: The direct paths that this rank left in the step.
        up: Whether this end finds each failed path of its links up.
        restore: From rank 0: the direct paths to restore after the step.
    """

    failures: tuple[PathFailure, ...] = ()
    up: Mapping[Link, bool] = field(default_factory=dict)
    restore: tuple[Link, ...] = ()


@dataclass(frozen=True)
class JoinedPathReport:
    """All ranks' reports on direct paths in a step, joined.

    Attributes:
        failures: One for each link whose path was left.
        up: Whether both ends find each failed path up.
        restored: The links whose direct paths are restored after the step.
    """

    failures: tuple[PathFailure, ...] = ()
    up: Mapping[Link, bool] = field(default_factory=dict)
    restored: tuple[Link, ...] = ()

    @property
    def is_disturbed(self) -> bool:
        """Whether any end left a path. The step's timings may include the stall."""
        return bool(self.failures)


def join_reports(reports: Sequence[PathReport]) -> JoinedPathReport:
    """Join all ranks' reports, in rank order; every rank gets the same result."""
    failures: dict[Link, PathFailure] = {}
    for rank, report in enumerate(reports):
        for end in report.failures:
            failure = replace(end, reported_by=(rank,))
            before = failures.get(failure.link)
            failures[failure.link] = failure if before is None else before.joined(failure)
    named = {link for report in reports for link in report.up}
    up = {link: _is_up_at_both_ends(link, reports) for link in sorted(named)}
    # An end may have found a path down since rank 0 decided to restore it.
    restored = tuple(link for link in reports[0].restore if up.get(link, False))
    return JoinedPathReport(tuple(failures[link] for link in sorted(failures)), up, restored)


def _is_up_at_both_ends(link: Link, reports: Sequence[PathReport]) -> bool:
    return all(reports[rank].up.get(link, False) for rank in link)


@dataclass(frozen=True)
class StepPaths:
    """The direct paths of a step, as rank 0 sees them.

    Attributes:
        new: The failures that no earlier step had.
        events: Of new failures, and of links that are back on their direct paths.
        samples: The step's valid samples (`FailedPaths.valid_samples`).
        routes: The routes that messages took at the end of the step.
    """

    new: tuple[PathFailure, ...]
    events: tuple[ControlEvent, ...]
    samples: StepSamples
    routes: dict[Link, Route]


def read_paths(
    paths: FailedPaths,
    report: JoinedPathReport,
    samples: StepSamples,
    routes: Routes,
) -> tuple[FailedPaths, StepPaths]:
    """Record the direct paths of a step that ran a plan with some routes.

    A run that doesn't adapt does only this.
    """
    paths, new = paths.record(report.failures)
    paths, restored = paths.take_restored(routes)
    events = (*map(failure_event, new), *map(_restored_event, restored))
    return paths, StepPaths(new, events, paths.valid_samples(samples), paths.actual_routes(routes))


def judge_paths(
    paths: FailedPaths,
    detector: Detector,
    step: int,
    report: JoinedPathReport,
    new: Iterable[PathFailure],
    routes: Routes,
) -> tuple[FailedPaths, Detector, list[ControlEvent]]:
    """Turn reports on direct paths into verdicts on both directions of their links.

    Args:
        new: See `StepPaths`.
        routes: Of the plan in force.

    Returns:
        The next paths and detector, and events other than those of `read_paths`.
    """
    events: list[ControlEvent] = []
    for failure in new:
        if failure.is_handover:
            detector, found = judge_late_messages(
                detector, step, failure.link, failure.late_ms, is_direct=True
            )
            events += found
        else:
            detector = _with_failure(detector, step, failure.link, failure.detail)
    for failure in report.failures:  # also from an end that reported it late
        if failure.restores_left is not None:
            paths, was_last = paths.limit_restores(failure.link, failure.restores_left)
            events += [_given_up_event(failure.link)] if was_last else []
    paths, returned, lost = paths.observe(report.up, delegated_links(routes))
    for link in lost:
        detector = _with_failure(detector, step, link, "its direct path is down again")
        events.append(_path_down_event(link))
    for link, up_steps in returned.items():
        for direction in directions_of(link):
            before = detector.verdicts
            detector, changed = detector.observe_return(step, direction, up_steps)
            events += verdict_events(changed, before)
    return paths, detector, events


def judge_late_messages(
    detector: Detector,
    step: int,
    link: Link,
    late_ms: Mapping[str, Sequence[float]],
    *,
    is_direct: bool,
) -> tuple[Detector, list[ControlEvent]]:
    """Mark directions of a link slow, where an end has found this in mid-step (`EndWatch`)."""
    events: list[ControlEvent] = []
    for direction in directions_of(link):
        if run_ms := late_ms.get("{}>{}".format(*direction)):
            before = detector.verdicts
            detector, changed = detector.observe_late(step, direction, run_ms, is_direct=is_direct)
            events += verdict_events(changed, before)
    return detector, events


def _with_failure(detector: Detector, step: int, link: Link, detail: str) -> Detector:
    for direction in directions_of(link):
        detector = detector.observe_failure(step, direction, detail)
    return detector


def failure_event(failure: PathFailure) -> ControlEvent:
    """The event of a path that was left."""
    resent = f"{failure.resent} message{'' if failure.resent == 1 else 's'} sent again"
    detail = f"{failure.detail}; delegated from there on, {resent}"
    kind = EventKind.LINK_HANDED_OVER if failure.is_handover else EventKind.LINK_FAILED
    return ControlEvent(kind, detail, str(failure.link), failure.to_json())


def _restored_event(link: Link) -> ControlEvent:
    return ControlEvent(EventKind.LINK_RESTORED, "on its direct path again", str(link))


def _path_down_event(link: Link) -> ControlEvent:
    detail = "the direct path had returned and is down again; the link stays delegated"
    return ControlEvent(EventKind.LINK_PATH_DOWN, detail, str(link))


def _given_up_event(link: Link) -> ControlEvent:
    detail = (
        "the direct path can't be restored any more in these processes: the link stays delegated "
        "until the run restarts"
    )
    return ControlEvent(EventKind.LINK_GIVEN_UP, detail, str(link))
