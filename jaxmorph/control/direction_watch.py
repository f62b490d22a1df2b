"""Judges one direction of a link by the history of its messages.

`DirectionState` is kept from step to step; `DirectionWatch` is the working copy of it that reads a
step's messages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmorph.control.link_state import SENTENCES, TRANSITIONS, Direction, LinkHealth, Trigger
from jaxmorph.control.measurements import DirectionSamples, LinkSample, StepSamples
from jaxmorph.control.route_record import (
    GOOD_STEPS,
    LEARNING_MESSAGES,
    SETTLED_RUN,
    RouteRecord,
    RouteState,
    Usual,
    after_in_time,
    typical_ms,
)
from jaxmorph.control.verdicts import Evidence, Verdict

_CALMING = 0.8  # the factor of a slow link's unrest per step

Assume = Callable[[bool, Usual | None], Usual | None]
"""Gives the usual times of a route that was not measured on this link; None: unknown.

Its arguments: whether the route is direct, and the usual times of the other route, if known.
"""


@dataclass(frozen=True)
class DirectionState:
    """The state of one direction of a link.

    Attributes:
        verdict: Its latency and jitter are the latest.
        direct: The record of direct messages; None: none was seen.
        delegated: The record of delegated messages.
        is_direct: Whether messages take the direct route now; None: none was seen.
        level_ms: The time of messages when the direction was last judged.
        unrest: How often a slow link's delay has changed recently.
        good_steps: The steps in a row in which a recovering link's messages were in time.
    """

    verdict: Verdict
    direct: RouteState | None = None
    delegated: RouteState | None = None
    is_direct: bool | None = None
    level_ms: float = 0.0
    unrest: float = 0.0
    good_steps: int = 0

    def usual(self, is_direct: bool) -> Usual | None:
        """The times of healthy messages on a route; None if it was not measured."""
        route = self.direct if is_direct else self.delegated
        return None if route is None else route.usual

    def route_of_healthy(self, is_direct: bool) -> RouteState | None:
        """The current route of a healthy link, if it is this one."""
        if self.verdict.health is not LinkHealth.HEALTHY or self.is_direct is not is_direct:
            return None
        return self.direct if is_direct else self.delegated

    def after_in_time(self, route: RouteState) -> "DirectionState":
        """The state after messages in time on the current route of a healthy link."""
        usual = route.usual or Usual.of(0.0)
        verdict = self.verdict.with_latency(usual.baseline_ms, usual.spread_ms)
        routes = (route, self.delegated) if self.is_direct else (self.direct, route)
        unrest = _CALMING * self.unrest
        kept = self.is_direct, self.level_ms
        return DirectionState(verdict, *routes, *kept, unrest, self.good_steps)


def after_messages_in_time(
    directions: Mapping[Direction, DirectionState], samples: StepSamples
) -> dict[Direction, DirectionState]:
    """The next states of directions whose links are healthy and had no late message in a step.

    Most links are so in most steps. At 64 stages a step has more messages than can be read one by
    one during training. The result is the same as that of `DirectionWatch.observe`.
    """
    read: dict[Direction, tuple[RouteState, np.ndarray]] = {}
    for direction, each in samples.items():
        if state := directions.get(direction):
            route = state.route_of_healthy(each.is_direct)
            if route is not None and route.are_in_time(len(each), each.longest_ms):
                read[direction] = route, each.durations_ms
    return {
        direction: directions[direction].after_in_time(route)
        for direction, route in zip(read, after_in_time([*read.values()]), strict=True)
    }


class DirectionWatch:
    """Judges one direction by a step's messages: the working copy of its state.

    Each route has its own history. All messages of a step take one, the current route. No message
    ends a dead state: see `TRANSITIONS`.

    Attributes:
        verdict: Its latency and jitter are the latest.
        first_measured: The route that has just got its first baseline: whether it is the direct
            one; None: neither.
    """

    def __init__(self, state: DirectionState, assume: Assume) -> None:
        self._assume = assume
        self.verdict = state.verdict
        kept = ((True, state.direct), (False, state.delegated))
        self._routes = {is_direct: RouteRecord(of) for is_direct, of in kept if of is not None}
        self._current = state.is_direct
        self._level_ms, self._unrest = state.level_ms, state.unrest
        self._good_steps = state.good_steps
        self.first_measured: bool | None = None

    def state(self) -> DirectionState:
        """The state to keep."""
        routes = {is_direct: record.state() for is_direct, record in self._routes.items()}
        return DirectionState(
            self.verdict,
            routes.get(True),
            routes.get(False),
            self._current,
            self._level_ms,
            self._unrest,
            self._good_steps,
        )

    def observe(self, step: int, samples: DirectionSamples) -> list[Verdict]:
        """Judge a step's messages.

        Returns:
            The verdicts that it led to, in order; the last one with the latest latency and jitter.
        """
        self._take_route(is_direct=samples.is_direct)
        self._unrest *= _CALMING
        health_before = self.verdict.health
        changes: list[Verdict] = []
        for sample in samples:
            may_move = not changes  # one change of delay a step is enough
            changes += self._read(step, sample, samples.is_direct, may_move=may_move)
        if health_before is self.verdict.health is LinkHealth.RECOVERING:
            changes += self._count_good_step(step, samples)
        for is_direct, record in self._routes.items():
            # The baseline follows the messages of a healthy link only.
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
        samples: DirectionSamples,
        expected: Mapping[bool, Usual],
        known: Verdict | None = None,
    ) -> None:
        """Mark the direction slow before the first step.

        Args:
            samples: Its last messages.
            expected: The usual times until healthy messages have been seen, by whether the route is
                direct.
            known: Its verdict when the run last stopped. It outweighs the few samples.
        """
        for is_direct, usual in expected.items():
            self._record(is_direct).usual = usual
        self._take_route(is_direct=samples.is_direct)
        if known is None:
            self._transition(step, Trigger.ROSE, self._current, samples.durations_ms.tolist())
            return
        baseline_ms = known.evidence.baseline_ms
        detail = f"{known.latency_ms:.1f} ms (healthy: {baseline_ms:.1f})"
        if self._transition(step, Trigger.KNOWN, self._current, (), detail):
            last = {"latency_ms": known.latency_ms, "jitter_ms": known.jitter_ms}
            self.verdict = replace(self.verdict, **last, evidence=known.evidence)
            self._level_ms = known.latency_ms

    def expect(self, is_direct: bool, usual: Usual) -> None:
        """Give a route its usual times, unless it has learned them."""
        record = self._record(is_direct)
        record.usual = record.usual or usual

    def compare(self, step: int, is_direct: bool, expected: Usual | None) -> list[Verdict]:
        """Compare a route's first baseline with those of other directions.

        A link that is slow from its first message on has no healthy history to compare with.

        Args:
            expected: The usual times by the other directions; None: too few are known.
        """
        if expected is None or self.verdict.health is not LinkHealth.HEALTHY:
            return []
        record = self._record(is_direct)
        if record.usual is None or record.usual.baseline_ms <= expected.threshold_ms:
            return []
        took_ms = record.recent.last(LEARNING_MESSAGES)
        record.unlearn()
        return self._transition(step, Trigger.ROSE, is_direct, took_ms, usual=expected)

    def turned_slow(self, step: int, late_ms: Sequence[float], *, is_direct: bool) -> list[Verdict]:
        """Mark the direction slow by late messages of an unfinished step."""
        if self.verdict.health is LinkHealth.SLOW:
            return []
        self._take_route(is_direct=is_direct)
        return self._transition(step, Trigger.ROSE, is_direct, late_ms)

    def path_failed(self, step: int, detail: str) -> None:
        """Mark the direct path failed; no verdict changes if it had failed already."""
        self._transition(step, Trigger.FAILED, self._current, (), detail)

    def path_returned(self, step: int, detail: str) -> list[Verdict]:
        """Mark the direct path of a dead link as returned."""
        if not self.verdict.is_dead:
            return []
        changes = self._transition(step, Trigger.RETURNED, None, (), detail)
        if not self._routes:  # no watched message could show that it has recovered
            changes += self._transition(step, Trigger.RETURNED, None, (), detail)
        return changes

    def _take_route(self, *, is_direct: bool) -> None:
        if is_direct is self._current:
            return
        before = None if self._current is None else self._usual(self._current)
        self._current = is_direct
        self._record(is_direct).reset()
        now = self._expected(is_direct)
        if before is not None and now is not None:  # the same delay on top of another usual time
            self._level_ms += now.baseline_ms - before.baseline_ms

    def _record(self, is_direct: bool) -> RouteRecord:
        if is_direct not in self._routes:
            self._routes[is_direct] = RouteRecord(RouteState())
        return self._routes[is_direct]

    def _usual(self, is_direct: bool) -> Usual | None:
        record = self._routes.get(is_direct)
        return None if record is None else record.usual

    def _expected(self, is_direct: bool) -> Usual | None:
        """The usual times to judge a route's messages by.

        A healthy link's usual times are measured. A degraded link's can't be measured: they are
        assumed, unless they were given (`expect`).
        """
        known = self._usual(is_direct)
        if known is None and self.verdict.health is not LinkHealth.HEALTHY:
            return self._assume(is_direct, self._usual(not is_direct))
        return known

    def _read(
        self, step: int, sample: LinkSample, is_direct: bool, *, may_move: bool
    ) -> list[Verdict]:
        record, usual = self._record(is_direct), self._expected(is_direct)
        is_healthy = self.verdict.health is LinkHealth.HEALTHY
        if usual is None or not is_healthy:
            record.recent.add(sample.duration_ms)
        if usual is None:
            if not self.verdict.is_slow:  # a slow link's messages make no baseline
                record.healthy.learn([sample.duration_ms])
            return []
        record.read(sample, usual, learns=is_healthy)
        if is_healthy and not record.late:
            return []
        is_slow_or_dead = self.verdict.health is LinkHealth.SLOW
        if not is_slow_or_dead and (late_ms := record.late_beyond_chance()):
            return self._transition(step, Trigger.ROSE, is_direct, late_ms)
        if self.verdict.is_slow and len(record.calm) >= SETTLED_RUN:
            return self._transition(step, Trigger.FELL, is_direct, record.calm)
        if is_slow_or_dead and may_move:
            return self._read_level(step, sample.duration_ms, record, usual)
        return []

    def _read_level(
        self, step: int, duration_ms: float, record: RouteRecord, usual: Usual
    ) -> list[Verdict]:
        """Check whether the messages of a slow or dead link take clearly more or less time."""
        is_dead = self.verdict.is_dead
        # A message in time is not another delay; one between in time and late is.
        if not is_dead and duration_ms <= usual.calm_ms:
            record.moved.clear()
            return []
        record.read_level(duration_ms, self._level_ms, self._unrest)
        if len(record.moved) < SETTLED_RUN:
            return []
        self._unrest += 1.0
        trigger = Trigger.SHIFTED if is_dead else Trigger.MOVED
        return self._transition(step, trigger, self._current, record.moved)

    def _count_good_step(self, step: int, samples: DirectionSamples) -> list[Verdict]:
        usual = self._expected(samples.is_direct)
        if usual is None:
            return []
        if samples.median_ms <= usual.calm_ms:
            self._good_steps += 1
        elif samples.median_ms > usual.threshold_ms:
            self._good_steps = 0
        if self._good_steps < GOOD_STEPS:
            return []
        took_ms = samples.durations_ms.tolist()
        return self._transition(step, Trigger.LASTED, samples.is_direct, took_ms)

    def _transition(
        self,
        step: int,
        trigger: Trigger,
        is_direct: bool | None,
        run_ms: Iterable[float],
        detail: str = "",
        usual: Usual | None = None,
    ) -> list[Verdict]:
        """Change the state as `TRANSITIONS` says.

        Args:
            is_direct: The route that led to it; None: neither.
            run_ms: The times of the messages that led to it.
            detail: For the reason.
            usual: The usual times for the evidence; None: those of the route.
        """
        before, run_ms = self.verdict, tuple(run_ms)
        after = TRANSITIONS[before.health, before.path].get(trigger)
        if after is None:
            return []
        if usual is None and is_direct is not None:
            usual = self._expected(is_direct)
        health, path = after
        self.verdict = replace(
            before,
            health=health,
            path=path,
            step=step,
            evidence=_evidence(run_ms, usual),
            reason=self._sentence(trigger, run_ms, usual, detail),
        )
        self._good_steps = 0
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
        reason = SENTENCES[trigger].format(
            took=typical_ms(run_ms) if run_ms else "",
            count=len(run_ms),
            threshold=usual.threshold_ms if usual else 0.0,
            before=before.latency_ms,
            steps=GOOD_STEPS,
            detail=detail,
        )
        return f"link {before.source}>{before.destination} {reason}"

    def _with_latency(self, verdict: Verdict) -> Verdict:
        """The verdict with the latest latency and jitter, those of the current route."""
        if self._current is None:
            return verdict
        usual = self._usual(self._current)
        if verdict.health is LinkHealth.HEALTHY and usual is not None:
            return verdict.with_latency(usual.baseline_ms, usual.spread_ms)
        recent = self._record(self._current).recent
        if not len(recent):
            return verdict
        return verdict.with_latency(recent.median, recent.spread)


def _evidence(run_ms: tuple[float, ...], usual: Usual | None) -> Evidence:
    if usual is None:
        return Evidence(run_ms, 0.0, 0.0, 0.0)
    return Evidence(run_ms, usual.baseline_ms, usual.spread_ms, usual.threshold_ms)
