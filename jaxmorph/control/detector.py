"""Finds links that have become slow, and links that are healthy again, from message times.

There is no nominal speed of a link: a direction is compared with its own history
(`direction_watch`), and right after its first measurement with the other directions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from jaxmorph.control.direction_watch import (
    DirectionState,
    DirectionWatch,
    after_messages_in_time,
)
from jaxmorph.control.link_state import Direction, LinkHealth
from jaxmorph.control.measurements import DirectionSamples, StepSamples, robust_spread
from jaxmorph.control.route_record import OTHER_ROUTE_MS, Usual
from jaxmorph.control.verdicts import Evidence, KnownDirection, Verdict
from jaxmorph.records import Route

_ENOUGH_OTHERS = 3  # directions: the two of one other link could be the slow ones
_NO_EVIDENCE = Evidence((), 0.0, 0.0, 0.0)
_ROUTES: Mapping[bool, Route] = {True: "direct", False: "delegated"}


@dataclass(frozen=True)
class Detector:
    """The state of all directions by the times of their messages.

    Each step, failure or return gives the next detector, and the verdicts that have changed.
    """

    directions: Mapping[Direction, DirectionState] = field(default_factory=dict)

    @property
    def verdicts(self) -> dict[Direction, Verdict]:
        """The verdict on every direction that has been seen."""
        return {
            direction: self.directions[direction].verdict for direction in sorted(self.directions)
        }

    def observe(self, step: int, samples: StepSamples) -> tuple["Detector", list[Verdict]]:
        """Judge a step's messages."""
        now = dict(self.directions)
        in_time = after_messages_in_time(now, samples)
        changes: list[Verdict] = []
        measured: list[tuple[Direction, DirectionWatch, bool]] = []
        for direction, its_samples in sorted(samples.items()):
            if direction in in_time:
                now[direction] = in_time[direction]
                continue
            watch = _watch(now, direction)
            changes += watch.observe(step, its_samples)
            now[direction] = watch.state()
            if watch.first_measured is not None:
                measured.append((direction, watch, watch.first_measured))
        for direction, watch, is_direct in measured:  # when all baselines of the step are there
            changes += watch.compare(step, is_direct, _by_others(now, direction, is_direct))
            now[direction] = watch.state()
        return Detector(now), changes

    def observe_late(
        self, step: int, direction: Direction, late_ms: Sequence[float], *, is_direct: bool
    ) -> tuple["Detector", list[Verdict]]:
        """Mark a direction slow by messages of an unfinished step, unless it is slow already."""
        watch = _watch(self.directions, direction)
        changes = watch.turned_slow(step, late_ms, is_direct=is_direct)
        return self._with(watch), changes

    def observe_failure(self, step: int, direction: Direction, detail: str) -> "Detector":
        """Mark a direction dead; no verdict changes if it was dead already."""
        watch = _watch(self.directions, direction)
        watch.path_failed(step, detail)
        return self._with(watch)

    def observe_return(
        self, step: int, direction: Direction, up_steps: int
    ) -> tuple["Detector", list[Verdict]]:
        """Mark the direct path of a dead direction as returned; no other direction changes."""
        detail = f"both ends have found its direct path up for {up_steps} steps in a row"
        watch = _watch(self.directions, direction)
        changes = watch.path_returned(step, detail)
        return self._with(watch), changes

    def begin_slow(
        self,
        step: int,
        samples: DirectionSamples,
        usual_ms: Mapping[bool, float],
        known: Verdict | None = None,
    ) -> "Detector":
        """Mark a direction slow that was slow before its first measurement.

        Args:
            samples: Its last messages.
            usual_ms: The time of a healthy message, by whether it is direct.
            known: Its verdict when the run last stopped; None: judge by the samples.
        """
        expected = {is_direct: Usual.of(each_ms) for is_direct, each_ms in usual_ms.items()}
        watch = _watch(self.directions, samples.direction)
        watch.begin_slow(step, samples, expected, known)
        return self._with(watch)

    def with_usual(self, direction: Direction, usual_ms: float, *, is_direct: bool) -> "Detector":
        """The detector with a healthy message's time on a route, unless it has learned that."""
        watch = _watch(self.directions, direction)
        watch.expect(is_direct, Usual.of(usual_ms))
        return self._with(watch)

    def known_directions(self) -> tuple[KnownDirection, ...]:
        """The directions that are slow or dead now, for a later start of the run."""
        return tuple(
            KnownDirection(
                state.verdict, _ROUTES[state.is_direct is True], self._usual_ms(direction)
            )
            for direction, state in sorted(self.directions.items())
            if state.verdict.health is LinkHealth.SLOW
        )

    def usual(self, direction: Direction, *, is_direct: bool) -> Usual | None:
        """The times of healthy messages on a route, to judge a probe by; None if unknown.

        A route that was not measured on this link gets the times of the other links.
        """
        state = self.directions.get(direction)
        if state is None:
            return None
        other_route = state.usual(not is_direct)
        return state.usual(is_direct) or _assumed(
            self.directions, direction, is_direct, other_route
        )

    def _usual_ms(self, direction: Direction) -> dict[Route, float]:
        """The time of a healthy message on each route, where it is known or can be assumed."""
        found: dict[Route, Usual | None] = {
            route: self.usual(direction, is_direct=is_direct)
            for is_direct, route in _ROUTES.items()
        }
        return {route: usual.baseline_ms for route, usual in found.items() if usual is not None}

    def _with(self, watch: DirectionWatch) -> "Detector":
        return Detector({**self.directions, watch.verdict.direction: watch.state()})


def _watch(directions: Mapping[Direction, DirectionState], direction: Direction) -> DirectionWatch:
    state = directions.get(direction)
    if state is None:
        health, reason = LinkHealth.HEALTHY, "no delay seen"
        state = DirectionState(Verdict(*direction, health, 0.0, 0.0, 0, _NO_EVIDENCE, reason))
    return DirectionWatch(state, partial(_assumed, directions, direction))


def _assumed(
    directions: Mapping[Direction, DirectionState],
    direction: Direction,
    is_direct: bool,
    other_route: Usual | None,
) -> Usual | None:
    """The route's times on other links; else those of the other route, on this link or others."""
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
    """The route's times on other links, if there are enough of them."""
    known_ms = _other_baselines_ms(directions, direction, is_direct)
    if len(known_ms) < _ENOUGH_OTHERS:
        return None
    return Usual.of(median(known_ms), robust_spread(known_ms))


def _other_baselines_ms(
    directions: Mapping[Direction, DirectionState], direction: Direction, is_direct: bool
) -> list[float]:
    known = (state.usual(is_direct) for at, state in directions.items() if at != direction)
    return [each.baseline_ms for each in known if each is not None]
