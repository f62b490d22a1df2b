"""Seeded random planning problems: like those of the paper's section 7.4, and harder ones."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxmorph.schedule.costs import Limits, Links, StageCosts, StashBytes, chain_links
from jaxmorph.schedule.ops import LiveUntil

_PER_FAMILY = 20


@dataclass(frozen=True)
class Problem:
    """A planning problem."""

    name: str
    costs: StageCosts
    latencies_ms: tuple[float, ...]
    limits: Limits
    num_microbatches: int

    @property
    def links(self) -> Links:
        """The latencies as the planner takes them."""
        return chain_links(self.latencies_ms)

    @property
    def is_capped(self) -> bool:
        """Whether stages have memory caps."""
        return self.limits != Limits()

    @property
    def key(self) -> str:
        """The name and a digest of the numbers: another problem has another key."""
        numbers = {**asdict(self), "name": None}
        del numbers["limits"]["weight_group"]  # 1 in all of them
        digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()
        return f"{self.name}:{digest[:12]}"


def gap_problems(draw_name: str = "") -> list[Problem]:
    """Problems small enough for the exact optimum: free, capped until B or W, or in bytes.

    ``like-7.4`` are sized as in the paper: 3 to 8 stages, 6 to 32 microbatches. ``few`` have about
    as many microbatches as stages, where the paper's planner is furthest from the optimum.
    """
    sizes: dict[str, Callable[[random.Random], tuple[int, int]]] = {
        "like-7.4": lambda draw: (draw.randint(3, 8), draw.randint(6, 32)),
        "few": _few_microbatches,
    }
    problems = []
    for family, size in sizes.items():
        for held in ("free", "B", "W", "bytes"):
            for number in range(_PER_FAMILY):
                name = f"{family}-{held}-{number:02}{draw_name}"
                draw = random.Random(name)
                problems.append(_problem(name, draw, *size(draw), held))
    return problems


def timing_problems(num_stages: int, num_microbatches: int, count: int) -> list[Problem]:
    """Problems of one size, by turns free, capped until B and capped until W."""
    problems = []
    for number in range(count):
        held = ("free", "B", "W")[number % 3]
        name = f"{num_stages}x{num_microbatches}-{held}-{number:02}"
        draw = random.Random(name)
        problems.append(_problem(name, draw, num_stages, num_microbatches, held))
    return problems


def _few_microbatches(draw: random.Random) -> tuple[int, int]:
    num_stages = draw.randint(3, 8)
    return num_stages, num_stages + draw.randint(0, 4)


def _problem(
    name: str, draw: random.Random, num_stages: int, num_microbatches: int, held: str
) -> Problem:
    limits = Limits()
    if held == "bytes":
        limits = _byte_limits(draw, num_stages)
    elif held != "free":
        until: LiveUntil = "W" if held == "W" else "B"
        limits = Limits(_caps(draw, num_stages), until)
    return Problem(
        name, _costs(draw, num_stages), _latencies_ms(draw, num_stages), limits, num_microbatches
    )


def _costs(draw: random.Random, num_stages: int) -> StageCosts:
    """Unequal stages, in tenths of a millisecond; now and then equal ones, where ties abound."""
    if draw.random() < 0.2:
        return StageCosts.uniform(num_stages, 10.0, draw.choice((10.0, 12.0)), 10.0)
    spread = draw.choice((0.15, 0.5))
    rows = [
        tuple(round(typical * draw.uniform(1 - spread, 1 + spread), 1) for _ in range(num_stages))
        for typical in (10.0, 11.0, 9.0)
    ]
    return StageCosts(*rows)


def _latencies_ms(draw: random.Random, num_stages: int) -> tuple[float, ...]:
    """Several slow links, anything from half an op to four; the others are healthy."""
    num_links = num_stages - 1
    slow = draw.sample(range(num_links), draw.randint(1, min(3, num_links)))
    return tuple(
        round(draw.uniform(5.0, 40.0), 1) if link in slow else draw.choice((0.0, 0.2))
        for link in range(num_links)
    )


def _caps(draw: random.Random, num_stages: int) -> tuple[int, ...]:
    """One cap for all stages, or as 1F1B needs and up to twice that; tight ones among them."""
    if draw.random() < 0.5:
        return (draw.randint(2, 2 * num_stages - 1),) * num_stages
    return tuple(
        draw.randint(num_stages - stage, 2 * (num_stages - stage)) for stage in range(num_stages)
    )


def _byte_limits(draw: random.Random, num_stages: int) -> Limits:
    """Room for as many microbatches as `_caps` says; B leaves less of each, or a little more."""
    after_forward = tuple(draw.randint(60, 120) for _ in range(num_stages))
    after_backward = tuple(round(size * draw.uniform(0.3, 1.2)) for size in after_forward)
    rows = zip(after_forward, after_backward, _caps(draw, num_stages), strict=True)
    room = tuple(max(forward * cap, backward) for forward, backward, cap in rows)
    return Limits(max_stash_bytes=room, stash_bytes=StashBytes(after_forward, after_backward))
