"""Draws traces of changing link delays from seeds, for emulation and tests.

Regimes A, B and C are those of the paper's Section 7.2, `bursty` has the statistics of a recorded
trace in its Section 7.5, and events are like those in Table 3 of its preprint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.emulation.link_trace import LINKS, STEP, TIME, until_next
from jaxmorph.records import Link, Regime

REGIMES: tuple[Regime, ...] = get_args(Regime)

MEAN_MS, DEVIATION_MS = 30.0, 10.0
REDRAWN_S = {"A": (0.05, 0.1), "B": (0.1, 0.2), "C": (0.2, 0.4)}
"""The least and the most seconds until a regime draws a link's next delay."""


class _Spell(NamedTuple):
    """A run of lognormal delays of `bursty`: how many are drawn, at least and at most."""

    median_ms: float
    sigma: float
    draws: tuple[int, int]


_CALM, _CONGESTED = _Spell(8.674, 0.6, (10, 30)), _Spell(43.917, 0.3136, (5, 15))
_CONGESTED_SHARE = 1 / 3
"""One lognormal of median 13.0 and mean 22.3 would have its 99th percentile at 146, so there are
two. Share and calm sigma are free choices; the other three numbers then follow from the published
median 13.0, mean 22.3 and 99th percentile 79.3 ms.
"""
_BURSTY_REDRAWN_S = (0.5, 1.5)


@dataclass(frozen=True)
class DelayChange:
    """A new delay of some links, in both directions, until their next change.

    Attributes:
        at: Seconds since the origin, or the step.
    """

    at: float
    links: tuple[Link, ...]
    latency_ms: float


@dataclass(frozen=True)
class DelayTrace:
    """Changes of link delays, in order, by time or by step."""

    unit: Literal["time_s", "step"]
    changes: tuple[DelayChange, ...]

    def conditions(self) -> list[LinkCondition]:
        """The conditions of the emulated links."""
        return until_next(
            LinkCondition(
                (link.lower, link.upper),
                latency_ms=change.latency_ms,
                from_s=change.at if self.unit == TIME else None,
                from_step=int(change.at) if self.unit == STEP else None,
            )
            for change in self.changes
            for link in change.links
        )


def to_csv(traces: Sequence[DelayTrace]) -> str:
    """The table that `read_link_trace` reads, of a pipeline's trace, or of one for each replica."""

    def named(link: Link, replica: int) -> str:
        return str(link) if len(traces) == 1 else link.in_replica(replica)

    rows = [
        (change.at, [named(link, replica) for link in change.links], change.latency_ms)
        for replica, trace in enumerate(traces)
        for change in trace.changes
    ]
    rows.sort(key=itemgetter(0))
    lines = (f"{at:.15g},{' '.join(links)},{latency_ms:.15g}\n" for at, links, latency_ms in rows)
    return "".join((f"{traces[0].unit},{LINKS},latency_ms\n", *lines))


def draw_regime(
    regime: Regime, links: Sequence[Link], duration_s: float, seed: int, replica: int = 0
) -> DelayTrace:
    """Draws delays by time, which change in the middle of steps.

    In A, B and C a link's delay is normally distributed, with a mean of 30 ms and a standard
    deviation of 10 ms, and at least 0. It is redrawn after 50 to 100, 100 to 200 or 200 to 400 ms.
    In `bursty`, links alternate between calm and congested: delays have a median of 13.0, a mean of
    22.3 and a 99th percentile of 79.3 ms, and are redrawn after 0.5 to 1.5 s. A link's delays do
    not depend on other links, or on the same link of another replica.

    Raises:
        ValueError: The duration is negative or not finite.

    Source: "Attack of the Bubbles", Sections 7.2 (Figure 18) and 7.5 (Figure 22), which publishes
    these three numbers, but neither their distribution nor how fast delays change.
    """
    if not (math.isfinite(duration_s) and duration_s >= 0):
        raise ValueError(f"duration_s: got {duration_s}, expected a finite number of at least 0")
    changes: list[DelayChange] = []
    for link in links:
        of_link = *link, *_of_replica(replica)
        random = np.random.default_rng((seed, REGIMES.index(regime), *of_link))
        for at, latency_ms in zip(*_series(regime, duration_s, random), strict=True):
            changes.append(DelayChange(round(at, 4), (link,), round(latency_ms, 3)))
    changes.sort(key=lambda change: (change.at, change.latency_ms))
    return DelayTrace(TIME, tuple(changes))


