"""One direction of a link, watched: what its messages show, and what state that leaves it in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from jaxmorph.control.measurements import LinkSample, median
from jaxmorph.control.route_record import (
    RouteRecord,
    Sensitivity,
    Usual,
    typical_ms,
)
from jaxmorph.control.verdicts import Evidence, LinkHealth, Verdict


class Sign(StrEnum):
    """What the messages of a direction, or their absence, have shown.

    Attributes:
        ROSE: So many in a row were late that chance doesn't do it.
        MOVED: As many in a row took clearly more, or less, than those before, and were late still.
        FELL: As many in a row were in time.
        HELD: They have been in time for several steps.
        FAILED: The direct path was given up, or is found down.
        SHIFTED: Delegated messages of a link without a direct path take clearly more, or less.
        RETURNED: Both ends have found the direct path up for many steps in a row.
        KNOWN: It was slow when the run was last at work.
    """

    ROSE = "rose"
    MOVED = "moved"
    FELL = "fell"
    HELD = "held"
    FAILED = "failed"
    SHIFTED = "shifted"
    RETURNED = "returned"
    KNOWN = "known"


TURNS: dict[tuple[LinkHealth, Sign], LinkHealth] = {
    (LinkHealth.HEALTHY, Sign.ROSE): LinkHealth.SLOW,
    (LinkHealth.HEALTHY, Sign.KNOWN): LinkHealth.SLOW,
    (LinkHealth.HEALTHY, Sign.FAILED): LinkHealth.DEAD,
    (LinkHealth.SLOW, Sign.MOVED): LinkHealth.SLOW,
    (LinkHealth.SLOW, Sign.FELL): LinkHealth.RECOVERING,
    (LinkHealth.SLOW, Sign.FAILED): LinkHealth.DEAD,
    (LinkHealth.DEAD, Sign.SHIFTED): LinkHealth.DEAD,
    (LinkHealth.DEAD, Sign.RETURNED): LinkHealth.RECOVERING,
    (LinkHealth.RECOVERING, Sign.ROSE): LinkHealth.SLOW,
    (LinkHealth.RECOVERING, Sign.HELD): LinkHealth.HEALTHY,
    (LinkHealth.RECOVERING, Sign.RETURNED): LinkHealth.HEALTHY,
    (LinkHealth.RECOVERING, Sign.FAILED): LinkHealth.DEAD,
}
"""What follows from a sign in a state; a pair that is not here changes nothing.

No message brings a dead link back, as all of them are delegated: only its path itself does. After
that messages say whether it has recovered, or, where none of them are watched, the path once more.
"""

SENTENCES: dict[Sign, str] = {
    Sign.ROSE: "is slow: {took} for {count} messages in a row, {threshold:.1f} is late",
    Sign.MOVED: "is slow by another amount: {took} for {count} messages in a row, was {before:.1f}",
    Sign.FELL: "is recovering: {took} for {count} messages in a row, was {before:.1f}",
    Sign.HELD: "is healthy again: {took} in the last of {steps} good steps",
    Sign.FAILED: "is dead: {detail}",
    Sign.SHIFTED: "is dead, and delegated messages take another time: {took} for {count} in a row, "
    "was {before:.1f}",
    Sign.RETURNED: "is back: {detail}",
    Sign.KNOWN: "is taken for slow, as when the run was last at work: {detail}",
}
"""What is said of a direction that a sign has turned; `took` names the messages' times."""


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
