"""Which ranks change places where the sum of gradients over replicas is slow.

A slow pair of hosts costs most where it sums gradients: all ranks wait for each round of a sum.
Between two stages it delays messages, which a pipeline can absorb, and between two ranks that
exchange nothing it costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from jaxmorph.placement import Layout
from jaxmorph.records import Link

# A sum is slow that takes so many times the usual, and so much of the step longer than usual, in so
# many steps in a row: to move ranks takes seconds.
_SLOW_TIMES = 2.0
_LEAST_SHARE = 0.2
_STEPS = 2


@dataclass(frozen=True)
class SumWatch:
    """How long the sums of each stage take, and which are slow.

    Attributes:
        usual_s: The least that was seen, by stage.
        took_s: In the last step.
        slow_steps: In how many steps in a row each was slow.
    """

    usual_s: tuple[float, ...] = ()
    took_s: tuple[float, ...] = ()
    slow_steps: tuple[int, ...] = ()

    def after(self, took_s: Sequence[float], step_s: float) -> "SumWatch":
        """The watch after another step, which took `step_s` with its sums."""
        before = self.usual_s or tuple(took_s)
        least_s = _LEAST_SHARE * step_s
        usual_s = tuple(map(min, before, took_s))
        counts = self.slow_steps or (0,) * len(usual_s)
        slow_steps = tuple(
            count + 1 if took > max(_SLOW_TIMES * usual, usual + least_s) else 0
            for took, usual, count in zip(took_s, usual_s, counts, strict=True)
        )
        return SumWatch(usual_s, tuple(took_s), slow_steps)

    def slow(self) -> dict[int, float]:
        """The seconds by which the sums of slow stages take longer than usual."""
        return {
            stage: self.took_s[stage] - self.usual_s[stage]
            for stage, count in enumerate(self.slow_steps)
            if count >= _STEPS
        }


@dataclass(frozen=True)
class SlowPair:
    """Two ranks whose hosts are slow for each other.

    Attributes:
        excess_s: What that adds to a sum of gradients.
        delay_ms: What it is thought to add to a message between stages.
    """

    ranks: tuple[int, int]
    excess_s: float
    delay_ms: float


def slow_pairs(took_s: Mapping[str, float], num_replicas: int) -> list[tuple[int, int]]:
    """The pairs of replicas, such as `0-2`, whose sums take much longer than most.

    With two replicas there is one pair, which needs no times.
    """
    if num_replicas == 2:
        return [(0, 1)]
    usual_s = median(took_s.values())
    slow = (Link.parse(pair) for pair, each_s in took_s.items() if each_s > _SLOW_TIMES * usual_s)
    return [(low, high) for low, high in slow]


@dataclass(frozen=True)
class Traffic:
    """What a pair of hosts carries in a layout.

    Attributes:
        stages: Those whose gradients it sums.
        links: Those of its messages, each with its replica.
    """

    stages: tuple[int, ...] = ()
    links: tuple[tuple[int, Link], ...] = ()


def traffic(layout: Layout, hosts: tuple[int, int], links: Sequence[Link]) -> Traffic:
    """What two hosts exchange.

    Args:
        links: Of a pipeline.
    """
    positions, stages, own = layout.positions, [], []
    for a, b in layout.between(hosts):
        one, other = positions[a], positions[b]
        if one.replica == other.replica:
            link = Link(*sorted((one.stage, other.stage)))
            own += [(one.replica, link)] if link in links else []
        elif one.stage == other.stage:
            stages.append(one.stage)
    return Traffic(tuple(sorted({*stages})), tuple(sorted({*own})))


def choose_layout(
    layout: Layout,
    slow: Sequence[SlowPair],
    links: Sequence[Link],
    predicted_s: Callable[[Mapping[Link, float]], float],
    *,
    in_pipeline: bool = False,
) -> Layout | None:
    """The layout in which a step is shortest; None if it is this one.

    Rank 0 stays where it is, as it records the run.

    Args:
        slow: The pairs that are slow.
        links: Of a pipeline.
        predicted_s: A step of a replica, by the milliseconds by which links are slower than usual.
        in_pipeline: Take only layouts in which some slow pair is a link of a pipeline.
    """

    def cost_s(candidate: Layout) -> float:
        delays: dict[int, dict[Link, float]] = {}
        sums_s = 0.0
        for pair in slow:
            found = _of_pair(candidate, pair, links)
            sums_s = max(sums_s, pair.excess_s if found.stages else 0.0)
            for replica, link in found.links:
                delays.setdefault(replica, {})[link] = pair.delay_ms
        replicas = (predicted_s(delays.get(each, {})) for each in range(layout.num_replicas))
        return max(replicas) + sums_s

    def is_allowed(candidate: Layout) -> bool:
        found = [_of_pair(candidate, pair, links) for pair in slow]
        return not in_pipeline or any(each.links and not each.stages for each in found)

    candidates = filter(is_allowed, _swaps(layout, slow))
    best = min(candidates, key=cost_s, default=None)
    return best if best is not None and cost_s(best) < cost_s(layout) else None


def _of_pair(layout: Layout, pair: SlowPair, links: Sequence[Link]) -> Traffic:
    hosts = sorted(map(layout.host, pair.ranks))
    return traffic(layout, (hosts[0], hosts[1]), links)


def _swaps(layout: Layout, slow: Sequence[SlowPair]) -> Iterator[Layout]:
    """The layouts in which a rank of a slow pair has changed places with another one."""
    ranks = sorted(layout.positions)
    for moved in sorted({rank for pair in slow for rank in pair.ranks}):
        for other in ranks:
            if 0 not in (moved, other) and moved != other:
                yield layout.swapped(moved, other)