def _of_replica(replica: int) -> tuple[int, ...]:
    """What distinguishes a replica's seeds from replica 0's, which equal those of one pipeline."""
    return (replica,) if replica else ()


def _series(
    regime: Regime, duration_s: float, random: np.random.Generator
) -> tuple[list[float], list[float]]:
    """The times and values of one link's delays."""
    shortest_s, longest_s = REDRAWN_S.get(regime, _BURSTY_REDRAWN_S)
    most = int(duration_s / shortest_s) + 1
    began_s = np.concatenate(([0.0], np.cumsum(random.uniform(shortest_s, longest_s, most))))
    began_s = began_s[began_s < duration_s]
    count = len(began_s)
    if regime == "bursty":
        delays_ms = _bursty_ms(count, random)
    else:
        delays_ms = np.maximum(0.0, random.normal(MEAN_MS, DEVIATION_MS, count))
    return began_s.tolist(), delays_ms.tolist()


def _bursty_ms(count: int, random: np.random.Generator) -> np.ndarray:
    """Delays of a link that alternates between runs of calm and of congested draws."""
    runs, missing = [np.empty(0)], count
    congested = random.random() < _CONGESTED_SHARE
    while missing > 0:
        spell = _CONGESTED if congested else _CALM
        drawn = random.standard_normal(min(missing, _between(random, spell.draws)))
        runs.append(spell.median_ms * np.exp(spell.sigma * drawn))
        missing -= len(drawn)
        congested = not congested
    return np.concatenate(runs)


class EventRanges(NamedTuple):
    """The least and the most of each property of an event.

    Attributes:
        gap_steps: From the end of one event to the beginning of the next.
        steps: How many an event lasts.
        links: How many are slow in an event.
        latency_ms: Whole milliseconds.
    """

    gap_steps: tuple[int, int]
    steps: tuple[int, int]
    links: tuple[int, int]
    latency_ms: tuple[int, int]


LONG_EVENTS = EventRanges((20, 60), (40, 80), (1, 3), (20, 60))
"""Like those of the paper's preprint ("Adaptra"), Table 3, whose nine events begin 15 to 50 steps
after the previous one, last 70 steps, and delay 1 to 3 of 7 links by 20 to 60 ms."""

SHORT_EVENTS = EventRanges((6, 8), (16, 20), (1, 2), (15, 50))
"""Three in 84 steps, so that their onsets matter."""


def draw_events(
    links: Sequence[Link],
    num_steps: int,
    seed: int,
    ranges: EventRanges = LONG_EVENTS,
    replica: int = 0,
) -> DelayTrace:
    """Draws events by step, before ``num_steps``: some links are slow, in both directions.

    They come one after another, with healthy steps between.
    """
    random = np.random.default_rng((seed, len(REGIMES), *_of_replica(replica)))
    changes: list[DelayChange] = []
    end = 0
    while True:
        begin = end + _between(random, ranges.gap_steps)
        end = begin + _between(random, ranges.steps)
        if end > num_steps:
            return DelayTrace(STEP, tuple(changes))
        count = min(_between(random, ranges.links), len(links))
        chosen = sorted(random.choice(len(links), count, replace=False).tolist())
        slow = tuple(links[at] for at in chosen)
        latency_ms = float(_between(random, ranges.latency_ms))
        changes += DelayChange(begin, slow, latency_ms), DelayChange(end, slow, 0.0)


def _between(random: np.random.Generator, least_and_most: tuple[int, int]) -> int:
    return int(random.integers(*least_and_most, endpoint=True))
