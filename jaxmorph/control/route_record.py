"""The history of messages on one route of one direction, and the thresholds that it gives.

In order: the numbers of detection, the times of healthy messages (`Usual`), the state of a route
(`RouteState`), and its working copy that reads a step's messages (`RouteRecord`).
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from jaxmorph.control.measurements import LinkSample, RunningEstimate, middles_and_spreads

# A message is late when it exceeds the baseline by more than the largest of SPREADS deviations,
# FLOOR_MS and SHARE of the baseline. One late message proves nothing: timings have heavy tails, and
# on a busy machine one in ten may be late.
SPREADS = 4.0
FLOOR_MS = 5.0  # half an op of 10 ms: no plan needs to adapt to less
SHARE = 0.5
# So a link is slow only after several late messages in a row: a healthy link has a row so long and
# so late in less than one of 1 / CHANCE messages (`HealthyMessages.run_chance`). If none of the
# last 256 took longer than 6 ms, that is eight in a row of 10 ms, five of 30 or four of 80. A run
# of eight stages and 24 microbatches sends 168,000 messages in 500 steps: one such run in 60 has
# one false alarm.
CHANCE = 1e-7
LEAST_RUN, MOST_RUN = 3, 16  # late messages in a row; the maximum is for a very unsteady link
SETTLED_RUN = 5  # messages in a row that end a delay, or show another one
CALM_SHARE = 0.6  # of the excess that is not late: messages within are in time again (hysteresis)
GOOD_STEPS = 3  # until a recovering link is healthy
LEARNING_MESSAGES = 24  # for the first baseline
WINDOW_MESSAGES = 256  # healthy ones, for the baseline
RECENT_MESSAGES = 32  # for the current latency of a slow link
MOVED_SHARE = 0.25  # the change of a slow link's latency that makes a new verdict
OTHER_ROUTE_MS = 2.0  # the assumed difference of an unmeasured route

_FOLLOWS = 1 / 3  # how often a late message follows another on a busy machine, at least
_PRIOR = 8.0  # the weight of that, in late messages
_FLOAT_BYTES = 8
_KEPT_BYTES = (WINDOW_MESSAGES + 1) * _FLOAT_BYTES
_TOGETHER = 0.25  # of the time between two sends: messages that end within it end together


@dataclass(frozen=True)
class Usual:
    """The times of messages on one route of one direction while the link is healthy.

    Attributes:
        threshold_ms: A longer message is late.
        calm_ms: After a delay, a message that takes no longer is in time again.
    """

    baseline_ms: float
    spread_ms: float
    threshold_ms: float
    calm_ms: float

    @classmethod
    def of(cls, baseline_ms: float, spread_ms: float = 0.0) -> "Usual":
        """The thresholds for a baseline and its spread."""
        excess_ms = _excess_ms(baseline_ms, spread_ms)
        calm_ms = baseline_ms + CALM_SHARE * excess_ms
        return cls(baseline_ms, spread_ms, baseline_ms + excess_ms, calm_ms)


def _excess_ms(baseline_ms: float, spread_ms: float) -> float:
    """The time above the baseline that is not late."""
    return max(SPREADS * spread_ms, FLOOR_MS, SHARE * baseline_ms)


@dataclass(frozen=True)
class RouteState:
    """The state of one route of a direction.

    Attributes:
        usual: None until enough messages have been seen, or the usual times were given.
        late_ms: The times of the latest run of late messages.
        calm_ms: Of the latest run of messages in time.
        moved_ms: Of the latest run of late messages that differ clearly from a slow link's level.
        recent_ms: Of the last messages since the link was last judged.
        healthy_ms: Of the last messages before the link turned slow, float64: one more than the
            baseline needs, because each message is paired with the one before it.
        most_ms: The upper limit of the baseline.
        most_spread_ms: The upper limit of the spread.
    """

    usual: Usual | None = None
    late_ms: tuple[float, ...] = ()
    calm_ms: tuple[float, ...] = ()
    moved_ms: tuple[float, ...] = ()
    recent_ms: tuple[float, ...] = ()
    healthy_ms: bytes = b""
    most_ms: float = math.inf
    most_spread_ms: float = math.inf

    def are_in_time(self, num_messages: int, longest_ms: float) -> bool:
        """Whether a step's messages are in time and, with earlier healthy ones, fill a window."""
        known = len(self.healthy_ms) // _FLOAT_BYTES + len(self.late_ms)
        in_time = self.usual is not None and longest_ms <= self.usual.threshold_ms
        return in_time and known + num_messages >= WINDOW_MESSAGES


