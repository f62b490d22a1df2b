"""How much, and how often, messages must be late before detection says so: the numbers and why."""

import math
from dataclasses import dataclass

from jaxmorph.control.estimates import RunningEstimate


@dataclass(frozen=True)
class Sensitivity:
    """What detection takes for chance, and what for a change.

    A message is late when it takes longer than the baseline plus the largest of `spreads`
    deviations, `floor_ms` and `share` of the baseline. One late message says nothing: timings have
    heavy tails. A link is slow when so many in a row are late that chance would do it less than
    once in 1 / `chance` messages. If p is the share of a healthy link's messages that have been
    late, r in a row are late with a probability of p to the power of r, so r is the least number
    from `least_run` to `most_run` for which that is below `chance`. With all of 256 messages in
    time p is taken as 1 / 258, and three are enough (6e-8); where one in 20 is late it takes six.
    A run of eight directions and 24 microbatches sends 168,000 messages in 500 steps: at 1e-7 each
    it would have to be repeated 60 times for one false alarm.

    Attributes:
        spreads: Robust standard deviations.
        floor_ms: Milliseconds that are late whatever the spread; half an op of 10 ms, less than any
            plan has to adapt to.
        share: Part of the baseline.
        chance: Probability, per message, of a false alarm that is accepted.
        least_run: The fewest late messages in a row; also the fewest in time that end a delay.
        most_run: The most, for however unsteady a link: at least one step's.
        calm_share: How much of what may be added to the baseline a message may take to count as in
            time again; the rest is hysteresis.
        good_steps: How many steps a link must behave before it counts as healthy again.
        learning_messages: How many messages make the first baseline.
        window_messages: How many of the last healthy messages make the baseline.
        recent_messages: How many of the last messages say what a slow link takes now.
        moved_share: By what share of its latency a slow link must change for a new verdict.
        other_route_ms: What another route may take more, as long as nothing is known of it.
    """

    spreads: float = 6.0
    floor_ms: float = 5.0
    share: float = 0.5
    chance: float = 1e-7
    least_run: int = 3
    most_run: int = 8
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

    def run_length(self, late_share: float) -> int:
        """How many late messages in a row are no chance.

        Args:
            late_share: The part of a healthy link's messages that are late, between 0 and 1.
        """
        needed = math.ceil(math.log(self.chance) / math.log(late_share))
        return min(max(needed, self.least_run), self.most_run)


@dataclass(frozen=True)
class Usual:
    """What the messages of one route of one direction take while the link is healthy.

    Attributes:
        baseline_ms: The median.
        spread_ms: A robust standard deviation.
        threshold_ms: What is over it is late.
        calm_ms: What is not over it is in time again, after a delay.
        run: How many late messages in a row make a link slow.
        is_assumed: Whether this route has not been measured: it goes by another one.
    """

    baseline_ms: float
    spread_ms: float
    threshold_ms: float
    calm_ms: float
    run: int
    is_assumed: bool = False


def usual(healthy: RunningEstimate, sensitivity: Sensitivity, most_ms: float) -> Usual:
    """What a healthy link's messages say of those to come.

    Args:
        healthy: What they took, milliseconds.
        sensitivity: The numbers to go by.
        most_ms: The highest that the baseline may have crept to.
    """
    baseline_ms, spread_ms = min(healthy.median, most_ms), healthy.spread
    excess_ms = sensitivity.excess_ms(baseline_ms, spread_ms)
    threshold_ms = baseline_ms + excess_ms
    return Usual(
        baseline_ms,
        spread_ms,
        threshold_ms,
        baseline_ms + sensitivity.calm_share * excess_ms,
        sensitivity.run_length(healthy.share_over(threshold_ms)),
    )


def assumed(baseline_ms: float, sensitivity: Sensitivity) -> Usual:
    """What to go by on a route that has never been seen healthy.

    Args:
        baseline_ms: What messages take there as far as can be told.
        sensitivity: The numbers to go by.
    """
    excess_ms = sensitivity.excess_ms(baseline_ms, 0.0)
    calm_ms = baseline_ms + sensitivity.calm_share * excess_ms
    run = sensitivity.least_run
    return Usual(baseline_ms, 0.0, baseline_ms + excess_ms, calm_ms, run, is_assumed=True)
