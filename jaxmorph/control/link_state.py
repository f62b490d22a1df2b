"""The state of links: each direction's health, its direct path, and the table of both.

The messages of a direction decide its health; the two ends of a link decide the state of its direct
path. `TRANSITIONS` has all changes of both. A link whose direct path fails in mid-step fails over:
the host data plane carries its messages, although instructions still have its transfers on the
queue. The link stays delegated until its direct path is restored after a later step
(`FailedPaths`).
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jaxmorph.control.measurements import StepSamples
from jaxmorph.plain_json import as_object
from jaxmorph.records import Link, Route, Routes

Direction = tuple[int, int]
"""A direction of a link: the rank that sends and the rank that receives."""


def link_of(direction: Direction) -> Link:
    """The link of a direction."""
    return Link.of(*direction)


def directions_of(link: Link) -> tuple[Direction, Direction]:
    """Both directions of a link."""
    return (link.lower, link.upper), (link.upper, link.lower)


def delegated_links(routes: Routes) -> frozenset[Link]:
    """The links that routes delegate."""
    return frozenset(link for link, route in routes.items() if route == "delegated")


class LinkHealth(StrEnum):
    """The health of a direction, by its messages."""

    HEALTHY = "healthy"
    SLOW = "slow"
    RECOVERING = "recovering"  # in time again, but not yet for long enough


class PathState(StrEnum):
    """The state of a link's direct path."""

    UP = "up"
    FAILED = "failed"
    RETURNED = "returned"  # after a failure both ends have found it up for long enough


class Trigger(StrEnum):
    """A finding that can change a direction's state."""

    ROSE = "late messages"  # more in a row than chance explains
    MOVED = "another delay"  # late as before, but by clearly more or less
    FELL = "messages in time"
    LASTED = "in time for several steps"
    FAILED = "path failed"  # given up, or found down
    SHIFTED = "another delegated time"  # of a dead link
    RETURNED = "path up again"
    KNOWN = "slow before a restart"


State = tuple[LinkHealth, PathState]

_HEALTHY = LinkHealth.HEALTHY, PathState.UP
_SLOW = LinkHealth.SLOW, PathState.UP
_RECOVERING = LinkHealth.RECOVERING, PathState.UP
_DEAD = LinkHealth.SLOW, PathState.FAILED
_SLOW_AGAIN = LinkHealth.SLOW, PathState.RETURNED
_BACK = LinkHealth.RECOVERING, PathState.RETURNED

TRANSITIONS: Mapping[State, Mapping[Trigger, State]] = {
    _HEALTHY: {Trigger.ROSE: _SLOW, Trigger.KNOWN: _SLOW, Trigger.FAILED: _DEAD},
    _SLOW: {Trigger.MOVED: _SLOW, Trigger.FELL: _RECOVERING, Trigger.FAILED: _DEAD},
    _RECOVERING: {Trigger.ROSE: _SLOW, Trigger.LASTED: _HEALTHY, Trigger.FAILED: _DEAD},
    _DEAD: {Trigger.SHIFTED: _DEAD, Trigger.RETURNED: _BACK},
    _BACK: {
        Trigger.ROSE: _SLOW_AGAIN,
        Trigger.LASTED: _HEALTHY,
        Trigger.RETURNED: _HEALTHY,
        Trigger.FAILED: _DEAD,
    },
    _SLOW_AGAIN: {Trigger.MOVED: _SLOW_AGAIN, Trigger.FELL: _BACK, Trigger.FAILED: _DEAD},
}
"""The next state by state and trigger; a trigger that is not listed changes nothing.

`Verdict` refuses the other pairs: a direction is healthy only with its path up.

All messages of a link with a failed path are delegated, so none of them can show that the path
works: only its two ends can. After that, messages decide whether the link has recovered. A link
without watched messages becomes healthy by a second `RETURNED`.
"""

SENTENCES: Mapping[Trigger, str] = {
    Trigger.ROSE: "is slow: {took} for {count} messages in a row, above {threshold:.1f} ms is late",
    Trigger.MOVED: "has another delay: {took} for {count} messages in a row, was {before:.1f}",
    Trigger.FELL: "is recovering: {took} for {count} messages in a row, was {before:.1f}",
    Trigger.LASTED: "is healthy again: {took} in the last of {steps} good steps",
    Trigger.FAILED: "is dead: {detail}",
    Trigger.SHIFTED: "is dead, and delegated messages have another delay: {took} for {count} in a "
    "row, was {before:.1f}",
    Trigger.RETURNED: "is back: {detail}",
    Trigger.KNOWN: "was slow before the restart: {detail}",
}
"""The reason of a verdict by its trigger; `took` describes the messages' times."""


