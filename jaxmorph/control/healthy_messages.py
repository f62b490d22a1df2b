"""What a healthy link's messages take, and how likely it makes a run of late ones."""

import math
from collections.abc import Iterable, Sequence

from jaxmorph.control.estimates import RunningEstimate
from jaxmorph.control.sensitivity import Sensitivity, Usual, usual

_TOGETHER = 1 / 3
"""How often one late message follows another on a busy machine, at least."""
_PRIOR = 8.0  # how many late messages' worth of belief in that


class HealthyMessages:
    """The last messages of one route of one direction that were not those of a slow link.

    Args:
        sensitivity: The numbers to go by.
    """

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
        expected = usual(baseline_ms, spread_ms, numbers)
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
        expected = max(share, _TOGETHER * threshold_ms / least_ms)
        again = max(expected, (both + _PRIOR * expected) / (late + _PRIOR))
        return share * min(again, 1.0) ** (count - 1)

    def unlikely_end(self, run_ms: Sequence[float], threshold_ms: float) -> tuple[float, ...]:
        """The shortest end of a run of late messages that is no chance.

        Args:
            run_ms: What they took, oldest first.
            threshold_ms: From where on messages are late.

        Returns:
            The last of them; nothing where all may be chance.
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
