"""The state of links: each direction's health, its direct path, and the table of both.

The messages of a direction decide its health; the two ends of a link decide the state of its direct
path. `TRANSITIONS` has all changes of both. A link whose direct path fails in mid-step is delegated
from there on, although programs still have its transfers on the queue. It stays so until its direct
path is restored after a later step (`FailedPaths`).
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jaxmorph.control.measurements import LinkSample
from jaxmorph.plain_json import as_object, written_as
from jaxmorph.records import Link, Route, Routes

Direction = tuple[int, int]
"""A direction of a link: the rank that sends and the rank that receives."""


class LinkHealth(StrEnum):
    """What the messages of a direction show.

    Attributes:
        HEALTHY: They take about as long as when the link was first measured.
        SLOW: They take longer, for more than a message or two.
        RECOVERING: They take no longer than when it was healthy; not for long enough yet.
    """

    HEALTHY = "healthy"
    SLOW = "slow"
    RECOVERING = "recovering"


class PathState(StrEnum):
    """The state of a link's direct path.

    Attributes:
        UP: It is there, as far as is known.
        FAILED: It was given up: what was sent on it did not arrive in time.
        RETURNED: It has failed, and both ends have found it up for long enough.
    """

    UP = "up"
    FAILED = "failed"
    RETURNED = "returned"


class Trigger(StrEnum):
    """What the messages of a direction, or their absence, have shown.

    Attributes:
        ROSE: So many in a row were late that chance doesn't do it.
        MOVED: As many in a row took clearly more, or less, than those before, and were late still.
        FELL: As many in a row were in time.
        LASTED: They have been in time for several steps.
        FAILED: The direct path was given up, or is found down.
        SHIFTED: Delegated messages of a link without a direct path take clearly more, or less.
        RETURNED: Both ends have found the direct path up for many steps in a row.
        KNOWN: It was slow when the run was last at work.
    """

    ROSE = "late messages"
    MOVED = "another delay"
    FELL = "messages in time"
    LASTED = "in time for several steps"
    FAILED = "path failed"
    SHIFTED = "another delegated time"
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
"""What follows from a trigger in a state; a trigger that is not here changes nothing.

No message brings a failed path back, as all of them are delegated: only the path itself does. After
that messages say whether the link has recovered, or, where none of them are watched, the path once
more. A direction is healthy only with its path up.
"""

IMPOSSIBLE: frozenset[State] = frozenset({
    (LinkHealth.HEALTHY, PathState.FAILED),
    (LinkHealth.RECOVERING, PathState.FAILED),
    (LinkHealth.HEALTHY, PathState.RETURNED),
})  # fmt: skip
"""The states that no direction is in: see `Verdict`."""

SENTENCES: Mapping[Trigger, str] = {
    Trigger.ROSE: "is slow: {took} for {count} messages in a row, {threshold:.1f} is late",
    Trigger.MOVED: "is slow by another amount: {took} for {count} messages in a row, "
    "was {before:.1f}",
    Trigger.FELL: "is recovering: {took} for {count} messages in a row, was {before:.1f}",
    Trigger.LASTED: "is healthy again: {took} in the last of {steps} good steps",
    Trigger.FAILED: "is dead: {detail}",
    Trigger.SHIFTED: "is dead, and delegated messages take another time: {took} for {count} in "
    "a row, was {before:.1f}",
    Trigger.RETURNED: "is back: {detail}",
    Trigger.KNOWN: "is taken for slow, as when the run was last at work: {detail}",
}
"""What is said of a direction that a trigger has turned; `took` names the messages' times."""


DEAD = "dead"
"""What people, events and files read of a link whose direct path has failed."""


def word(health: LinkHealth, path: PathState) -> str:
    """What people, events and files read of a state."""
    return DEAD if path is PathState.FAILED else str(health)