class HealthyMessages:
    """The last messages of one route of one direction while its link was not slow."""

    def __init__(
        self,
        last_ms: Iterable[float] = (),
        most_ms: float = math.inf,
        most_spread_ms: float = math.inf,
    ) -> None:
        self.last_ms = deque(last_ms, WINDOW_MESSAGES + 1)
        self.most_ms, self.most_spread_ms = most_ms, most_spread_ms
        self._durations: RunningEstimate | None = None  # a cache, until the next message
        self._shorter: RunningEstimate | None = None

    def learn(self, durations_ms: Iterable[float]) -> None:
        """Add messages, in their order."""
        self.last_ms.extend(durations_ms)
        self._durations = self._shorter = None

    @property
    def are_enough(self) -> bool:
        """Whether there are enough for a baseline."""
        return len(self.last_ms) >= LEARNING_MESSAGES

    @property
    def durations(self) -> RunningEstimate:
        """The times of messages."""
        if self._durations is None:
            self._durations = RunningEstimate(WINDOW_MESSAGES, self.last_ms)
        return self._durations

    @property
    def shorter(self) -> RunningEstimate:
        """The shorter time of each message and the one before it, to count late pairs."""
        if self._shorter is None:
            last_ms = [math.inf, *self.last_ms]
            neighbours_ms = map(min, last_ms, last_ms[1:])
            self._shorter = RunningEstimate(WINDOW_MESSAGES, neighbours_ms)
        return self._shorter

    def usual(self) -> Usual | None:
        """The usual times by these messages; None while there are too few.

        The baseline follows the link slowly and up to the first threshold only, else a delay that
        grows a little with every step would raise its own threshold. Such a delay also widens the
        spread, which may not exceed twice what the first threshold left room for.
        """
        if not self.are_enough:
            return None
        most = self.most_ms, self.most_spread_ms
        expected, most = _bounded(self.durations.median, self.durations.spread, most)
        if len(self.last_ms) >= WINDOW_MESSAGES // 4:
            self.most_ms, self.most_spread_ms = most
        return expected

    def run_chance(self, least_ms: float, count: int, threshold_ms: float) -> float:
        """The probability that a healthy link has `count` messages in a row of `least_ms` or more.

        Late messages come in bursts, because what delays one often delays the next. So the first
        counts with the share of messages that took so long, by Laplace's rule. Each further one
        counts with the share of these messages that followed another. This second share is raised
        to the power of the run's length, but a calm window shows only a handful of late messages.
        So the share is at least a third at the threshold, and proportionally less beyond.
        """
        late, both = (seen.count_from(least_ms) for seen in (self.durations, self.shorter))
        share = (late + 1) / (len(self.durations) + 2)
        expected = max(share, _FOLLOWS * threshold_ms / least_ms)
        again = max(expected, (both + _PRIOR * expected) / (late + _PRIOR))
        return share * min(again, 1.0) ** (count - 1)

    def unlikely_end(self, run_ms: Sequence[float], threshold_ms: float) -> tuple[float, ...]:
        """The shortest end of a run of late messages that chance does not explain; () if none.

        Args:
            run_ms: Their times, oldest first.
        """
        least_ms = math.inf
        for count, duration_ms in enumerate(reversed(run_ms), start=1):
            least_ms = min(least_ms, duration_ms)
            if count < LEAST_RUN:
                continue
            if count == MOST_RUN or self.run_chance(least_ms, count, threshold_ms) < CHANCE:
                return tuple(run_ms)[-count:]
        return ()


def _bounded(
    median_ms: float, spread_ms: float, most: tuple[float, float]
) -> tuple[Usual, tuple[float, float]]:
    """See `HealthyMessages.usual`: the usual times, and the limits of baseline and spread."""
    baseline_ms, spread_ms = min(median_ms, most[0]), min(spread_ms, most[1])
    expected = Usual.of(baseline_ms, spread_ms)
    if math.isinf(most[0]):
        most = expected.threshold_ms, 2 * _excess_ms(baseline_ms, spread_ms) / SPREADS
    return expected, most


def after_in_time(routes: Sequence[tuple[RouteState, np.ndarray]]) -> Iterator[RouteState]:
    """The routes of healthy links after messages in time, as `RouteRecord.read` and `settle` do.

    Args:
        routes: Each with the times of its messages, which fill its window.
    """
    if not routes:
        return
    last_ms = [
        b"".join((state.healthy_ms, np.array(state.late_ms).tobytes(), durations_ms.tobytes()))
        for state, durations_ms in routes
    ]
    windows = b"".join(each[-WINDOW_MESSAGES * _FLOAT_BYTES :] for each in last_ms)
    medians, spreads = middles_and_spreads(np.frombuffer(windows).reshape(-1, WINDOW_MESSAGES))
    by_route = zip(routes, last_ms, medians.tolist(), spreads.tolist(), strict=True)
    for (state, durations_ms), healthy_ms, median_ms, spread_ms in by_route:
        usual, most = _bounded(median_ms, spread_ms, (state.most_ms, state.most_spread_ms))
        calm_ms = _calm_after(state, durations_ms[-MOST_RUN:].tolist())
        kept = state.moved_ms, state.recent_ms, healthy_ms[-_KEPT_BYTES:]
        yield RouteState(usual, (), calm_ms, *kept, *most)


