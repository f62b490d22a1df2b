"""Finds links that have become slow, from what their messages take, and when they are well again.

Nothing here knows what a link is supposed to do: a direction is compared with itself
(`direction_watch`), and, when it has just been measured for the first time, with the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxmorph.control.direction_watch import DirectionState, DirectionWatch
from jaxmorph.control.link_state import Direction, LinkHealth
from jaxmorph.control.measurements import LinkSample, median, robust_spread
from jaxmorph.control.route_record import OTHER_ROUTE_MS, Usual
from jaxmorph.control.verdicts import Evidence, KnownDirection, Verdict
from jaxmorph.records import Route

_ENOUGH_OTHERS = 3  # directions: those of one other link could be the slow ones
_NO_EVIDENCE = Evidence((), 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Detector:
    """What is known of all directions of all links by what their messages have taken.

    It never changes: each step, failure or return gives the next detector, and the verdicts that
    have changed.
    """

    directions: Mapping[Direction, DirectionState] = field(default_factory=dict)

    @property
    def verdicts(self) -> dict[Direction, Verdict]:
        """What is to be said now of every direction that has been seen."""
        return {
            direction: self.directions[direction].verdict for direction in sorted(self.directions)
        }

    def observe(self, step: int, samples: Iterable[LinkSample]) -> tuple["Detector", list[Verdict]]:
        """Take in what a step's messages took.

        Args:
            samples: Of all links, in the order of sending (see `link_samples`).

        Returns:
            And the verdicts that have changed, those of a direction in order.
        """
        by_direction: dict[Direction, list[LinkSample]] = {}
        for sample in samples:
            by_direction.setdefault((sample.source, sample.destination), []).append(sample)
        now = dict(self.directions)
        changes: list[Verdict] = []
        measured: list[tuple[Direction, DirectionWatch, bool]] = []
        for direction, its_samples in sorted(by_direction.items()):
            watch = _watch(now, direction)
            changes += watch.observe(step, its_samples)
            now[direction] = watch.state()
            if watch.first_measured is not None:
                measured.append((direction, watch, watch.first_measured))
        for direction, watch, is_direct in measured:  # once all have been
            changes += watch.compare(step, is_direct, _by_others(now, direction, is_direct))
            now[direction] = watch.state()
        return Detector(now), changes

    def observe_failure(
        self, step: int, source: int, destination: int, detail: str
    ) -> tuple["Detector", list[Verdict]]:
        """Take in that the direct path of a link was given up, or is found down.

        Returns:
            And the verdict, unless the direction was dead already.
        """
        watch = _watch(self.directions, (source, destination))
        return self._after(watch.path_failed(step, detail), watch)

    def observe_return(
        self, step: int, source: int, destination: int, up_steps: int
    ) -> tuple["Detector", list[Verdict]]:
        """Take in that both ends of a dead link have found its direct path up for long enough.

        Returns:
            And the verdicts that have changed, in order; none unless the direction was dead.
        """
        detail = f"both ends have found its direct path up for {up_steps} steps in a row"
        watch = _watch(self.directions, (source, destination))
        return self._after(watch.path_returned(step, detail), watch)

    def begin_slow(
        self,
        step: int,
        samples: Sequence[LinkSample],
        usual_ms: Mapping[bool, float],
        known: Verdict | None = None,
    ) -> tuple["Detector", list[Verdict]]:
        """Take a direction for slow from the start, though it was not seen to become so.

        Args:
            samples: What its last messages took, at least one, in the order of sending.
            usual_ms: What its messages would take on a healthy link, by whether they are direct.
            known: As what it was slow when the run was last at work; None: go by the samples.
        """
        expected = {is_direct: Usual.of(each_ms) for is_direct, each_ms in usual_ms.items()}
        watch = _watch(self.directions, (samples[-1].source, samples[-1].destination))
        return self._after(watch.begin_slow(step, samples, expected, known), watch)

    def known_directions(self) -> tuple[KnownDirection, ...]:
        """What is to be remembered of directions that are slow or dead now."""
        return tuple(
            KnownDirection(
                state.verdict,
                "direct" if state.is_direct else "delegated",
                self._usual_ms(direction),
            )
            for direction, state in sorted(self.directions.items())
            if state.verdict.health is LinkHealth.SLOW
        )

    def usual(self, source: int, destination: int, *, is_direct: bool) -> Usual | None:
        """What a healthy message takes on the direct route, or on the other, to judge a probe by.

        What it takes on other links where it has not been measured on this one; None where that
        isn't known either.
        """
        direction = source, destination
        state = self.directions.get(direction)
        if state is None:
            return None
        other_route = state.usual(not is_direct)
        return state.usual(is_direct) or _assumed(
            self.directions, direction, is_direct, other_route
        )

    def _usual_ms(self, direction: Direction) -> dict[Route, float]:
        """What a healthy message takes on the routes of which that is known, or can be derived."""
        names: dict[Route, bool] = {"direct": True, "delegated": False}
        found: dict[Route, Usual | None] = {
            name: self.usual(*direction, is_direct=is_direct) for name, is_direct in names.items()
        }
        return {name: usual.baseline_ms for name, usual in found.items() if usual is not None}

    def _after(
        self, changes: list[Verdict], watch: DirectionWatch
    ) -> tuple["Detector", list[Verdict]]:
        direction = watch.verdict.source, watch.verdict.destination
        return Detector({**self.directions, direction: watch.state()}), changes


def _watch(directions: Mapping[Direction, DirectionState], direction: Direction) -> DirectionWatch:
    state = directions.get(direction)
    if state is None:
        health, said = LinkHealth.HEALTHY, "no delay seen"
        state = DirectionState(Verdict(*direction, health, 0.0, 0.0, 0, _NO_EVIDENCE, said))
    return DirectionWatch(state, partial(_assumed, directions, direction))


def _assumed(
    directions: Mapping[Direction, DirectionState],
    direction: Direction,
    is_direct: bool,
    other_route: Usual | None,
) -> Usual | None:
    """What the route takes on other links; else what the other route takes, here or there."""
    if known_ms := _other_baselines_ms(directions, direction, is_direct):
        return Usual.of(median(known_ms))
    if other_route is not None:
        known_ms = [other_route.baseline_ms]
    elif not (known_ms := _other_baselines_ms(directions, direction, not is_direct)):
        return None
    return Usual.of(median(known_ms) + OTHER_ROUTE_MS)


def _by_others(
    directions: Mapping[Direction, DirectionState], direction: Direction, is_direct: bool
) -> Usual | None:
    """What the route takes on other links, where there are enough of them."""
    known_ms = _other_baselines_ms(directions, direction, is_direct)
    if len(known_ms) < _ENOUGH_OTHERS:
        return None
    return Usual.of(median(known_ms), robust_spread(known_ms))


def _other_baselines_ms(
    directions: Mapping[Direction, DirectionState], direction: Direction, is_direct: bool
) -> list[float]:
    known = (state.usual(is_direct) for at, state in directions.items() if at != direction)
    return [each.baseline_ms for each in known if each is not None]
