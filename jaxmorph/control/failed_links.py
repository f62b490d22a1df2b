"""Which links do without their direct paths now, whatever the plan in force says of them."""

from collections.abc import Collection, Iterable, Sequence

from jaxmorph.control.measurements import LinkSample
from jaxmorph.control.path_failure import PathFailure
from jaxmorph.schedule.costs import Link, Route, Routes


class FailedLinks:
    """Keeps account of them, step by step.

    A link whose direct path fails in mid-step is delegated from there on, though programs still
    have its transfers on the queue; until its direct path is made to begin again.

    Args:
        failed: Those that did without when the run was last at work, and do so from the start.
    """

    def __init__(self, failed: Iterable[Link] = ()) -> None:
        self._failed: set[Link] = set(failed)
        self._begun_again: set[Link] = set()  # and not used since

    @property
    def now(self) -> frozenset[Link]:
        """The links that are delegated because their direct paths have failed."""
        return frozenset(self._failed)

    def note(self, failures: Iterable[PathFailure]) -> tuple[PathFailure, ...]:
        """Take note of what failed in a step.

        Args:
            failures: As links' ends told them.

        Returns:
            Those that are new: an end that tells of one later than the other tells nothing new.
        """
        new = tuple(each for each in failures if each.link not in self._failed)
        links = {each.link for each in new}
        self._failed |= links
        self._begun_again -= links
        return new

    def begin_again(self, links: Iterable[Link]) -> None:
        """Take note that direct paths have begun again after a step."""
        back = self._failed.intersection(links)
        self._failed -= back
        self._begun_again |= back

    def restored(self, routes: Routes) -> tuple[Link, ...]:
        """The links that were back on their direct paths in a step, each told once.

        Args:
            routes: Those of the plan that the step ran; a link that is not named is direct.
        """
        used = {link for link in self._begun_again if routes.get(link, "direct") == "direct"}
        self._begun_again -= used
        return tuple(sorted(used))

    def as_run(self, routes: Routes) -> dict[Link, Route]:
        """The routes that messages take.

        Args:
            routes: Those of the plan in force.
        """
        return {**routes, **dict.fromkeys(sorted(self._failed), "delegated")}

    def of_paths(self, samples: Sequence[LinkSample]) -> Sequence[LinkSample]:
        """The messages that tell what their route takes.

        One that held a queue and went by hosts nevertheless says nothing of either route: its
        sender didn't wait for it, and its receiver for more than the message.

        Args:
            samples: Of a step, in which all that was sent on a failed link may have gone by hosts.
        """
        if not self._failed:
            return samples
        return tuple(each for each in samples if not self._went_by_hosts(each))

    def _went_by_hosts(self, sample: LinkSample) -> bool:
        ends = sorted((sample.source, sample.destination))
        return sample.is_held and Link(*ends) in self._failed


def in_words(links: Collection[Link]) -> dict[str, str]:
    """Links whose direct paths have failed, each in a few words."""
    return {str(link): "direct path failed, delegated" for link in sorted(links)}
