"""Finds links that have become slow, from what their messages take, and when they are well again.

Nothing here knows what a link is supposed to do: a direction is compared with itself, and, when it
has just been measured for the first time, with the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from jaxmorph.control.direction_watch import DirectionWatch
from jaxmorph.control.measurements import LinkSample, median, robust_spread
from jaxmorph.control.route_record import Sensitivity, Usual, usual
from jaxmorph.control.verdicts import KnownWay, LinkHealth, Verdict, Way
from jaxmorph.schedule.costs import Route

_ENOUGH_OTHERS = 3  # directions: those of one other link could be the slow ones


class Detector:
    """Keeps watch over all directions of all links."""

    def __init__(self, sensitivity: Sensitivity | None = None) -> None:
        self._numbers = sensitivity or Sensitivity()
        self._watches: dict[Way, DirectionWatch] = {}

    @property
    def verdicts(self) -> dict[Way, Verdict]:
        """What is to be said now of every direction that has been seen."""
        return {way: watch.verdict for way, watch in sorted(self._watches.items())}

    def observe(self, step: int, samples: Iterable[LinkSample]) -> list[Verdict]:
        """Take in what a step's messages took.

        Args:
            samples: Of all links, in the order of sending (see `link_samples`).

        Returns:
            The verdicts that have changed, those of a direction in order.
        """
        by_way: dict[Way, list[LinkSample]] = {}
        for sample in samples:
            by_way.setdefault((sample.source, sample.destination), []).append(sample)
        changes = [
            change
            for way, of_way in sorted(by_way.items())
            for change in self._watch(way).observe(step, of_way)
        ]
        for way in sorted(by_way):  # once all have been measured
            changes += self._watch(way).compare(step, partial(self._by_others, way))
        return changes

    def observe_failure(
        self, step: int, source: int, destination: int, detail: str
    ) -> list[Verdict]:
        """Take in that the direct path of a link was given up, or is found down.

        Returns:
            The verdict, unless the direction was dead already.
        """
        return self._watch((source, destination)).fail(step, detail)

    def observe_return(
        self, step: int, source: int, destination: int, up_steps: int
    ) -> list[Verdict]:
        """Take in that both ends of a dead link have found its direct path up for long enough.

        Returns:
            The verdicts that have changed, in order; none unless the direction was dead.
        """
        detail = f"both ends have found its direct path up for {up_steps} steps in a row"
        return self._watch((source, destination)).come_back(step, detail)

    def begin_slow(
        self,
        step: int,
        samples: Sequence[LinkSample],
        usual_ms: Mapping[bool, float],
        known: Verdict | None = None,
    ) -> list[Verdict]:
        """Take a direction for slow from the start, though it was not seen to become so.

        Args:
            samples: What its last messages took, at least one, in the order of sending.
            usual_ms: What its messages would take on a healthy link, by whether they are direct.
            known: As what it was slow when the run was last at work; None: go by the samples.
        """
        expected = {way: usual(each_ms, 0.0, self._numbers) for way, each_ms in usual_ms.items()}
        ends = samples[-1].source, samples[-1].destination
        return self._watch(ends).begin_slow(step, samples, expected, known)

    def known_ways(self) -> tuple[KnownWay, ...]:
        """What is to be remembered of directions that are slow or dead now."""
        ailing = (LinkHealth.SLOW, LinkHealth.DEAD)
        return tuple(
            KnownWay(watch.verdict, "direct" if watch.is_held else "delegated", self._usual_ms(way))
            for way, watch in sorted(self._watches.items())
            if watch.verdict.health in ailing
        )

    def usual(self, source: int, destination: int, *, is_held: bool) -> Usual | None:
        """What a healthy message takes on the direct route, or on the other, to judge a probe by.

        What it takes on other links where it has not been measured on this one; None where that
        isn't known either.
        """
        way = source, destination
        watch = self._watches.get(way)
        return None if watch is None else watch.usual(is_held) or self._assume(way, is_held)

    def _usual_ms(self, way: Way) -> dict[Route, float]:
        """What a healthy message takes on the routes of which that is known, or can be told."""
        names: dict[Route, bool] = {"direct": True, "delegated": False}
        found: dict[Route, Usual | None] = {
            name: self.usual(*way, is_held=is_held) for name, is_held in names.items()
        }
        return {name: usual.baseline_ms for name, usual in found.items() if usual is not None}

    def _watch(self, way: Way) -> DirectionWatch:
        if way not in self._watches:
            assume = partial(self._assume, way)
            self._watches[way] = DirectionWatch(*way, self._numbers, assume)
        return self._watches[way]

    def _assume(self, way: Way, is_held: bool) -> Usual | None:
        """What the route takes on other links; else what the other route takes, here or there."""
        if known_ms := self._other_baselines_ms(way, is_held):
            return usual(median(known_ms), 0.0, self._numbers)
        other_route = self._watches[way].usual(not is_held)
        if other_route is not None:
            known_ms = [other_route.baseline_ms]
        elif not (known_ms := self._other_baselines_ms(way, not is_held)):
            return None
        baseline_ms = median(known_ms) + self._numbers.other_route_ms
        return usual(baseline_ms, 0.0, self._numbers)

    def _by_others(self, way: Way, is_held: bool) -> Usual | None:
        """What the route takes on other links, where there are enough of them."""
        known_ms = self._other_baselines_ms(way, is_held)
        if len(known_ms) < _ENOUGH_OTHERS:
            return None
        return usual(median(known_ms), robust_spread(known_ms), self._numbers)

    def _other_baselines_ms(self, way: Way, is_held: bool) -> list[float]:
        known = (watch.usual(is_held) for at, watch in self._watches.items() if at != way)
        return [each.baseline_ms for each in known if each is not None]
