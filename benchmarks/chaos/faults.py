"""The faults of a run, all drawn from a seed before it begins: of processes, and of links."""

import csv
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.chaos.features import Features

Kind = Literal[
    "sidecar killed", "sidecar stopped", "rank stopped", "storage failing", "rank killed"
]

QUIET_STEPS = 12  # before the last step nothing fails any more: that state must be saved
TRACE_S = 900.0
_FIRST_STEP = 4
_SIDECAR_KILLS = 4  # of one rank in a run: a sidecar may die five times a minute
_RANK_KILLS = 3
_STORAGE_STEPS = (6, 9)  # with a save after every fifth step each of them meets one
_STOPPED_S = (0.05, 0.8)
_WEIGHTS: dict[Kind, int] = {
    "sidecar killed": 4,
    "sidecar stopped": 5,
    "rank stopped": 5,
    "storage failing": 1,
    "rank killed": 1,
}
_TROUBLES = ("slow", "slow", "narrow", "unsteady", "cut")
_COLUMNS = ("time_s", "links", "latency_ms", "bandwidth_mbps", "jitter_ms", "cut")
_ROUTE = "route"
_DEAD_CARD_EVERY_S = 10.0


@dataclass(frozen=True)
class Fault:
    """Harm done to a process or to the storage; no two of them overlap.

    Attributes:
        step: It begins once this step has been written down.
        kind: What happens.
        rank: Whose process it happens to.
        seconds: How long that stands still.
        until_step: Until when the storage fails.
    """

    step: int
    kind: Kind
    rank: int
    seconds: float = 0.0
    until_step: int = 0


def draw_faults(
    seed: int, num_steps: int, num_ranks: int, sidecars: frozenset[int], features: Features
) -> tuple[Fault, ...]:
    """Faults for a run, in the order of their steps.

    Args:
        seed: The same seed, the same faults.
        num_steps: Of the run.
        num_ranks: Of the run.
        sidecars: The ranks that have a sidecar.
        features: What the run can outlive.
    """
    return tuple(_drawn(random.Random(seed), num_steps, num_ranks, sorted(sidecars), features))


def _drawn(
    rng: random.Random, num_steps: int, num_ranks: int, sidecars: list[int], features: Features
) -> Iterator[Fault]:
    sidecar_kills = dict.fromkeys(sidecars, 0)
    rank_kills = 0 if features.restarts else _RANK_KILLS
    step, last = _FIRST_STEP, num_steps - QUIET_STEPS
    while step < last:
        (kind,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        of_sidecar = kind.startswith("sidecar")
        rank = rng.choice(sidecars) if of_sidecar else rng.randrange(num_ranks)
        if kind == "sidecar killed" and sidecar_kills[rank] == _SIDECAR_KILLS:
            kind = "sidecar stopped"  # enough of that
        if kind == "rank killed" and rank_kills == _RANK_KILLS:
            kind = "rank stopped"
        sidecar_kills[rank] = sidecar_kills.get(rank, 0) + (kind == "sidecar killed")
        rank_kills += kind == "rank killed"
        if kind == "storage failing":
            until_step = min(step + rng.randint(*_STORAGE_STEPS), last)
            yield Fault(step, kind, rank, until_step=until_step)
            step = until_step
        elif kind.endswith("killed"):
            yield Fault(step, kind, rank)
        else:
            yield Fault(step, kind, rank, seconds=rng.uniform(*_STOPPED_S))
        step += rng.randint(1, 4)


@dataclass(frozen=True)
class Trouble:
    """A fault of one link for a span of time.

    Attributes:
        begins_s: Since the first step.
        ends_s: Since the first step.
        link: Such as `1-2`, or `1>2` for one direction.
        kind: Such as `cut`.
        cells: Of its row in a trace.
    """

    begins_s: float
    ends_s: float
    link: str
    kind: str
    cells: tuple[tuple[str, str], ...]


def draw_troubles(
    seed: int, num_ranks: int, direct: Sequence[str], features: Features
) -> tuple[Trouble, ...]:
    """Draw faults of a run's links, one after another, for longer than the run lasts.

    Args:
        seed: The same seed, the same troubles.
        num_ranks: Of the run.
        direct: Its links that begin on their direct routes, of which cards go down.
        features: What the run can outlive.
    """
    kinds = [kind for kind in _TROUBLES if kind != "cut" or not features.restarts]
    rng, at_s, dead_card_s = random.Random(seed + 1_000_003), 0.3, _DEAD_CARD_EVERY_S / 4
    troubles = []
    while at_s < TRACE_S:
        if features.direct_cuts and at_s >= dead_card_s:
            trouble = _dead_card(rng, at_s, rng.choice(direct))
            dead_card_s = at_s + _DEAD_CARD_EVERY_S
        else:
            low = rng.randrange(num_ranks - 1)
            way = rng.choice((f"{low}-{low + 1}", f"{low}>{low + 1}", f"{low + 1}>{low}"))
            trouble = _trouble(rng, at_s, way, rng.choice(kinds))
        troubles.append(trouble)
        at_s = trouble.ends_s + rng.uniform(0.05, 0.5)
    return tuple(troubles)


def _trouble(rng: random.Random, at_s: float, way: str, kind: str) -> Trouble:
    lasts_s = rng.uniform(0.2, 0.8) if kind == "cut" else rng.uniform(0.3, 1.5)
    cells = {
        "slow": {"latency_ms": f"{rng.uniform(2, 25):.3f}"},
        "narrow": {"bandwidth_mbps": f"{rng.choice((2, 8, 30))}"},
        "unsteady": {"latency_ms": "5", "jitter_ms": f"{rng.uniform(1, 8):.3f}"},
        "cut": {"cut": "1"},
    }[kind]
    return Trouble(at_s, at_s + lasts_s, way, kind, tuple(cells.items()))


def _dead_card(rng: random.Random, at_s: float, link: str) -> Trouble:
    """The card of a link's direct route goes down, and comes back."""
    cells = (("cut", "1"), (_ROUTE, "direct"))
    return Trouble(at_s, at_s + rng.uniform(2.5, 5.0), link, "card down", cells)


def trace_text(troubles: tuple[Trouble, ...], features: Features) -> str:
    """The troubles as a trace of links (`read_link_trace`).

    Args:
        troubles: In the order of their times, one after another.
        features: Whether a trace may name a route.
    """
    written = io.StringIO()
    columns = (*_COLUMNS, _ROUTE) if features.direct_cuts else _COLUMNS
    rows: csv.DictWriter[str] = csv.DictWriter(written, columns, restval="", lineterminator="\n")
    rows.writeheader()
    for each in troubles:
        at = {"links": each.link}
        cells = dict(each.cells)
        healed = {name: value for name, value in cells.items() if name == _ROUTE}
        rows.writerow({"time_s": f"{each.begins_s:.6f}", **at, **cells})
        rows.writerow({"time_s": f"{each.ends_s:.6f}", **at, **healed})
    return written.getvalue()