DEAD = "dead"
"""The name of a failed path in events, files and tables."""


def word(health: LinkHealth, path: PathState) -> str:
    """The name of a state in events, files and tables."""
    return DEAD if path is PathState.FAILED else str(health)


@dataclass(frozen=True)
class PathFailure:
    """A link's direct path that was left in mid-step, as one end or both ends saw it.

    The path has failed, or it works but is slow. A slow link is handed over (`handover`).

    Attributes:
        detail: The cause, in one line.
        held_up_s: How long the failed transfer held the queue; of two ends the longer time.
        resent: The number of messages that were sent again.
        began: Whether that transfer's collective had begun.
        restores_left: How often these processes can still restore the direct path: each restore
            needs a new communicator. None: unknown.
        reported_by: The ranks of the ends that reported it.
        late_ms: The messages that were late where the link was handed over: see `EndWatch`.
    """

    link: Link
    detail: str = ""
    held_up_s: float = 0.0
    resent: int = 0
    began: bool = False
    restores_left: int | None = None
    reported_by: tuple[int, ...] = ()
    late_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_handover(self) -> bool:
        """Whether the path works, but is slow."""
        return bool(self.late_ms)

    def to_json(self) -> dict[str, Any]:
        """The failure as a JSON object, with the link as `"2-3"`."""
        return {**as_object(self), "link": str(self.link)}

    def joined(self, other: "PathFailure") -> "PathFailure":
        """Both ends' reports as one; the detail is this one's."""
        left = [each.restores_left for each in (self, other) if each.restores_left is not None]
        return replace(
            self,
            held_up_s=max(self.held_up_s, other.held_up_s),
            resent=self.resent + other.resent,
            began=self.began or other.began,
            restores_left=min(left, default=None),
            reported_by=self.reported_by + other.reported_by,
            late_ms=self.late_ms if other.is_handover else {},
        )


@dataclass(frozen=True)
class LinkPath:
    """The direct path of a link that has failed at least once.

    Attributes:
        restores_left: See `PathFailure`.
        up_steps: The steps in a row in which both ends found it up since it failed.
        is_unused: Whether no step has used it since it was restored.
        is_handed_over: Whether it works, and was left because it is slow.
    """

    state: PathState = PathState.UP
    failures: int = 0
    restores_left: int | None = None
    up_steps: int = 0
    is_unused: bool = False
    is_handed_over: bool = False

    @property
    def can_restore(self) -> bool:
        """Whether it can be restored, as far as is known."""
        return self.restores_left is None or self.restores_left > 0

    def failed(self) -> "LinkPath":
        """The path after one more failure."""
        return LinkPath(PathState.FAILED, self.failures + 1)

    def handed_over(self) -> "LinkPath":
        """The path after its link was handed over."""
        return replace(self, state=PathState.FAILED, is_handed_over=True, is_unused=False)

    def restored(self) -> "LinkPath":
        """The path when its link is direct again."""
        return replace(self, state=PathState.UP, is_handed_over=False, is_unused=True)

    def counted(self, *, is_up: bool) -> "LinkPath":
        """The path after another step, in which both ends found it up or not."""
        if is_up:
            return replace(self, up_steps=self.up_steps + 1)
        return replace(self, up_steps=0, state=PathState.FAILED)


