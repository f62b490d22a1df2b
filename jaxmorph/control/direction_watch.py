"""Judges one direction of a link by itself: by what its messages took before.

All that is kept from step to step is plain values (`DirectionState`); a step's messages are read
into a working copy of them (`DirectionWatch`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxmorph.control.link_state import SENTENCES, TRANSITIONS, LinkHealth, Trigger
from jaxmorph.control.measurements import LinkSample, median
from jaxmorph.control.route_record import (
    GOOD_STEPS,
    LEARNING_MESSAGES,
    SETTLED_RUN,
    RouteRecord,
    RouteState,
    Usual,
    typical_ms,
)
from jaxmorph.control.verdicts import Evidence, Verdict
from jaxmorph.plain_json import written_as

_CALMING = 0.8  # what is left of a slow link's unrest after another step

Assume = Callable[[bool, Usual | None], Usual | None]
"""What to go by on a route (held or not) that has not been measured here; None: nothing.

Its second argument is the usual of the other route, if that is known.
"""


@dataclass(frozen=True)
class DirectionState:
    """What is kept of one direction of a link from step to step.

    Attributes:
        verdict: What is to be said of it now; its latency and jitter are the latest.
        direct: Of its direct messages; None: none was seen.
        delegated: Of its delegated ones.
        is_direct: Whether most of its messages take the direct route now; None: none was seen.
        judged_by: The route that the verdict came by; None: either may end it.
        level_ms: What messages took when it was last judged.
        unrest: How often a slow link's delay has changed lately.
        good_steps: How many steps in a row a recovering link's messages have been in time.
    """

    verdict: Verdict
    direct: RouteState | None = None
    delegated: RouteState | None = None
    is_direct: bool | None = field(default=None, metadata=written_as("is_held"))
    judged_by: bool | None = None
    level_ms: float = 0.0
    unrest: float = 0.0
    good_steps: int = 0

    def usual(self, is_direct: bool) -> Usual | None:
        """What a healthy message takes on a route; None where it has not been measured."""
        route = self.direct if is_direct else self.delegated
        return None if route is None else route.usual


class DirectionWatch:
    """Judges one direction by a step's messages: a working copy of its state.

    The two routes are measured each for itself. The one that most messages of a step take is
    current: its messages say whether the link is slow and when it isn't any more. The few on the
    other one are probes: they may show that it is slow, or, where the current one has never been
    seen healthy, that it no longer is. A dead link has no direct path, so no message of its says
    that it is back: the path itself has to have been tried.

    Attributes:
        verdict: What is to be said of the direction now; its latency and jitter are the latest.
        first_measured: The route that has just got its first baseline, if one has.
    """

    def __init__(self, state: DirectionState, assume: Assume) -> None:
        self._assume = assume
        self.verdict = state.verdict
        kept = ((True, state.direct), (False, state.delegated))
        self._routes = {is_direct: RouteRecord(of) for is_direct, of in kept if of is not None}
        self._current, self._judged_by = state.is_direct, state.judged_by
        self._level_ms, self._unrest = state.level_ms, state.unrest
        self._good_steps = state.good_steps
        self.first_measured: bool | None = None

    def state(self) -> DirectionState:
        """What is kept of the direction."""
        routes = {is_direct: record.state() for is_direct, record in self._routes.items()}
        return DirectionState(
            self.verdict,
            routes.get(True),
            routes.get(False),
            self._current,
            self._judged_by,
            self._level_ms,
            self._unrest,
            self._good_steps,
        )

    def observe(self, step: int, samples: Sequence[LinkSample]) -> list[Verdict]:
        """Take in a step's messages, at least one, in the order of sending.

        Returns:
            What has changed, in order; the last one with the latest latency and jitter.
        """
        self._update_route(samples)
        self._unrest *= _CALMING
        began_as = self.verdict.health
        changes: list[Verdict] = []
        for sample in samples:
            may_move = not changes
            changes += self._read(step, sample, may_move=may_move)
        if began_as is self.verdict.health is LinkHealth.RECOVERING:
            changes += self._count_good_step(step, samples)
        for is_direct, record in self._routes.items():
            settles = self.verdict.health is LinkHealth.HEALTHY or record.usual is None
            if settles and record.settle():
                self.first_measured = is_direct
        self.verdict = self._with_latency(self.verdict)
        if not changes:
            return []
        self._level_ms = self.verdict.latency_ms
        return [*changes[:-1], self.verdict]

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
        for is_direct, usual in expected.items():
            self._record(is_direct).usual = usual
        self._update_route(samples)
        if known is None:
            took_ms = [sample.duration_ms for sample in samples]
            return self._transition(step, Trigger.ROSE, self._current, took_ms)
        baseline_ms = known.evidence.baseline_ms
        detail = f"{known.latency_ms:.1f} ms (healthy: {baseline_ms:.1f})"
        if not self._transition(step, Trigger.KNOWN, self._current, (), detail):
            return []
        last = {"latency_ms": known.latency_ms, "jitter_ms": known.jitter_ms}
        self.verdict = replace(self.verdict, **last, evidence=known.evidence)
        self._level_ms = known.latency_ms
        return [self.verdict]

    def compare(self, step: int, is_direct: bool, expected: Usual | None) -> list[Verdict]:
        """Compare a route that has just got its first baseline with the other directions'.

        A link that is slow from the first message on is not seen to become so.

        Args:
            expected: What to go by, by the other directions; None where they don't say.
        """
        if expected is None or self.verdict.health is not LinkHealth.HEALTHY:
            return []
        record = self._record(is_direct)
        if record.usual is None or record.usual.baseline_ms <= expected.threshold_ms:
            return []
        took_ms = record.recent.last(LEARNING_MESSAGES)
        record.unlearn()
        return self._transition(step, Trigger.ROSE, is_direct, took_ms, usual=expected)

    def path_failed(self, step: int, detail: str) -> list[Verdict]:
        """Take in that the direct path was given up; no verdict if the link was dead already."""
        return self._transition(step, Trigger.FAILED, self._current, (), detail)

    def path_returned(self, step: int, detail: str) -> list[Verdict]:
        """Take in that the direct path of a dead link has been up for long enough.

        Where none of its messages are watched the next verdict, too, has nothing to wait for.
        """
        if not self.verdict.is_dead:
            return []
        turned = self._transition(step, Trigger.RETURNED, None, (), detail)
        if not self._routes:
            turned += self._transition(step, Trigger.RETURNED, None, (), detail)
        return turned

    def _update_route(self, samples: Sequence[LinkSample]) -> None:
        is_direct = 2 * sum(sample.is_direct for sample in samples) > len(samples)
        if is_direct is self._current:
            return
        self._current = is_direct
        self._record(is_direct).reset()
        self._judged_by = is_direct

    def _record(self, is_direct: bool) -> RouteRecord:
        if is_direct not in self._routes:
            self._routes[is_direct] = RouteRecord(RouteState())
        return self._routes[is_direct]

    def _usual(self, is_direct: bool) -> Usual | None:
        record = self._routes.get(is_direct)
        return None if record is None else record.usual

    def _go_by(self, is_direct: bool) -> Usual | None:
        """What to judge a route's messages by; a healthy link's other route is measured first."""
        known = self._usual(is_direct)
        if known is None and self.verdict.health is not LinkHealth.HEALTHY:
            return self._assume(is_direct, self._usual(not is_direct))
        return known

    def _read(self, step: int, sample: LinkSample, *, may_move: bool) -> list[Verdict]:
        record, usual = self._record(sample.is_direct), self._go_by(sample.is_direct)
        is_healthy = self.verdict.health is LinkHealth.HEALTHY
        if usual is None or not is_healthy:
            record.recent.add(sample.duration_ms)
        if usual is None:
            if not self.verdict.is_slow:  # it says nothing of a healthy link
                record.healthy.learn([sample.duration_ms])
            return []
        record.read(sample, usual, learns=is_healthy)
        if is_healthy and not record.late:
            return []
        may_accuse = self.verdict.health is not LinkHealth.SLOW
        if may_accuse and (late_ms := record.late_beyond_chance()):
            return self._transition(step, Trigger.ROSE, sample.is_direct, late_ms)
        if self._may_clear(sample.is_direct) and len(record.calm) >= SETTLED_RUN:
            return self._transition(step, Trigger.FELL, sample.is_direct, record.calm)
        if not may_accuse and may_move and sample.is_direct is self._current:
            return self._read_level(step, sample, record)
        return []

    def _read_level(self, step: int, sample: LinkSample, record: RouteRecord) -> list[Verdict]:
        """Look whether a slow or dead link's messages take clearly more, or less, than before."""
        is_dead = self.verdict.is_dead
        if not (is_dead or record.late):  # in time: that is no other delay
            record.moved.clear()
            return []
        record.read_level(sample.duration_ms, self._level_ms, self._unrest)
        if len(record.moved) < SETTLED_RUN:
            return []
        self._unrest += 1.0
        trigger = Trigger.SHIFTED if is_dead else Trigger.MOVED
        return self._transition(step, trigger, sample.is_direct, record.moved)

    def _may_clear(self, is_direct: bool) -> bool:
        if not self.verdict.is_slow:
            return False
        unmeasured = self._usual(not is_direct) is None and self._usual(is_direct) is not None
        return unmeasured or self._counts(is_direct)

    def _counts(self, is_direct: bool) -> bool:
        return self._judged_by is None or self._judged_by is is_direct

    def _count_good_step(self, step: int, samples: Sequence[LinkSample]) -> list[Verdict]:
        counting = [each for each in samples if self._counts(each.is_direct)]
        usual = self._go_by(counting[0].is_direct) if counting else None
        if usual is None:
            return []
        took_ms = [each.duration_ms for each in counting]
        if median(took_ms) <= usual.calm_ms:
            self._good_steps += 1
        elif median(took_ms) > usual.threshold_ms:
            self._good_steps = 0
        if self._good_steps < GOOD_STEPS:
            return []
        return self._transition(step, Trigger.LASTED, counting[0].is_direct, took_ms)

    def _transition(
        self,
        step: int,
        trigger: Trigger,
        is_direct: bool | None,
        run_ms: Iterable[float],
        detail: str = "",
        usual: Usual | None = None,
    ) -> list[Verdict]:
        """Go where the table says that a trigger leads; without an entry nothing changes."""
        before, run_ms = self.verdict, tuple(run_ms)
        turned = TRANSITIONS[before.health, before.path].get(trigger)
        if turned is None:
            return []
        if usual is None and is_direct is not None:
            usual = self._go_by(is_direct)
        health, path = turned
        self.verdict = replace(
            before,
            health=health,
            path=path,
            step=step,
            evidence=_evidence(run_ms, usual),
            reason=self._sentence(trigger, run_ms, usual, detail),
        )
        self._judged_by, self._good_steps = is_direct, 0
        if trigger is not Trigger.LASTED:
            for route, record in self._routes.items():
                record.reset(run_ms if route is is_direct else ())
        self.verdict = self._with_latency(self.verdict)
        self._level_ms = self.verdict.latency_ms
        return [self.verdict]

    def _sentence(
        self, trigger: Trigger, run_ms: tuple[float, ...], usual: Usual | None, detail: str
    ) -> str:
        before = self.verdict
        said = SENTENCES[trigger].format(
            took=typical_ms(run_ms) if run_ms else "",
            count=len(run_ms),
            threshold=usual.threshold_ms if usual else 0.0,
            before=before.latency_ms,
            steps=GOOD_STEPS,
            detail=detail,
        )
        return f"link {before.source}>{before.destination} {said}"

    def _with_latency(self, verdict: Verdict) -> Verdict:
        """The verdict with what messages take now: on the current route if that is known."""
        if self._current is None:
            return verdict
        usual = self._usual(self._current)
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
