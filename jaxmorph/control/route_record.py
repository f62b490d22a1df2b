"""What the messages of one route of one direction have taken lately, and what they say.

By which numbers detection goes (`Sensitivity`), what is usual of a healthy link (`Usual`,
`HealthyMessages`), and the runs that messages make (`RouteRecord`).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxmorph.control.measurements import LinkSample, RunningEstimate, median

_FOLLOWS = 1 / 3  # how often one late message follows another on a busy machine, at least
_PRIOR = 8.0  # how many late messages' worth of belief in that
_TOGETHER = 0.25  # of the time between their sendings: what lands within it lands together

_new_run = partial(deque[float], maxlen=16)  # longer than any run that is asked for


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


@dataclass(frozen=True)
class Sensitivity:
    """What detection takes for chance, and what for a change.

    A message is late when it takes longer than the baseline plus the largest of `spreads`
    deviations, `floor_ms` and `share` of the baseline. One late message says nothing: timings have
    heavy tails, and on a busy machine one in ten may be late. So a link is slow only when so many
    in a row are late, and by so much, that a healthy one would have that less than once in
    1 / `chance` messages (`HealthyMessages.run_chance`). Where none of the last 256 messages took
    longer than 6 ms, that is eight in a row of 10 ms, five of 30 and four of 80. A run of eight
    stages and 24 microbatches sends 168,000 messages in 500 steps: at 1e-7 each, one such run in
    60 has one false alarm.

    Attributes:
        floor_ms: Milliseconds that are late whatever the spread; half an op of 10 ms, less than any
            plan has to adapt to.
        chance: Probability, per message, of a false alarm that is accepted.
        least_run: The fewest late messages in a row.
        most_run: The most, for however unsteady a link.
        settled_run: How many messages in a row end a delay, or show that it is another one.
        calm_share: How much of what may be added to the baseline a message may take to count as in
            time again; the rest is hysteresis.
        good_steps: How many steps a link must behave before it counts as healthy again.
        learning_messages: How many messages make the first baseline.
        window_messages: How many of the last healthy messages make the baseline.
        recent_messages: How many of the last messages say what a slow link takes now.
        moved_share: By what share of its latency a slow link must change for a new verdict.
        other_route_ms: What another route may take more, as long as nothing is known of it.
    """

    spreads: float = 4.0
    floor_ms: float = 5.0
    share: float = 0.5
    chance: float = 1e-7
    least_run: int = 3
    most_run: int = 16
    settled_run: int = 5
    calm_share: float = 0.6
    good_steps: int = 3
    learning_messages: int = 24
    window_messages: int = 256
    recent_messages: int = 32
    moved_share: float = 0.25
    other_route_ms: float = 2.0

    def excess_ms(self, baseline_ms: float, spread_ms: float) -> float:
        """What a message may take beyond the baseline, and not be late."""
        return max(self.spreads * spread_ms, self.floor_ms, self.share * baseline_ms)

    def usual(self, baseline_ms: float, spread_ms: float = 0.0) -> Usual:
        """What to expect of messages, given what healthy ones have taken, and how that varied."""
        excess_ms = self.excess_ms(baseline_ms, spread_ms)
        calm_ms = baseline_ms + self.calm_share * excess_ms
        return Usual(baseline_ms, spread_ms, baseline_ms + excess_ms, calm_ms)


class HealthyMessages:
    """The last messages of one route of one direction that were not those of a slow link."""

    def __init__(self, sensitivity: Sensitivity) -> None:
        self._numbers = sensitivity
        self._durations = RunningEstimate(sensitivity.window_messages)
        self._pairs = RunningEstimate(sensitivity.window_messages)  # the shorter of two neighbours
        self._before_ms = math.inf
        self._most_ms = self._most_spread_ms = math.inf

    def learn(self, durations_ms: Iterable[float]) -> None:
        """Take in some messages, in their order."""
        for duration_ms in durations_ms:
            self._durations.add(duration_ms)
            self._pairs.add(min(duration_ms, self._before_ms))
            self._before_ms = duration_ms

    @property
    def are_enough(self) -> bool:
        """Whether enough have been seen to say what healthy messages take."""
        return len(self._durations) >= self._numbers.learning_messages

    def usual(self) -> Usual | None:
        """What is to be expected of messages now; None as long as too few have been seen.

        It follows slowly, and not without end: a delay that grows a little with every step must
        not drag its own measure along. Neither may the spread, which such a growth widens: it is
        bounded by twice what the first threshold left room for.
        """
        seen, numbers = len(self._durations), self._numbers
        if not self.are_enough:
            return None
        baseline_ms = min(self._durations.median, self._most_ms)
        spread_ms = min(self._durations.spread, self._most_spread_ms)
        expected = numbers.usual(baseline_ms, spread_ms)
        if math.isinf(self._most_ms) and seen >= numbers.window_messages // 4:
            self._most_ms = expected.threshold_ms
            excess_ms = numbers.excess_ms(baseline_ms, spread_ms)
            self._most_spread_ms = 2 * excess_ms / numbers.spreads
        return expected

    def run_chance(self, least_ms: float, count: int, threshold_ms: float) -> float:
        """How likely a healthy link has so many messages in a row of some duration or more.

        Late messages come in bursts, for what delays one often delays the next. So the first counts
        with the share of messages that took so long, by Laplace's rule, and each of the
        others with the share of those that followed one such. That share is at least a third at
        the threshold, and in proportion less beyond, however seldom it has been seen: it stands to
        the power of the run's length, so that what a calm hour shows of it, by a handful of late
        messages, would make of a busy moment's run what never happens by chance.

        Args:
            threshold_ms: From where on messages are late.
        """
        late, both = (seen.count_from(least_ms) for seen in (self._durations, self._pairs))
        share = (late + 1) / (len(self._durations) + 2)
        expected = max(share, _FOLLOWS * threshold_ms / least_ms)
        again = max(expected, (both + _PRIOR * expected) / (late + _PRIOR))
        return share * min(again, 1.0) ** (count - 1)

    def unlikely_end(self, run_ms: Sequence[float], threshold_ms: float) -> tuple[float, ...]:
        """The shortest end of a run of late messages that is no chance; () where all may be.

        Args:
            run_ms: What they took, oldest first.
            threshold_ms: From where on messages are late.
        """
        numbers, least_ms = self._numbers, math.inf
        for count, duration_ms in enumerate(reversed(run_ms), start=1):
            least_ms = min(least_ms, duration_ms)
            if count < numbers.least_run:
                continue
            chance = self.run_chance(least_ms, count, threshold_ms)
            if count == numbers.most_run or chance < numbers.chance:
                return tuple(run_ms)[-count:]
        return ()


@dataclass
class RouteRecord:
    """The runs that the messages of a route make: in a row late, in time, or at another level.

    Attributes:
        usual: What a healthy message takes; None as long as too few have been seen and nobody has
            said.
        late: What the late messages in a row have taken, up to the last message.
        calm: The same of messages in time.
        moved: The same of late messages that are clearly away from a slow link's level.
        recent: What the last messages have taken since the link was last judged.
        healthy: The messages that were not a slow link's.
    """

    sensitivity: Sensitivity
    usual: Usual | None = None
    late: deque[float] = field(default_factory=_new_run)
    calm: deque[float] = field(default_factory=_new_run)
    moved: deque[float] = field(default_factory=_new_run)
    recent: RunningEstimate = field(init=False)
    healthy: HealthyMessages = field(init=False)
    _last: LinkSample | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.recent = RunningEstimate(self.sensitivity.recent_messages)
        self.healthy = HealthyMessages(self.sensitivity)

    def begin_step(self) -> None:
        """What comes next is of another step, whose times begin at 0 again."""
        self._last = None

    def read(self, sample: LinkSample, usual: Usual, *, learns: bool) -> None:
        """Let a message lengthen the runs that it fits, and end the others.

        Late messages that land together have been held up by one thing, such as a process that
        stood still or a lost packet: the first of them counts alone.

        Args:
            usual: What it is judged by.
            learns: Whether the link is healthy, so that this is what healthy messages are like;
                late ones are too, once it is clear that they were chance.
        """
        duration_ms = sample.duration_ms
        if duration_ms > usual.threshold_ms:
            self.calm.clear()
            if not (self.late and _landed_together(self._last, sample)):
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
        numbers = self.sensitivity
        steady_ms = max(numbers.floor_ms, numbers.moved_share * level_ms, 2 * self.recent.spread)
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
        numbers = self.sensitivity
        if len(self.late) < numbers.least_run:
            return ()
        if self.usual is not None and self.healthy.are_enough:
            return self.healthy.unlikely_end(self.late, self.usual.threshold_ms)
        return tuple(self.late) if len(self.late) >= numbers.settled_run else ()

    def begin_again(self, recent_ms: Iterable[float] = ()) -> None:
        """Forget all runs; the last messages are those given."""
        for run in (self.late, self.calm, self.moved):
            run.clear()
        self.recent = RunningEstimate(self.sensitivity.recent_messages, recent_ms)

    def settle(self) -> bool:
        """Go by what has been learnt up to now; whether that is for the first time."""
        before, self.usual = self.usual, self.healthy.usual() or self.usual
        return before is None and self.usual is not None

    def unlearn(self) -> None:
        """Forget what has been learnt: it was a slow link's."""
        self.usual, self.healthy = None, HealthyMessages(self.sensitivity)


def _landed_together(before: LinkSample | None, sample: LinkSample) -> bool:
    if before is None:
        return False
    return sample.at_ms - before.at_ms < _TOGETHER * (sample.sent_ms - before.sent_ms)


def typical_ms(durations_ms: Sequence[float]) -> str:
    """Durations in a few words, such as `31.2 ms (28.9 to 34.0)`."""
    least_ms, most_ms = min(durations_ms), max(durations_ms)
    return f"{median(durations_ms):.1f} ms ({least_ms:.1f} to {most_ms:.1f})"
