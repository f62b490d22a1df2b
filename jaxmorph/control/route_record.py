"""What the messages of one route of one direction have taken lately, and what they say."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxmorph.control.estimates import RunningEstimate, median
from jaxmorph.control.healthy_messages import HealthyMessages
from jaxmorph.control.link_samples import LinkSample
from jaxmorph.control.sensitivity import Sensitivity, Usual

_TOGETHER = 0.25
"""Two messages that land within a quarter of the time between their sendings land together."""

_new_run = partial(deque[float], maxlen=16)  # longer than any run that is asked for


@dataclass
class RouteRecord:
    """The runs that the messages of a route make: in a row late, in time, or at another level.

    Attributes:
        sensitivity: The numbers to go by.
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
            sample: The message, in the order of sending.
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

    def read_level(self, duration_ms: float, level_ms: float, margin_ms: float) -> None:
        """Let a slow link's message lengthen the run of those at another level, or end it.

        Args:
            level_ms: What messages took when the link was last judged.
            margin_ms: How far a message may be from that.
        """
        other_side = self.moved and (duration_ms > level_ms) != (self.moved[-1] > level_ms)
        if abs(duration_ms - level_ms) <= margin_ms or other_side:
            self.moved.clear()
        if abs(duration_ms - level_ms) > margin_ms:
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


def level_margin_ms(record: RouteRecord, level_ms: float, unrest: float) -> float:
    """How far messages may be from a slow link's level before it counts as another one.

    Args:
        level_ms: What they took when the link was last judged.
        unrest: How often that has changed lately; the margin grows with it.
    """
    numbers = record.sensitivity
    steady_ms = max(numbers.floor_ms, numbers.moved_share * level_ms, 2 * record.recent.spread)
    return steady_ms * (1 + 2 * unrest)


def typical_ms(durations_ms: Sequence[float]) -> str:
    """Durations in a few words, such as `31.2 ms (28.9 to 34.0)`."""
    least_ms, most_ms = min(durations_ms), max(durations_ms)
    return f"{median(durations_ms):.1f} ms ({least_ms:.1f} to {most_ms:.1f})"