@dataclass(frozen=True)
class FailedPaths:
    """The links whose direct paths have failed, and for how many steps both ends found them up.

    A report that a path is down, or a missing report, resets its count. A path that fails again
    must be up for twice as many steps, up to a limit.

    Attributes:
        links: Every link that has failed, restored ones too.
        steps: The steps in a row that are enough after the first failure.
        most_steps: The limit of that after further failures; at least `steps`.
    """

    links: Mapping[Link, LinkPath] = field(default_factory=dict)
    steps: int = 1
    most_steps: int = 1

    @classmethod
    def begin(cls, failed: Iterable[Link], steps: int, most_steps: int) -> "FailedPaths":
        """The state of a run that starts with some paths failed."""
        return cls({link: LinkPath().failed() for link in failed}, steps, most_steps)

    @property
    def unrestored(self) -> frozenset[Link]:
        """The links whose path has failed and has not been restored; all messages are delegated."""
        return frozenset(link for link, at in self.links.items() if at.state is not PathState.UP)

    @property
    def handed_over(self) -> frozenset[Link]:
        """The `unrestored` links whose path works, but is slow."""
        return frozenset(link for link, at in self.links.items() if at.is_handed_over)

    def record(
        self, failures: Iterable[PathFailure]
    ) -> tuple["FailedPaths", tuple[PathFailure, ...]]:
        """Record the failures of a step; return the new ones too.

        One end may report a failure a step later than the other.
        """
        failed = self.unrestored
        new = tuple(each for each in failures if each.link not in failed)
        return self._with({each.link: self._after(each) for each in new}), new

    def _after(self, failure: PathFailure) -> LinkPath:
        path = self.links.get(failure.link, LinkPath())
        return path.handed_over() if failure.is_handover else path.failed()

    def restore(self, links: Iterable[Link]) -> "FailedPaths":
        """Record that direct paths were restored after a step."""
        back = self.unrestored.intersection(links)
        return self._with({link: self.links[link].restored() for link in back})

    def take_restored(self, routes: Routes) -> tuple["FailedPaths", tuple[Link, ...]]:
        """Return the restored links that a step has used for the first time.

        Args:
            routes: Of the plan that the step ran.
        """
        used = {
            link: replace(at, is_unused=False)
            for link, at in sorted(self.links.items())
            if at.is_unused and routes.get(link, "direct") == "direct"
        }
        return self._with(used), tuple(used)

    def limit_restores(self, link: Link, restores_left: int) -> tuple["FailedPaths", bool]:
        """Record one end's count of restores left; the lowest count holds.

        Returns:
            The state, and whether this count is the first that rules a restore out. A link that has
            not failed is ignored.
        """
        if link not in self.unrestored:
            return self, False
        before = self.links[link]
        known = restores_left if before.restores_left is None else before.restores_left
        path = replace(before, restores_left=min(known, restores_left))
        return self._with({link: path}), before.can_restore and not path.can_restore

    def observe(
        self, up: Mapping[Link, bool], delegated: Container[Link]
    ) -> tuple["FailedPaths", dict[Link, int], list[Link]]:
        """Count a step by whether both ends found each path up.

        Args:
            up: Whether both ends found a path up. A missing path counts as down.
            delegated: The links that the plan in force delegates. A failed path doesn't return
                before a plan has delegated its link.

        Returns:
            The state, the paths that have now been up for long enough, with their steps in a row,
            and those that had returned and are lost again.
        """
        counted: dict[Link, LinkPath] = {}
        returned: dict[Link, int] = {}
        lost: list[Link] = []
        for link in sorted(self.unrestored - self.handed_over):
            before = self.links[link]
            path = before.counted(is_up=up.get(link, False))
            if before.state is not path.state:
                lost.append(link)
            elif self._is_enough(path) and link in delegated:
                returned[link] = path.up_steps
                path = replace(path, state=PathState.RETURNED)
            counted[link] = path
        return self._with(counted), returned, lost

    def _is_enough(self, path: LinkPath) -> bool:
        if path.state is PathState.RETURNED or not path.can_restore:
            return False
        return path.up_steps >= self.steps_after(path.failures)

    def steps_after(self, failures: int) -> int:
        """The steps in a row that are enough after some failures."""
        return min(self.steps * 2 ** (failures - 1), max(self.steps, self.most_steps))

    def actual_routes(self, routes: Routes) -> dict[Link, Route]:
        """The routes that messages take under a plan's routes."""
        return {**routes, **dict.fromkeys(sorted(self.unrestored), "delegated")}

    def valid_samples(self, samples: StepSamples) -> StepSamples:
        """The samples that are valid timings of their routes.

        A message that instructions send as a direct one on a failed link is delegated instead. Its
        sender doesn't wait, and its receiver waits for more than the message.
        """
        failed = self.unrestored
        return {
            direction: each
            for direction, each in samples.items()
            if not (each.is_direct and link_of(direction) in failed)
        }

    def in_words(self) -> dict[str, str]:
        """The links with failed paths, for the terminal."""
        of_failed, of_slow = "direct path failed, delegated", "direct path left as slow, delegated"
        return {
            str(link): of_slow if self.links[link].is_handed_over else of_failed
            for link in sorted(self.unrestored)
        }

    def _with(self, changed: Mapping[Link, LinkPath]) -> "FailedPaths":
        return replace(self, links={**self.links, **changed}) if changed else self
