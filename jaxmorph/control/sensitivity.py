"""How much, and how often, messages must be late before detection says so: the numbers and why."""

from dataclasses import dataclass


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


def usual(baseline_ms: float, spread_ms: float, sensitivity: Sensitivity) -> Usual:
    """What to expect of messages, given what healthy ones have taken.

    Args:
        spread_ms: Their robust standard deviation; 0 where it isn't known.
        sensitivity: The numbers to go by.
    """
    excess_ms = sensitivity.excess_ms(baseline_ms, spread_ms)
    calm_ms = baseline_ms + sensitivity.calm_share * excess_ms
    return Usual(baseline_ms, spread_ms, baseline_ms + excess_ms, calm_ms)
