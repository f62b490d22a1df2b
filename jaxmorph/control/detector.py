"""Finds links that have become slow, from what their messages take, and when they are well again.

Nothing here knows what a link is supposed to do: a direction is compared with itself
(`DirectionWatch`), and, when it has just been measured for the first time, with the others
(`Detector`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from jaxmorph.control.measurements import LinkSample, median, robust_spread
from jaxmorph.control.route_record import RouteRecord, Sensitivity, Usual, typical_ms
from jaxmorph.control.verdicts import (
    SENTENCES,
    TURNS,
    Evidence,
    KnownWay,
    LinkHealth,
    Sign,
    Verdict,
    Way,
)
from jaxmorph.records import Route

_ENOUGH_OTHERS = 3  # directions: those of one other link could be the slow ones
_CALMING = 0.8  # what is left of a slow link's unrest after another step

_OTHER_LEVEL = {LinkHealth.SLOW: Sign.MOVED, LinkHealth.DEAD: Sign.SHIFTED}
"""What it is a sign of that messages take clearly more, or less, than those before."""

Assume = Callable[[bool], Usual | None]
"""What to go by on a route (held or not) that has not been measured here; None: nothing."""


class DirectionWatch:
    """Judges one direction by its messages.

    The two routes are measured each for itself. The one that most messages of a step take is
    current: its messages say whether the link is slow and when it isn't any more. The few on the
    other one are probes: they may show that it is slow, or, where the current one has never been
    seen healthy, that it no longer is. A dead link has no direct path, so no message of its says
    that it is back: somebody has to have tried the path itself.
    """

    def __init__(
        self, source: int, destination: int, sensitivity: Sensitivity, assume: Assume
    ) -> None:
        self._numbers = sensitivity
        self._assume = assume
        self._routes: dict[bool, RouteRecord] = {}
        self._current: bool | None = None
        self._judged_by: bool | None = None
        self._level_ms = 0.0
        self._unrest = 0.0
        self._good_steps = 0
        self._first_measured: bool | None = None
        no_evidence = Evidence((), 0.0, 0.0, 0.0)
        self._verdict = Verdict(
            source, destination, LinkHealth.HEALTHY, 0.0, 0.0, 0, no_evidence, "no delay seen"
        )

    @property
    def verdict(self) -> Verdict:
        """What is to be said of the direction now; its latency and jitter are the latest."""
        return self._verdict

    @property
    def is_held(self) -> bool | None:
        """Whether most of its messages take the direct route now; None: none was seen."""
        return self._current

    def usual(self, is_held: bool) -> Usual | None:
        """What a healthy message takes on a route; None where it has not been measured."""
        record = self._routes.get(is_held)
        return None if record is None else record.usual

    def observe(self, step: int, samples: Sequence[LinkSample]) -> list[Verdict]:
        """Take in a step's messages, at least one, in the order of sending.

        Returns:
            What has changed, in order; the last one with the latest latency and jitter.
        """
        self._notice_route(samples)
        self._unrest *= _CALMING
        for record in self._routes.values():
            record.begin_step()
        began_as = self._verdict.health
        changes: list[Verdict] = []
        for sample in samples:
            may_move = not changes
            changes += self._read(step, sample, may_move=may_move)
        if began_as is self._verdict.health is LinkHealth.RECOVERING:
            changes += self._count_good_step(step, samples)
        for is_held, record in self._routes.items():
            settles = self._verdict.health is LinkHealth.HEALTHY or record.usual is None
            if settles and record.settle():
                self._first_measured = is_held
        self._verdict = self._with_latency(self._verdict)
        if not changes:
            return []
        self._level_ms = self._verdict.latency_ms
        return [*changes[:-1], self._verdict]

    def begin_slow(
        self,
        step: int,
        samples: Sequence[LinkSample],
        expected: Mapping[bool, Usual],
        known: Verdict | None = None,
    ) -> list[Verdict]:
        """Take the direction for slow from the start.

        Args:
            samples: What its last messages took.
            expected: What healthy ones would take on either route: what to go by until healthy
                messages have been seen.
            known: As what it was slow last, which counts, whatever a few messages show.
        """
        for is_held, usual in expected.items():
            self._record(is_held).usual = usual
        self._notice_route(samples)
        if known is None:
            took_ms = [sample.duration_ms for sample in samples]
            return self._turn(step, Sign.ROSE, self._current, took_ms)
        baseline_ms = known.evidence.baseline_ms
        detail = f"{known.latency_ms:.1f} ms (healthy: {baseline_ms:.1f})"
        if not self._turn(step, Sign.KNOWN, self._current, (), detail):
            return []
        told = {"latency_ms": known.latency_ms, "jitter_ms": known.jitter_ms}
        self._verdict = replace(self._verdict, **told, evidence=known.evidence)
        self._level_ms = known.latency_ms
        return [self._verdict]

    def compare(self, step: int, others: Callable[[bool], Usual | None]) -> list[Verdict]:
        """Compare a route that has just got its first baseline with the other directions'.

        A link that is slow from the first message on is not seen to become so.

        Args:
            others: What to go by on a route, by the other directions; None where they don't say.
        """
        is_held, self._first_measured = self._first_measured, None
        if is_held is None or self._verdict.health is not LinkHealth.HEALTHY:
            return []
        record, expected = self._record(is_held), others(is_held)
        if expected is None or record.usual is None:
            return []
        if record.usual.baseline_ms <= expected.threshold_ms:
            return []
        took_ms = record.recent.last(self._numbers.learning_messages)
        record.unlearn()
        return self._turn(step, Sign.ROSE, is_held, took_ms, usual=expected)

    def fail(self, step: int, detail: str) -> list[Verdict]:
        """Take in that the direct path was given up; no verdict if the link was dead already."""
        return self._turn(step, Sign.FAILED, self._current, (), detail)

    def come_back(self, step: int, detail: str) -> list[Verdict]:
        """Take in that the direct path of a dead link has been up for long enough.

        Where none of its messages are watched the next verdict, too, has nothing to wait for.
        """
        if self._verdict.health is not LinkHealth.DEAD:
            return []
        turned = self._turn(step, Sign.RETURNED, None, (), detail)
        if not self._routes:
            turned += self._turn(step, Sign.RETURNED, None, (), detail)
        return turned

    def _notice_route(self, samples: Sequence[LinkSample]) -> None:
        is_held = 2 * sum(sample.is_held for sample in samples) > len(samples)
        if is_held is self._current:
            return
        self._current = is_held
        self._record(is_held).begin_again()
        self._judged_by = is_held

    def _record(self, is_held: bool) -> RouteRecord:
        if is_held not in self._routes:
            self._routes[is_held] = RouteRecord(self._numbers)
        return self._routes[is_held]

    def _go_by(self, is_held: bool) -> Usual | None:
        """What to judge a route's messages by; a healthy link's other route is measured first."""
        known = self.usual(is_held)
        if known is None and self._verdict.health is not LinkHealth.HEALTHY:
            return self._assume(is_held)
        return known

    def _read(self, step: int, sample: LinkSample, *, may_move: bool) -> list[Verdict]:
        record, usual = self._record(sample.is_held), self._go_by(sample.is_held)
        is_healthy = self._verdict.health is LinkHealth.HEALTHY
        if usual is None or not is_healthy:
            record.recent.add(sample.duration_ms)
        if usual is None:
            if self._verdict.health is not LinkHealth.SLOW:  # it says nothing of a healthy link
                record.healthy.learn([sample.duration_ms])
            return []
        record.read(sample, usual, learns=is_healthy)
        if is_healthy and not record.late:
            return []
        if self._may_accuse() and (late_ms := record.late_beyond_chance()):
            return self._turn(step, Sign.ROSE, sample.is_held, late_ms)
        if self._may_clear(sample.is_held) and len(record.calm) >= self._numbers.settled_run:
            return self._turn(step, Sign.FELL, sample.is_held, record.calm)
        sign = _OTHER_LEVEL.get(self._verdict.health)
        if sign is not None and may_move and sample.is_held is self._current:
            return self._read_level(step, sample, record, sign)
        return []

    def _read_level(
        self, step: int, sample: LinkSample, record: RouteRecord, sign: Sign
    ) -> list[Verdict]:
        if sign is Sign.MOVED and not record.late:  # in time: that is no other delay
            record.moved.clear()
            return []
        record.read_level(sample.duration_ms, self._level_ms, self._unrest)
        if len(record.moved) < self._numbers.settled_run:
            return []
        self._unrest += 1.0
        return self._turn(step, sign, sample.is_held, record.moved)

    def _may_accuse(self) -> bool:
        return self._verdict.health not in (LinkHealth.SLOW, LinkHealth.DEAD)

    def _may_clear(self, is_held: bool) -> bool:
        if self._verdict.health is not LinkHealth.SLOW:
            return False
        unmeasured = self.usual(not is_held) is None and self.usual(is_held) is not None
        return unmeasured or self._is_heard(is_held)

    def _is_heard(self, is_held: bool) -> bool:
        return self._judged_by is None or self._judged_by is is_held

    def _count_good_step(self, step: int, samples: Sequence[LinkSample]) -> list[Verdict]:
        heard = [each for each in samples if self._is_heard(each.is_held)]
        usual = self._go_by(heard[0].is_held) if heard else None
        if usual is None:
            return []
        took_ms = [each.duration_ms for each in heard]
        if median(took_ms) <= usual.calm_ms:
            self._good_steps += 1
        elif median(took_ms) > usual.threshold_ms:
            self._good_steps = 0
        if self._good_steps < self._numbers.good_steps:
            return []
        return self._turn(step, Sign.HELD, heard[0].is_held, took_ms)

    def _turn(
        self,
        step: int,
        sign: Sign,
        is_held: bool | None,
        run_ms: Iterable[float],
        detail: str = "",
        usual: Usual | None = None,
    ) -> list[Verdict]:
        """Go where the table says that a sign leads; without an entry nothing changes."""
        before, run_ms = self._verdict, tuple(run_ms)
        health = TURNS.get((before.health, sign))
        if health is None:
            return []
        if usual is None and is_held is not None:
            usual = self._go_by(is_held)
        self._verdict = replace(
            before,
            health=health,
            step=step,
            evidence=_evidence(run_ms, usual),
            reason=self._sentence(sign, run_ms, usual, detail),
        )
        self._judged_by, self._good_steps = is_held, 0
        if sign is not Sign.HELD:
            for route, record in self._routes.items():
                record.begin_again(run_ms if route is is_held else ())
        self._verdict = self._with_latency(self._verdict)
        self._level_ms = self._verdict.latency_ms
        return [self._verdict]

    def _sentence(
        self, sign: Sign, run_ms: tuple[float, ...], usual: Usual | None, detail: str
    ) -> str:
        before = self._verdict
        said = SENTENCES[sign].format(
            took=typical_ms(run_ms) if run_ms else "",
            count=len(run_ms),
            threshold=usual.threshold_ms if usual else 0.0,
            before=before.latency_ms,
            steps=self._numbers.good_steps,
            detail=detail,
        )
        return f"link {before.source}>{before.destination} {said}"

    def _with_latency(self, verdict: Verdict) -> Verdict:
        """The verdict with what messages take now: on the current route if that is known."""
        if self._current is None:
            return verdict
        usual = self.usual(self._current)
        if verdict.health is LinkHealth.HEALTHY and usual is not None:
            return replace(verdict, latency_ms=usual.baseline_ms, jitter_ms=usual.spread_ms)
        recent = self._record(self._current).recent
        if not len(recent):
            return verdict
        return replace(verdict, latency_ms=recent.median, jitter_ms=recent.spread)


def _evidence(run_ms: tuple[float, ...], usual: Usual | None) -> Evidence:
    if usual is None:
        return Evidence(run_ms, 0.0, 0.0, 0.0)
    return Evidence(run_ms, usual.baseline_ms, usual.spread_ms, usual.threshold_ms)


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
        expected = {way: self._numbers.usual(each_ms) for way, each_ms in usual_ms.items()}
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
            return self._numbers.usual(median(known_ms))
        other_route = self._watches[way].usual(not is_held)
        if other_route is not None:
            known_ms = [other_route.baseline_ms]
        elif not (known_ms := self._other_baselines_ms(way, not is_held)):
            return None
        baseline_ms = median(known_ms) + self._numbers.other_route_ms
        return self._numbers.usual(baseline_ms)

    def _by_others(self, way: Way, is_held: bool) -> Usual | None:
        """What the route takes on other links, where there are enough of them."""
        known_ms = self._other_baselines_ms(way, is_held)
        if len(known_ms) < _ENOUGH_OTHERS:
            return None
        return self._numbers.usual(median(known_ms), robust_spread(known_ms))

    def _other_baselines_ms(self, way: Way, is_held: bool) -> list[float]:
        known = (watch.usual(is_held) for at, watch in self._watches.items() if at != way)
        return [each.baseline_ms for each in known if each is not None]
