"""Steps whose messages have delays that planning didn't know: the problems of `intra_step_gap`.

A case is drawn from a seed: what was measured of the step before, and how long a message that is
sent at a time takes. Delays are those of the paper's Figure 18 (drawn from N(30, 10) ms for each
link, and drawn anew after a time of its regime), a bursty network's (each message by itself, with
Figure 22's median, mean and 99th percentile), or none until a link turns slow in mid-step.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, pstdev

from jaxmorph.program.instructions import Transfer
from jaxmorph.schedule.costs import StageCosts

PAPER_7B = StageCosts((8.4, 9.2, 9.05, 9.4), (9.5, 10.1, 10.0, 9.2), (5.3, 6.4, 6.35, 5.9))
PAPER_14B = StageCosts((8.0, *[9.0] * 7), (*[10.0] * 7, 9.0), (5.0, *[6.0] * 7))
SIZES = {"7B S=4 N=12": (PAPER_7B, 12), "14B S=8 N=24": (PAPER_14B, 24)}

REDRAWN_MS = {"A": (50.0, 100.0), "B": (100.0, 200.0), "C": (200.0, 400.0)}
KINDS = (*REDRAWN_MS, "bursty", "jump")

HEALTHY_MS = 0.3
_MEAN_MS, _SIGMA_MS = 30.0, 10.0
_BEFORE_MS = 1_000.0  # how long a trace has run when the step begins
_SEEN_MS, _SAMPLES = 500.0, 20  # of the step before
_LENGTH_MS = 6_000.0
_MARGIN = 0.7  # of a link's spread, that plans are made for


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        costs: Durations of the ops, milliseconds.
        num_microbatches: Number of microbatches.
        quickest_ms: The quickest message measured of each link, milliseconds: what is expected.
        planned_ms: What is planned for: what was measured, and a part of its spread.
        delay_ms: How long a message takes that is sent at a time, milliseconds.
    """

    costs: StageCosts
    num_microbatches: int
    quickest_ms: list[float]
    planned_ms: list[float]
    delay_ms: Callable[[Transfer, float], float]


def draw_case(size: str, kind: str, seed: int) -> Case:
    """The case of a seed, the same on every machine.

    Args:
        size: One of `SIZES`.
        kind: One of `KINDS`.
        seed: Which one.
    """
    costs, num_microbatches = SIZES[size]
    draw = random.Random(f"{size} {kind} {seed}")
    make = {"bursty": _bursty, "jump": _jump}.get(kind) or _redrawn(kind)
    return Case(costs, num_microbatches, *make(draw, costs.num_stages - 1))


_Made = tuple[list[float], list[float], Callable[[Transfer, float], float]]


def _redrawn(regime: str) -> Callable[[random.Random, int], _Made]:
    def make(draw: random.Random, num_links: int) -> _Made:
        traces = [_Trace(draw, *REDRAWN_MS[regime]) for _ in range(num_links)]
        seen = [trace.seen_ms() for trace in traces]
        quickest = [min(values) for values in seen]
        planned = [median(values) + _MARGIN * pstdev(values) for values in seen]
        return quickest, planned, lambda sent, at_ms: traces[sent.link.lower].at(at_ms)

    return make


class _Trace:
    """A link's delay over time."""

    def __init__(self, draw: random.Random, least_ms: float, most_ms: float) -> None:
        self._since_ms, self._delays_ms = [], []
        now_ms = 0.0
        while now_ms < _LENGTH_MS:
            self._since_ms.append(now_ms)
            self._delays_ms.append(max(0.0, draw.gauss(_MEAN_MS, _SIGMA_MS)))
            now_ms += draw.uniform(least_ms, most_ms)

    def at(self, step_ms: float) -> float:
        """The delay at a time since the step's start."""
        return self._delays_ms[bisect_right(self._since_ms, _BEFORE_MS + step_ms) - 1]

    def seen_ms(self) -> list[float]:
        """What the messages of the step before took."""
        return [self.at(-_SEEN_MS * (part + 1) / _SAMPLES) for part in range(_SAMPLES)]


def _bursty(draw: random.Random, num_links: int) -> _Made:
    """Half the messages take less than 13 ms, one in a hundred more than 79."""
    spread = math.log(79.3 / 13.0) / 2.326
    drawn: dict[Transfer, float] = {}

    def delay_ms(sent: Transfer, at_ms: float) -> float:
        del at_ms
        if sent not in drawn:
            drawn[sent] = 13.0 * math.exp(draw.gauss(0.0, spread))
        return drawn[sent]

    quickest_ms = 13.0 * math.exp(-2.0 * spread)  # of some fifty
    return [quickest_ms] * num_links, [13.0 + _MARGIN * 13.0] * num_links, delay_ms


def _jump(draw: random.Random, num_links: int) -> _Made:
    """A healthy step in which a link turns slow."""
    slow, late_ms = draw.randrange(num_links), draw.choice([20.0, 30.0, 60.0])
    since_ms = draw.uniform(50.0, 300.0)

    def delay_ms(sent: Transfer, at_ms: float) -> float:
        return late_ms if sent.link.lower == slow and at_ms > since_ms else HEALTHY_MS

    return [HEALTHY_MS] * num_links, [HEALTHY_MS] * num_links, delay_ms
