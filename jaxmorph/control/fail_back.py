"""When a link whose direct path has failed may be tried on it again: it counts steps."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from jaxmorph.schedule.costs import Link


@dataclass(frozen=True)
class FailedPath:
    """What is known of one.

    Attributes:
        failures: How often it has failed.
        lives_left: How often it can begin again; None where that isn't known.
        up_steps: In how many steps in a row both of its ends have found it up.
        has_returned: Whether that were enough, and it has been up ever since.
    """

    failures: int = 0
    lives_left: int | None = None
    up_steps: int = 0
    has_returned: bool = False

    @property
    def can_begin(self) -> bool:
        """Whether it can begin again at all."""
        return self.lives_left is None or self.lives_left > 0


@dataclass(frozen=True)
class PathTurns:
    """What a step has shown of failed paths.

    Attributes:
        returned: Those that have now been up for long enough, and in how many steps.
        lost: Those that had, and are down again.
    """

    returned: Mapping[Link, int]
    lost: tuple[Link, ...]


class FailBack:
    """Counts the steps in which both ends of a failed path find it up.

    One report to the contrary, or one that is missing, begins the count anew. A path that fails
    again after it had returned must be up for twice as many steps, up to a limit.

    Args:
        steps: How many steps in a row are enough after the first failure.
        most_steps: How many are after however many failures; `steps` if that is more.
    """

    def __init__(self, steps: int, most_steps: int) -> None:
        self._steps, self._most_steps = steps, max(steps, most_steps)
        self._paths: dict[Link, FailedPath] = {}
        self._failed: set[Link] = set()

    @property
    def failed(self) -> frozenset[Link]:
        """The links that do without their direct paths now."""
        return frozenset(self._failed)

    def fail(self, link: Link) -> None:
        """Take note of a failure.

        Args:
            link: One that was on its direct path.
        """
        before = self._paths.get(link, FailedPath())
        self._paths[link] = FailedPath(before.failures + 1)
        self._failed.add(link)

    def limit(self, link: Link, lives_left: int) -> bool:
        """Take note of how often a failed path can begin again, as one of its ends says.

        Args:
            link: Whose; of one that hasn't failed nothing is noted.
            lives_left: By that end; the least that any end says counts.

        Returns:
            Whether it could, as far as was known, and now can't.
        """
        if link not in self._failed:
            return False
        before = self._paths[link]
        known = lives_left if before.lives_left is None else before.lives_left
        self._paths[link] = replace(before, lives_left=min(known, lives_left))
        return before.can_begin and not self._paths[link].can_begin

    def begin_again(self, link: Link) -> None:
        """Take note that a path has begun again; one that never failed has not."""
        self._failed.discard(link)

    def observe(self, up: Mapping[Link, bool], delegated: Container[Link]) -> PathTurns:
        """Take in what the ends of failed paths have told of a step.

        Args:
            up: Whether both ends found a path up; one that is not named was not.
            delegated: The links that the plan in force delegates. Others haven't been taken off
                their direct paths by any plan yet, and don't return before they are.

        Returns:
            The paths that have returned with this step, and those that are lost again.
        """
        returned: dict[Link, int] = {}
        lost: list[Link] = []
        for link in sorted(self._failed):
            path = self._counted(self._paths[link], up.get(link, False))
            if self._paths[link].has_returned and not path.has_returned:
                lost.append(link)
            elif self._is_enough(path) and link in delegated:
                returned[link] = path.up_steps
                path = replace(path, has_returned=True)
            self._paths[link] = path
        return PathTurns(returned, tuple(lost))

    def _counted(self, path: FailedPath, is_up: bool) -> FailedPath:
        if is_up:
            return replace(path, up_steps=path.up_steps + 1)
        return replace(path, up_steps=0, has_returned=False)

    def _is_enough(self, path: FailedPath) -> bool:
        if path.has_returned or not path.can_begin:
            return False
        return path.up_steps >= self.steps_after(path.failures)

    def steps_after(self, failures: int) -> int:
        """How many steps in a row are enough after so many failures."""
        return min(self._steps * 2 ** (failures - 1), self._most_steps)
