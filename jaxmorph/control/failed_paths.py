"""Direct paths that have failed: what rank 0 knows of them, and when one may be tried again.

A link whose direct path fails in the middle of a step is delegated from there on, though programs
still have its transfers on the queue, until its direct path begins again after a later step.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxmorph.control.measurements import LinkSample
from jaxmorph.records import Link, Route, Routes


@dataclass(frozen=True)
class PathFailure:
    """That a link left its direct path: as one of its ends saw it, or both together.

    Attributes:
        detail: What failed, in one line.
        held_up_s: How long the transfer that failed held up the queue; of two ends the longer time.
        resent: How many messages were sent again.
        began: Whether the collective of that transfer had begun, and failed.
        lives_left: How often the direct path can begin again while these processes live; None
            where that isn't known.
        told_by: The ranks that report it: both ends, or one alone.
    """

    link: Link
    detail: str = ""
    held_up_s: float = 0.0
    resent: int = 0
    began: bool = False
    lives_left: int | None = None
    told_by: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The failure as a JSON object, with the link as `"2-3"`."""
        return {**asdict(self), "link": str(self.link)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any], rank: int) -> "PathFailure":
        """What one rank reports; it need not say more than the link."""
        return cls(**{**message, "link": Link.parse(message["link"]), "told_by": (rank,)})

    def joined(self, other: "PathFailure") -> "PathFailure":
        """This and what the link's other end reports; the first of them says what failed."""
        lives = [each.lives_left for each in (self, other) if each.lives_left is not None]
        return replace(
            self,
            held_up_s=max(self.held_up_s, other.held_up_s),
            resent=self.resent + other.resent,
            began=self.began or other.began,
            lives_left=min(lives, default=None),
            told_by=self.told_by + other.told_by,
        )


@dataclass(frozen=True)
class PathTurns:
    """What a step has shown of failed paths.

    Attributes:
        returned: Those that have now been up for long enough, and in how many steps.
        lost: Those that had, and are down again.
    """

    returned: Mapping[Link, int]
    lost: tuple[Link, ...]


@dataclass(frozen=True)
class _Path:
    """A path that has failed at least once."""

    failures: int = 0
    lives_left: int | None = None
    up_steps: int = 0  # in a row, in which both ends found it up
    has_returned: bool = False  # those were enough, and it has been up ever since

    @property
    def can_begin(self) -> bool:
        return self.lives_left is None or self.lives_left > 0

    def counted(self, *, is_up: bool) -> "_Path":
        if is_up:
            return replace(self, up_steps=self.up_steps + 1)
        return replace(self, up_steps=0, has_returned=False)


class FailedPaths:
    """The links that do without their direct paths, step by step; one thread changes it.

    It counts the steps in which both ends of a failed path find it up. One report to the contrary,
    or a missing one, resets the count. A path that fails again must be up for twice as many steps,
    up to a limit.

    Args:
        failed: Those that did without when the run was last at work, and do so from the start.
        steps: How many steps in a row are enough after the first failure.
        most_steps: How many are after however many failures; `steps` if that is more.

    Attributes:
        failed: The links that are delegated because their direct paths failed, whatever the plan
            says. It is replaced as a whole: other threads read it.
    """

    def __init__(self, failed: Iterable[Link] = (), steps: int = 1, most_steps: int = 1) -> None:
        self.failed: frozenset[Link] = frozenset()
        self._steps, self._most_steps = steps, max(steps, most_steps)
        self._paths: dict[Link, _Path] = {}
        self._begun_again: set[Link] = set()  # and not used since
        self.note(map(PathFailure, failed))

    def note(self, failures: Iterable[PathFailure]) -> tuple[PathFailure, ...]:
        """Take note of what failed in a step.

        Returns:
            What is new: an end may report a failure one step later than the other.
        """
        new = tuple(each for each in failures if each.link not in self.failed)
        for link in (each.link for each in new):
            self._paths[link] = _Path(self._paths.get(link, _Path()).failures + 1)
            self._begun_again.discard(link)
        self.failed |= {each.link for each in new}
        return new

    def begin_again(self, links: Iterable[Link]) -> None:
        """Take note that direct paths have begun again after a step."""
        back = self.failed.intersection(links)
        self.failed -= back
        self._begun_again |= back

    def restored(self, routes: Routes) -> tuple[Link, ...]:
        """The links that were back on their direct paths in a step, each named once.

        Args:
            routes: Those of the plan that the step ran; a link that is not named is direct.
        """
        used = {link for link in self._begun_again if routes.get(link, "direct") == "direct"}
        self._begun_again -= used
        return tuple(sorted(used))

    def limit(self, link: Link, lives_left: int) -> bool:
        """Take note of how often a failed path can begin again, as one of its ends says.

        The least that any end says counts; of a link that hasn't failed nothing is noted.

        Returns:
            Whether it could, as far as was known, and now can't.
        """
        if link not in self.failed:
            return False
        before = self._paths[link]
        known = lives_left if before.lives_left is None else before.lives_left
        self._paths[link] = replace(before, lives_left=min(known, lives_left))
        return before.can_begin and not self._paths[link].can_begin

    def observe(self, up: Mapping[Link, bool], delegated: Container[Link]) -> PathTurns:
        """Take in what the ends of failed paths have reported of a step.

        Args:
            up: Whether both ends found a path up; one that is not named was not.
            delegated: The links that the plan in force delegates. Others haven't been taken off
                their direct paths by any plan yet, and don't return before they are.
        """
        returned: dict[Link, int] = {}
        lost: list[Link] = []
        for link in sorted(self.failed):
            before = self._paths[link]
            path = before.counted(is_up=up.get(link, False))
            if before.has_returned and not path.has_returned:
                lost.append(link)
            elif self._is_enough(path) and link in delegated:
                returned[link] = path.up_steps
                path = replace(path, has_returned=True)
            self._paths[link] = path
        return PathTurns(returned, tuple(lost))

    def _is_enough(self, path: _Path) -> bool:
        if path.has_returned or not path.can_begin:
            return False
        return path.up_steps >= self.steps_after(path.failures)

    def steps_after(self, failures: int) -> int:
        """How many steps in a row are enough after so many failures."""
        return min(self._steps * 2 ** (failures - 1), self._most_steps)

    def as_run(self, routes: Routes) -> dict[Link, Route]:
        """The routes that messages take under a plan with these."""
        return {**routes, **dict.fromkeys(sorted(self.failed), "delegated")}

    def of_paths(self, samples: Sequence[LinkSample]) -> Sequence[LinkSample]:
        """The messages that tell what their route takes.

        One that held a queue and was delegated nevertheless says nothing of either route: its
        sender didn't wait for it, and its receiver for more than the message.

        Args:
            samples: Of a step, in which all that was sent on a failed link may have been delegated.
        """
        if not self.failed:
            return samples
        return tuple(each for each in samples if not self._was_delegated(each))

    def _was_delegated(self, sample: LinkSample) -> bool:
        ends = sorted((sample.source, sample.destination))
        return sample.is_held and Link(*ends) in self.failed

    def in_words(self) -> dict[str, str]:
        """The links that do without their direct paths, each in a few words."""
        return {str(link): "direct path failed, delegated" for link in sorted(self.failed)}