def _calm_after(state: RouteState, last_ms: Sequence[float]) -> tuple[float, ...]:
    """The latest run of messages in time."""
    limit_ms = state.usual.calm_ms if state.usual else math.inf
    for count, duration_ms in enumerate(reversed(last_ms)):
        if duration_ms > limit_ms:
            return tuple(last_ms[len(last_ms) - count :])
    return (*state.calm_ms, *last_ms)[-MOST_RUN:]


class RouteRecord:
    """The working copy of a `RouteState`, which reads a step's messages."""

    def __init__(self, state: RouteState) -> None:
        self.usual = state.usual
        self.late = deque(state.late_ms, MOST_RUN)
        self.calm = deque(state.calm_ms, MOST_RUN)
        self.moved = deque(state.moved_ms, MOST_RUN)
        self.recent = RunningEstimate(RECENT_MESSAGES, state.recent_ms)
        healthy_ms = np.frombuffer(state.healthy_ms).tolist()
        self.healthy = HealthyMessages(healthy_ms, state.most_ms, state.most_spread_ms)
        self._last: LinkSample | None = None  # the message before, if this record has read one

    def state(self) -> RouteState:
        """The state to keep."""
        return RouteState(
            self.usual,
            tuple(self.late),
            tuple(self.calm),
            tuple(self.moved),
            self.recent.last(RECENT_MESSAGES),
            np.array(self.healthy.last_ms).tobytes(),
            self.healthy.most_ms,
            self.healthy.most_spread_ms,
        )

    def read(self, sample: LinkSample, usual: Usual, *, learns: bool) -> None:
        """Extend the runs that a message fits, and end the others.

        Args:
            usual: The times to judge it by.
            learns: Whether the link is healthy, so that its messages make the baseline.
        """
        duration_ms = sample.duration_ms
        if duration_ms > usual.threshold_ms:
            self.calm.clear()
            # Late messages that end together have one cause, such as a stalled process or a lost
            # packet, so only the first of them counts.
            if not (self.late and _ended_together(self._last, sample)):
                self.late.append(duration_ms)
        else:
            if learns:  # the late ones before it were chance, so they are healthy messages too
                self.healthy.learn([*self.late, duration_ms])
            self.late.clear()
            if duration_ms <= usual.calm_ms:
                self.calm.append(duration_ms)
            else:
                self.calm.clear()
        self._last = sample

    def read_level(self, duration_ms: float, level_ms: float, unrest: float) -> None:
        """Extend the run of a slow link's messages at another level, or end it.

        Args:
            level_ms: The time of messages when the link was last judged.
            unrest: How often that has changed recently. It widens the margin, so that a delay that
                never settles is reported less and less.
        """
        steady_ms = max(FLOOR_MS, MOVED_SHARE * level_ms, 2 * self.recent.spread)
        is_away = abs(duration_ms - level_ms) > steady_ms * (1 + 2 * unrest)
        other_side = self.moved and (duration_ms > level_ms) != (self.moved[-1] > level_ms)
        if not is_away or other_side:
            self.moved.clear()
        if is_away:
            self.moved.append(duration_ms)

    def late_beyond_chance(self) -> tuple[float, ...]:
        """The run of late messages, if chance does not explain it; else ()."""
        if len(self.late) < LEAST_RUN:
            return ()
        if self.usual is not None and self.healthy.are_enough:
            return self.healthy.unlikely_end(self.late, self.usual.threshold_ms)
        # The baseline was given, so it is unknown how often healthy messages are late.
        return tuple(self.late) if len(self.late) >= SETTLED_RUN else ()

    def reset(self, recent_ms: Iterable[float] = ()) -> None:
        """Clear all runs, and set the recent messages."""
        for run in (self.late, self.calm, self.moved):
            run.clear()
        self.recent = RunningEstimate(RECENT_MESSAGES, recent_ms)

    def settle(self) -> bool:
        """Update the usual times from the healthy messages; whether they are the first ones."""
        before, self.usual = self.usual, self.healthy.usual() or self.usual
        return before is None and self.usual is not None

    def unlearn(self) -> None:
        """Drop the baseline: the link was slow all the time."""
        self.usual, self.healthy = None, HealthyMessages()


def _ended_together(before: LinkSample | None, sample: LinkSample) -> bool:
    if before is None:
        return False
    return sample.at_ms - before.at_ms < _TOGETHER * (sample.sent_ms - before.sent_ms)


def typical_ms(durations_ms: Sequence[float]) -> str:
    """Durations as a text such as `31.2 ms (28.9 to 34.0)`."""
    least_ms, most_ms = min(durations_ms), max(durations_ms)
    return f"{median(durations_ms):.1f} ms ({least_ms:.1f} to {most_ms:.1f})"