def diagram() -> str:
    """`TRANSITIONS` as the text of a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {word(*_HEALTHY)}"]
    for health, path in (_BACK, _SLOW_AGAIN):
        lines.append(f'    state "{health}, path {path}" as {health}_{path}')
    for state, turns in TRANSITIONS.items():
        for trigger, to in turns.items():
            lines.append(f"    {_name(*state)} --> {_name(*to)}: {trigger}")
    return "\n".join(lines)


def _name(health: LinkHealth, path: PathState) -> str:
    return f"{health}_{path}" if path is PathState.RETURNED else word(health, path)


@dataclass(frozen=True)
class PathFailure:
    """That a link left its direct path: as one of its ends saw it, or both together.

    Attributes:
        detail: What failed, in one line.
        held_up_s: How long the transfer that failed held up the queue; of two ends the longer time.
        resent: How many messages were sent again.
        began: Whether the collective of that transfer had begun, and failed.
        restores_left: How often the direct path can begin again while these processes live; None
            where that isn't known.
        reported_by: The ranks that report it: both ends, or one alone.
    """

    link: Link
    detail: str = ""
    held_up_s: float = 0.0
    resent: int = 0
    began: bool = False
    restores_left: int | None = field(default=None, metadata=written_as("lives_left"))
    reported_by: tuple[int, ...] = field(default=(), metadata=written_as("told_by"))

    def to_json(self) -> dict[str, Any]:
        """The failure as a JSON object, with the link as `"2-3"`."""
        return {**as_object(self), "link": str(self.link)}

    def joined(self, other: "PathFailure") -> "PathFailure":
        """This and what the link's other end reports; the first of them says what failed."""
        lives = [each.restores_left for each in (self, other) if each.restores_left is not None]
        return replace(
            self,
            held_up_s=max(self.held_up_s, other.held_up_s),
            resent=self.resent + other.resent,
            began=self.began or other.began,
            restores_left=min(lives, default=None),
            reported_by=self.reported_by + other.reported_by,
        )


@dataclass(frozen=True)
class PathChanges:
    """What a step has shown of failed paths.

    Attributes:
        returned: Those that have now been up for long enough, and in how many steps.
        lost: Those that had, and are down again.
    """

    returned: Mapping[Link, int]
    lost: tuple[Link, ...]


@dataclass(frozen=True)
class LinkPath:
    """The direct path of a link that has failed at least once.

    Attributes:
        epoch: That of the link's route: each failure, and each new beginning of the direct path,
            begins the next one.
        restores_left: How often it can begin again while these processes live; None: not known.
        up_steps: In how many steps in a row both ends have found it up since it failed.
        is_unused: Whether it has begun again, and no step has used it since.
    """

    state: PathState = PathState.UP
    failures: int = 0
    epoch: int = 0
    restores_left: int | None = field(default=None, metadata=written_as("lives_left"))
    up_steps: int = 0
    is_unused: bool = False

    @property
    def can_begin(self) -> bool:
        """Whether it can begin again, as far as is known."""
        return self.restores_left is None or self.restores_left > 0

    def failed(self) -> "LinkPath":
        """The path after one more failure."""
        return LinkPath(PathState.FAILED, self.failures + 1, self.epoch + 1)

    def restored(self) -> "LinkPath":
        """The path in the direct epoch that follows."""
        return replace(self, state=PathState.UP, epoch=self.epoch + 1, is_unused=True)

    def counted(self, *, is_up: bool) -> "LinkPath":
        """The path after a step more, in which both ends have found it up, or not."""
        if is_up:
            return replace(self, up_steps=self.up_steps + 1)
        return replace(self, up_steps=0, state=PathState.FAILED)


