"""What ranks tell one another of direct paths that have failed, in the meetings that end steps.

- `link_failures`: of each link whose direct path this rank gave up in the step, what happened.
- `paths_up`: of each link whose direct path has failed, whether this end finds it up.
- `restore`: from rank 0, the links whose direct paths are to begin again after the step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxmorph.control.path_failure import PathFailure
from jaxmorph.records import Message
from jaxmorph.schedule.costs import Link

FAILURES, UP, RESTORE = "link_failures", "paths_up", "restore"


@dataclass(frozen=True)
class PathNews:
    """What all ranks have told of direct paths in a step.

    Attributes:
        failures: One for each link that failed.
        up: Of links that failed before, whether both ends find their direct paths up.
        lives_left: Of links of which that was told, how often their direct paths can begin again;
            by an end that told of a failure later than the other, too.
        is_disturbed: Whether any end told of a failure: what waited for its link may have waited in
            the step's times.
    """

    failures: tuple[PathFailure, ...] = ()
    up: Mapping[Link, bool] = field(default_factory=dict)
    lives_left: Mapping[Link, int] = field(default_factory=dict)
    is_disturbed: bool = False


NO_NEWS = PathNews()


def path_news(reports: Sequence[Message]) -> PathNews:
    """What all ranks have told.

    Args:
        reports: All ranks' messages of the meeting that ended the step, in rank order.
    """
    told: dict[Link, list[tuple[int, Message]]] = {}
    for rank, report in enumerate(reports):
        for each in report.get(FAILURES, ()):
            told.setdefault(Link.parse(each["link"]), []).append((rank, each))
    named = {Link.parse(name) for report in reports for name in report.get(UP, ())}
    failures = tuple(_failure(link, ends) for link, ends in sorted(told.items()))
    return PathNews(
        failures,
        {link: _is_up_at_both_ends(link, reports) for link in sorted(named)},
        {each.link: each.lives_left for each in failures if each.lives_left is not None},
        is_disturbed=bool(failures),
    )


def _failure(link: Link, ends: Sequence[tuple[int, Message]]) -> PathFailure:
    """One failure of what its ends tell; the first of them says what it was."""
    told = [each for _, each in ends]
    lives = [each["lives_left"] for each in told if each.get("lives_left") is not None]
    return PathFailure(
        link,
        detail=told[0].get("detail", ""),
        held_up_s=max(each.get("held_up_s", 0.0) for each in told),
        resent=sum(each.get("resent", 0) for each in told),
        began=any(each.get("began", False) for each in told),
        lives_left=min(lives) if lives else None,
        told_by=tuple(rank for rank, _ in ends),
    )


def _is_up_at_both_ends(link: Link, reports: Sequence[Message]) -> bool:
    return all(reports[rank].get(UP, {}).get(str(link)) is True for rank in link)


class DirectPaths(Protocol):
    """A rank's ends of links, as what runs its transfers knows them."""

    def link_failures(self) -> list[Message]:
        """The links whose direct paths were given up here since the last call."""
        ...

    def path_is_up(self, link: Link) -> bool | None:
        """Whether a link's direct path would work again, at once; None: this rank is no end."""
        ...

    def take_for_failed(self, link: Link) -> None:
        """Has a link's direct path watched that has failed, though not in this process."""
        ...

    def restore_direct(self, link: Link) -> None:
        """Has a link's direct path begin again; both ends do so between the same two steps."""
        ...


class OwnEnds:
    """What one rank tells of its own ends, and does with them.

    Args:
        is_watched: Whether somebody wants to know when failed paths are up again.
        failed: All links that do without their direct paths from the start.
    """

    def __init__(
        self, rank: int, paths: DirectPaths, *, is_watched: bool, failed: Iterable[Link] = ()
    ) -> None:
        self._rank = rank
        self._paths = paths
        self._is_watched = is_watched
        self._failed = set(failed)  # of all ranks' links
        for link in sorted(self._failed):
            if rank in link:
                paths.take_for_failed(link)

    @property
    def failed(self) -> frozenset[Link]:
        """All links that do without their direct paths now, wherever their ends are."""
        return frozenset(self._failed)

    def told(self) -> Message:
        """What this rank adds to its message of the meeting that ends a step."""
        failures = self._paths.link_failures()
        self._note(failures)
        up = self._up() if self._is_watched else {}
        return {name: said for name, said in ((FAILURES, failures), (UP, up)) if said}

    def heed(self, reports: Sequence[Message]) -> tuple[Link, ...]:
        """Have those direct paths begin again that rank 0 says, if both ends still find them up.

        All ranks hear the same and come to the same; those that have no end of a link take note.

        Args:
            reports: All ranks' messages of the meeting that ended the step.

        Returns:
            All links whose direct paths begin again, wherever their ends are.
        """
        for report in reports:
            self._note(report.get(FAILURES, ()))
        due = map(Link.parse, reports[0].get(RESTORE, ()))
        links = tuple(link for link in due if _is_up_at_both_ends(link, reports))
        for link in links:
            self._failed.discard(link)
            if self._rank in link:
                self._paths.restore_direct(link)
        return links

    def _note(self, failures: Iterable[Message]) -> None:
        self._failed.update(Link.parse(each["link"]) for each in failures)

    def _up(self) -> dict[str, bool]:
        own = (link for link in sorted(self._failed) if self._rank in link)
        found = {str(link): self._paths.path_is_up(link) for link in own}
        return {name: is_up for name, is_up in found.items() if is_up is not None}
