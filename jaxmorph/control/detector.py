"""Finds links that have become slow, from what their messages take, and when they are well again.

Nothing here knows what a link is supposed to do: a direction is compared with itself.
"""

from collections.abc import Iterable
from functools import partial

from jaxmorph.control.direction_watch import DirectionWatch
from jaxmorph.control.estimates import median
from jaxmorph.control.link_samples import LinkSample
from jaxmorph.control.sensitivity import Sensitivity, Usual, usual
from jaxmorph.control.verdicts import Verdict

Way = tuple[int, int]
"""A direction of a link: the rank that sends and the rank that receives."""


class Detector:
    """Keeps watch over all directions of all links.

    Args:
        sensitivity: The numbers to go by.
    """

    def __init__(self, sensitivity: Sensitivity | None = None) -> None:
        self._numbers = sensitivity or Sensitivity()
        self._watches: dict[Way, DirectionWatch] = {}

    @property
    def verdicts(self) -> dict[Way, Verdict]:
        """What is to be said now of every direction that has been seen, by its two ranks."""
        return {way: watch.verdict for way, watch in sorted(self._watches.items())}

    def observe(self, step: int, samples: Iterable[LinkSample]) -> list[Verdict]:
        """Take in what a step's messages took.

        Args:
            step: Its number.
            samples: Of all links, in the order of sending (see `link_samples`).

        Returns:
            The verdicts that have changed, those of a direction in order.
        """
        by_way: dict[Way, list[LinkSample]] = {}
        for sample in samples:
            by_way.setdefault((sample.source, sample.destination), []).append(sample)
        return [
            change
            for way, of_way in sorted(by_way.items())
            for change in self._watch(way).observe(step, of_way)
        ]

    def observe_failure(
        self, step: int, source: int, destination: int, detail: str
    ) -> list[Verdict]:
        """Take in that messages of a direction were given up.

        Args:
            step: In which step.
            source: The rank that sends.
            destination: The rank that receives.
            detail: What is known of it.

        Returns:
            The verdict, unless the direction was dead already.
        """
        return self._watch((source, destination)).fail(step, detail)

    def usual(self, source: int, destination: int, *, is_held: bool) -> Usual | None:
        """What a healthy message takes, by which a probe can be judged.

        Args:
            source: The rank that sends.
            destination: The rank that receives.
            is_held: Whether on the direct route.

        Returns:
            None where that has not been measured.
        """
        watch = self._watches.get((source, destination))
        return None if watch is None else watch.usual(is_held)

    def _watch(self, way: Way) -> DirectionWatch:
        if way not in self._watches:
            assume = partial(self._assume, way)
            self._watches[way] = DirectionWatch(*way, self._numbers, assume)
        return self._watches[way]

    def _assume(self, way: Way, is_held: bool) -> Usual | None:
        """What the route takes on other links; failing that, what the other route takes here."""
        others = (watch.usual(is_held) for watch in self._watches.values())
        known_ms = [known.baseline_ms for known in others if known is not None]
        if known_ms:
            return usual(median(known_ms), 0.0, self._numbers)
        other_route = self._watches[way].usual(not is_held)
        if other_route is None:
            return None
        baseline_ms = other_route.baseline_ms + self._numbers.other_route_ms
        return usual(baseline_ms, 0.0, self._numbers)