@dataclass(frozen=True)
class FailedPaths:
    """The links whose direct paths have failed.

    It counts the steps in which both ends of a failed path find it up. One report to the contrary,
    or a missing one, resets the count. A path that fails again must be up for twice as many steps,
    up to a limit.

    Attributes:
        links: Those of which a failure is known.
        steps: How many steps in a row are enough after the first failure.
        most_steps: How many are after however many failures; `steps` if that is more.
    """

    links: Mapping[Link, LinkPath] = field(default_factory=dict)
    steps: int = 1
    most_steps: int = 1

    @classmethod
    def begin(
        cls, failed: Iterable[Link] = (), steps: int = 1, most_steps: int = 1
    ) -> "FailedPaths":
        """Those of links that did without their paths when the run was last at work, and still do.

        Args:
            failed: The links.
        """
        return cls({link: LinkPath().failed() for link in failed}, steps, most_steps)

    @property
    def failed(self) -> frozenset[Link]:
        """The links that are delegated for want of a direct path, whatever the plan says."""
        return frozenset(link for link, at in self.links.items() if at.state is not PathState.UP)

    def record(
        self, failures: Iterable[PathFailure]
    ) -> tuple["FailedPaths", tuple[PathFailure, ...]]:
        """Take note of what failed in a step.

        Returns:
            And what is new: an end may report a failure one step later than the other.
        """
        failed = self.failed
        new = tuple(each for each in failures if each.link not in failed)
        of_new = {each.link: self.links.get(each.link, LinkPath()).failed() for each in new}
        return self._with(of_new), new

    def restore(self, links: Iterable[Link]) -> "FailedPaths":
        """Take note that direct paths have begun again after a step."""
        back = self.failed.intersection(links)
        return self._with({link: self.links[link].restored() for link in back})

    def take_restored(self, routes: Routes) -> tuple["FailedPaths", tuple[Link, ...]]:
        """The links that were back on their direct paths in a step, each named once.

        Args:
            routes: Those of the plan that the step ran; a link that is not named is direct.
        """
        used = {
            link: replace(at, is_unused=False)
            for link, at in sorted(self.links.items())
            if at.is_unused and routes.get(link, "direct") == "direct"
        }
        return self._with(used), tuple(used)

    def limit_restores(self, link: Link, restores_left: int) -> tuple["FailedPaths", bool]:
        """Take note of how often a failed path can begin again, as one of its ends says.

        The least that any end says counts; of a link that hasn't failed nothing is noted.

        Returns:
            And whether it could, as far as was known, and now can't.
        """
        if link not in self.failed:
            return self, False
        before = self.links[link]
        known = restores_left if before.restores_left is None else before.restores_left
        path = replace(before, restores_left=min(known, restores_left))
        return self._with({link: path}), before.can_begin and not path.can_begin

    def observe(
        self, up: Mapping[Link, bool], delegated: Container[Link]
    ) -> tuple["FailedPaths", PathChanges]:
        """Take in what the ends of failed paths have reported of a step.

        Args:
            up: Whether both ends found a path up; one that is not named was not.
            delegated: The links that the plan in force delegates. Others haven't been taken off
                their direct paths by any plan yet, and don't return before they are.
        """
        counted: dict[Link, LinkPath] = {}
        returned: dict[Link, int] = {}
        lost: list[Link] = []
        for link in sorted(self.failed):
            before = self.links[link]
            path = before.counted(is_up=up.get(link, False))
            if before.state is not path.state:
                lost.append(link)
            elif self._is_enough(path) and link in delegated:
                returned[link] = path.up_steps
                path = replace(path, state=PathState.RETURNED)
            counted[link] = path
        return self._with(counted), PathChanges(returned, tuple(lost))

    def _is_enough(self, path: LinkPath) -> bool:
        if path.state is PathState.RETURNED or not path.can_begin:
            return False
        return path.up_steps >= self.steps_after(path.failures)

    def steps_after(self, failures: int) -> int:
        """How many steps in a row are enough after so many failures."""
        return min(self.steps * 2 ** (failures - 1), max(self.steps, self.most_steps))

    def actual_routes(self, routes: Routes) -> dict[Link, Route]:
        """The routes that messages take under a plan with these."""
        return {**routes, **dict.fromkeys(sorted(self.failed), "delegated")}

    def valid_samples(self, samples: Sequence[LinkSample]) -> Sequence[LinkSample]:
        """The messages that show what their route takes.

        One that held a queue and was delegated nevertheless says nothing of either route: its
        sender didn't wait for it, and its receiver for more than the message.

        Args:
            samples: Of a step, in which all that was sent on a failed link may have been delegated.
        """
        failed = {
            direction for low, high in self.failed for direction in ((low, high), (high, low))
        }
        if not failed:
            return samples
        return tuple(
            each
            for each in samples
            if not (each.is_direct and (each.source, each.destination) in failed)
        )

    def in_words(self) -> dict[str, str]:
        """The links that do without their direct paths, each in a few words."""
        return {str(link): "direct path failed, delegated" for link in sorted(self.failed)}

    def _with(self, changed: Mapping[Link, LinkPath]) -> "FailedPaths":
        return replace(self, links={**self.links, **changed}) if changed else self
