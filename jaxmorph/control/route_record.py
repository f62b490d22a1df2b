"""What the messages of one route of one direction have taken lately, and what they say.

In order: the numbers that detection goes by, what a healthy message takes (`Usual`), what is kept
of a route from step to step (`RouteState`), and the working copy of it that reads a step's messages
(`RouteRecord`).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxmorph.control.measurements import LinkSample, RunningEstimate, median

# A message is late when it takes longer than the baseline plus the largest of SPREADS deviations,
# FLOOR_MS and SHARE of the baseline. One late message says nothing: timings have heavy tails, and
# on a busy machine one in ten may be late.
SPREADS = 4.0
FLOOR_MS = 5.0  # late whatever the spread: half an op of 10 ms, less than any plan has to adapt to
SHARE = 0.5
# So a link is slow only when so many in a row are late, and by so much, that a healthy one would
# have that less than once in 1 / CHANCE messages (`HealthyMessages.run_chance`). Where none of the
# last 256 took longer than 6 ms, that is eight in a row of 10 ms, five of 30 and four of 80. A run
# of eight stages and 24 microbatches sends 168,000 messages in 500 steps: one such run in 60 has
# one false alarm.
CHANCE = 1e-7
LEAST_RUN, MOST_RUN = 3, 16  # late messages in a row: the most are for however unsteady a link
SETTLED_RUN = 5  # so many in a row end a delay, or show that it is another one
CALM_SHARE = 0.6  # of what may be added to the baseline is in time again; the rest is hysteresis
GOOD_STEPS = 3  # of a link that counts as healthy again after them
LEARNING_MESSAGES = 24  # make the first baseline
WINDOW_MESSAGES = 256  # healthy ones, the last of which make the baseline
RECENT_MESSAGES = 32  # say what a slow link takes now
MOVED_SHARE = 0.25  # of its latency by which a slow link must change for a new verdict
OTHER_ROUTE_MS = 2.0  # what another route may take more, as long as nothing is known of it

_FOLLOWS = 1 / 3  # how often one late message follows another on a busy machine, at least
_PRIOR = 8.0  # how many late messages' worth of belief in that
_TOGETHER = 0.25  # of the time between their sendings: what ends within it ends together


@dataclass(frozen=True)
class Usual:
    """What the messages of one route of one direction take while the link is healthy.

    Attributes:
        threshold_ms: What is over it is late.
        calm_ms: What is not over it is in time again, after a delay.
    """

    baseline_ms: float
    spread_ms: float
    threshold_ms: float
    calm_ms: float

    @classmethod
    def of(cls, baseline_ms: float, spread_ms: float = 0.0) -> "Usual":
        """What to expect of messages, given what healthy ones have taken, and how that varied."""
        excess_ms = _excess_ms(baseline_ms, spread_ms)
        calm_ms = baseline_ms + CALM_SHARE * excess_ms
        return cls(baseline_ms, spread_ms, baseline_ms + excess_ms, calm_ms)


def _excess_ms(baseline_ms: float, spread_ms: float) -> float:
    """What a message may take beyond the baseline, and not be late."""
    return max(SPREADS * spread_ms, FLOOR_MS, SHARE * baseline_ms)


@dataclass(frozen=True)
class RouteState:
    """What is kept of a route of a direction from step to step.

    Attributes:
        usual: What a healthy message takes; None as long as too few have been seen and nothing else
            says it.
        late_ms: What the late messages in a row have taken, up to the last message.
        calm_ms: The same of messages in time.
        moved_ms: The same of late messages that are clearly away from a slow link's level.
        recent_ms: What the last messages have taken since the link was last judged.
        healthy_ms: What the last messages took that were not a slow link's; one more than make the
            baseline, as each counts together with the one before it.
        most_ms: The baseline does not follow beyond this.
        most_spread_ms: Nor the spread beyond this.
    """

    usual: Usual | None = None
    late_ms: tuple[float, ...] = ()
    calm_ms: tuple[float, ...] = ()
    moved_ms: tuple[float, ...] = ()
    recent_ms: tuple[float, ...] = ()
    healthy_ms: tuple[float, ...] = ()
    most_ms: float = math.inf
    most_spread_ms: float = math.inf


class HealthyMessages:
    """The last messages of one route of one direction that were not those of a slow link."""

    def __init__(
        self,
        last_ms: Iterable[float] = (),
        most_ms: float = math.inf,
        most_spread_ms: float = math.inf,
    ) -> None:
        self.last_ms = deque(last_ms, WINDOW_MESSAGES + 1)
        self.most_ms, self.most_spread_ms = most_ms, most_spread_ms
        self._durations: RunningEstimate | None = None  # until the next message is learnt
        self._shorter: RunningEstimate | None = None  # of two neighbours each

    def learn(self, durations_ms: Iterable[float]) -> None:
        """Take in some messages, in their order."""
        self.last_ms.extend(durations_ms)
        self._durations = self._shorter = None

    @property
    def are_enough(self) -> bool:
        """Whether enough have been seen to say what healthy messages take."""
        return len(self.last_ms) >= LEARNING_MESSAGES

    @property
    def durations(self) -> RunningEstimate:
        """What they took."""
        if self._durations is None:
            self._durations = RunningEstimate(WINDOW_MESSAGES, self.last_ms)
        return self._durations

    @property
    def shorter(self) -> RunningEstimate:
        """What the shorter one of each message and the one before it took."""
        if self._shorter is None:
            last_ms = [math.inf, *self.last_ms]
            neighbours_ms = map(min, last_ms, last_ms[1:])
            self._shorter = RunningEstimate(WINDOW_MESSAGES, neighbours_ms)
        return self._shorter

    def usual(self) -> Usual | None:
        """What is to be expected of messages now; None as long as too few have been seen.

        It follows slowly, and not without end: a delay that grows a little with every step must
        not drag its own measure along. Neither may the spread, which such a growth widens: it is
        bounded by twice what the first threshold left room for.
        """
        if not self.are_enough:
            return None
        baseline_ms = min(self.durations.median, self.most_ms)
        spread_ms = min(self.durations.spread, self.most_spread_ms)
        expected = Usual.of(baseline_ms, spread_ms)
        if math.isinf(self.most_ms) and len(self.last_ms) >= WINDOW_MESSAGES // 4:
            self.most_ms = expected.threshold_ms
            self.most_spread_ms = 2 * _excess_ms(baseline_ms, spread_ms) / SPREADS
        return expected

    def run_chance(self, least_ms: float, count: int, threshold_ms: float) -> float:
        """How likely a healthy link has so many messages in a row of some duration or more.

        Late messages come in bursts, for what delays one often delays the next. So the first counts
        with the share of messages that took so long, by Laplace's rule, and each of the others with
        the share of those that followed one such. That share is at least a third at the threshold,
        and in proportion less beyond, however seldom it has been seen: it stands to the power of
        the run's length, and a calm hour has only a handful of late messages to show it by.

        Args:
            threshold_ms: From where on messages are late.
        """
        late, both = (seen.count_from(least_ms) for seen in (self.durations, self.shorter))
        share = (late + 1) / (len(self.durations) + 2)
        expected = max(share, _FOLLOWS * threshold_ms / least_ms)
        again = max(expected, (both + _PRIOR * expected) / (late + _PRIOR))
        return share * min(again, 1.0) ** (count - 1)

    def unlikely_end(self, run_ms: Sequence[float], threshold_ms: float) -> tuple[float, ...]:
        """The shortest end of a run of late messages that is no chance; () where all may be.

        Args:
            run_ms: What they took, oldest first.
            threshold_ms: From where on messages are late.
        """
        least_ms = math.inf
        for count, duration_ms in enumerate(reversed(run_ms), start=1):
            least_ms = min(least_ms, duration_ms)
            if count < LEAST_RUN:
                continue
            if count == MOST_RUN or self.run_chance(least_ms, count, threshold_ms) < CHANCE:
                return tuple(run_ms)[-count:]
        return ()


class RouteRecord:
    """A route's state while a step's messages are read: the runs that they make.

    `late`, `calm`, `moved`, `recent` and `healthy` are those of `RouteState`.
    """

    def __init__(self, state: RouteState) -> None:
        self.usual = state.usual
        self.late = deque(state.late_ms, MOST_RUN)
        self.calm = deque(state.calm_ms, MOST_RUN)
        self.moved = deque(state.moved_ms, MOST_RUN)
        self.recent = RunningEstimate(RECENT_MESSAGES, state.recent_ms)
        self.healthy = HealthyMessages(state.healthy_ms, state.most_ms, state.most_spread_ms)
        self._last: LinkSample | None = None  # of this step

    def state(self) -> RouteState:
        """What is kept of it."""
        return RouteState(
            self.usual,
            tuple(self.late),
            tuple(self.calm),
            tuple(self.moved),
            self.recent.last(RECENT_MESSAGES),
            tuple(self.healthy.last_ms),
            self.healthy.most_ms,
            self.healthy.most_spread_ms,
        )

    def read(self, sample: LinkSample, usual: Usual, *, learns: bool) -> None:
        """Let a message lengthen the runs that it fits, and end the others.

        Late messages that end together have been held up by one thing, such as a process that
        stood still or a lost packet: the first of them counts alone.

        Args:
            usual: What it is judged by.
            learns: Whether the link is healthy, so that this is what healthy messages are like;
                late ones are too, once it is clear that they were chance.
        """
        duration_ms = sample.duration_ms
        if duration_ms > usual.threshold_ms:
            self.calm.clear()
            if not (self.late and _ended_together(self._last, sample)):
                self.late.append(duration_ms)
        else:
            if learns:
                self.healthy.learn([*self.late, duration_ms])
            self.late.clear()
            if duration_ms <= usual.calm_ms:
                self.calm.append(duration_ms)
            else:
                self.calm.clear()
        self._last = sample

    def read_level(self, duration_ms: float, level_ms: float, unrest: float) -> None:
        """Let a slow link's message lengthen the run of those at another level, or end it.

        Args:
            level_ms: What messages took when the link was last judged.
            unrest: How often that has changed lately: the more, the farther away another level is.
        """
        steady_ms = max(FLOOR_MS, MOVED_SHARE * level_ms, 2 * self.recent.spread)
        is_away = abs(duration_ms - level_ms) > steady_ms * (1 + 2 * unrest)
        other_side = self.moved and (duration_ms > level_ms) != (self.moved[-1] > level_ms)
        if not is_away or other_side:
            self.moved.clear()
        if is_away:
            self.moved.append(duration_ms)

    def late_beyond_chance(self) -> tuple[float, ...]:
        """The late messages in a row that no healthy link would have; nothing where it might.

        A baseline can be known before healthy messages have been seen: then nothing says how often
        those are late, and a run that ends a delay also begins one.
        """
        if len(self.late) < LEAST_RUN:
            return ()
        if self.usual is not None and self.healthy.are_enough:
            return self.healthy.unlikely_end(self.late, self.usual.threshold_ms)
        return tuple(self.late) if len(self.late) >= SETTLED_RUN else ()

    def reset(self, recent_ms: Iterable[float] = ()) -> None:
        """Forget all runs; the last messages are those given."""
        for run in (self.late, self.calm, self.moved):
            run.clear()
        self.recent = RunningEstimate(RECENT_MESSAGES, recent_ms)

    def settle(self) -> bool:
        """Go by what has been learnt up to now; whether that is for the first time."""
        before, self.usual = self.usual, self.healthy.usual() or self.usual
        return before is None and self.usual is not None

    def unlearn(self) -> None:
        """Forget what has been learnt: it was a slow link's."""
        self.usual, self.healthy = None, HealthyMessages()


def _ended_together(before: LinkSample | None, sample: LinkSample) -> bool:
    if before is None:
        return False
    return sample.at_ms - before.at_ms < _TOGETHER * (sample.sent_ms - before.sent_ms)


def typical_ms(durations_ms: Sequence[float]) -> str:
    """Durations in a few words, such as `31.2 ms (28.9 to 34.0)`."""
    least_ms, most_ms = min(durations_ms), max(durations_ms)
    return f"{median(durations_ms):.1f} ms ({least_ms:.1f} to {most_ms:.1f})"
