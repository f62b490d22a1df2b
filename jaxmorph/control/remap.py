"""Which ranks change places where the sum of gradients over replicas is slow.

A slow pair of hosts costs most where it sums gradients: all ranks wait for each round of a sum.
Between two stages it delays messages, which a pipeline can absorb, and between two ranks that
exchange nothing it costs nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import itemgetter
from statistics import median

from jaxmorph.placement import Layout
from jaxmorph.records import Link

# A sum is slow if it takes so many times its usual time, and is longer than usual by so much of the
# step, in so many steps in a row. The limits are high because moving ranks takes seconds.
_SLOW_TIMES = 2.0
_LEAST_SHARE = 0.2
_STEPS = 2


@dataclass(frozen=True)
class SumWatch:
    """How long the sums of each stage take, and which are slow.

    Attributes:
        usual_s: By stage, the shortest of the times seen and those of `by_other_stages`.
        took_s: In the last step.
        slow_steps: In how many steps in a row each was slow.
    """

    usual_s: tuple[float, ...] = ()
    took_s: tuple[float, ...] = ()
    slow_steps: tuple[int, ...] = ()

    def after(
        self, took_s: Sequence[float], step_s: float, by_others_s: Sequence[float]
    ) -> "SumWatch":
        """The watch after another step, which took `step_s` with its sums.

        Args:
            by_others_s: See `by_other_stages`.
        """
        seen_s = self.usual_s or tuple(took_s)
        least_s = _LEAST_SHARE * step_s
        usual_s = tuple(map(min, seen_s, took_s, by_others_s))
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


def by_other_stages(
    took_s: Sequence[float], num_bytes: Sequence[int], compares: Sequence[bool]
) -> tuple[float, ...]:
    """The longest time that each stage's sum should take, judged by the other stages' sums.

    So a pair that is slow from the first step on is found too, unless it slows all stages.

    Args:
        took_s: In the last step; 0 where the time is not known.
        num_bytes: What each stage sums.
        compares: Whether each stage's ranks are all on hosts of their own: a sum within a host says
            nothing about one between hosts.
    """

    def by(other: int, stage: int) -> float:
        return took_s[other] * max(1.0, num_bytes[stage] / num_bytes[other])

    known = [stage for stage, each_s in enumerate(took_s) if compares[stage] and each_s > 0]
    return tuple(
        min((by(other, stage) for other in known if compares[stage]), default=took)
        for stage, took in enumerate(took_s)
    )


@dataclass(frozen=True)
class SlowPair:
    """Two ranks between whose hosts the network is slow.

    Attributes:
        excess_s: The time that this adds to a sum of gradients.
        delay_ms: The estimated time that it adds to a round of a sum or a message between stages.
        usual_ms: How long a round takes otherwise.
        bucket_bytes: The size of the bucket that was summed in two rounds.
    """

    ranks: tuple[int, int]
    excess_s: float
    delay_ms: float
    usual_ms: float = 0.0
    bucket_bytes: int = 4

    def has_recovered(self, took_s: float) -> bool:
        """Whether a sum of a bucket over the two ranks alone, in two rounds, is no longer slow."""
        return 1e3 * took_s < 2 * self.usual_ms + self.delay_ms


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
        stages: The stages whose gradients the pair sums.
        links: The links whose messages it carries, each with its replica.
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
            link = Link.of(one.stage, other.stage)
            own += [(one.replica, link)] if link in links else []
        elif one.stage == other.stage:
            stages.append(one.stage)
    return Traffic(tuple(sorted({*stages})), tuple(sorted({*own})))


def choose_layout(
    layout: Layout,
    slow: Sequence[SlowPair],
    links: Sequence[Link],
    predicted_s: Callable[[Mapping[Link, float]], float],
    pipeline: Collection[Link] = (),
) -> Layout | None:
    """A layout in which a step is shorter; None if none is found.

    The search swaps two ranks at a time, one of them on a slow host. It takes the best swap as long
    as fewer stages sum over slow pairs, or steps become shorter. The best layout on the way wins:
    if a host has a whole replica, the first swap alone shortens no step. Rank 0 stays where it is,
    as it records the run.

    Args:
        slow: The pairs that are slow.
        links: Of a pipeline.
        predicted_s: A step of a replica, by the milliseconds by which links are slower than usual.
        pipeline: Take only layouts in which some slow pair carries one of these links and no
            sum; empty: take any.
    """
    predicted = cache(lambda delays_ms: predicted_s(dict(delays_ms)))
    of_hosts = by_hosts(layout, slow)

    def cost(candidate: Layout) -> tuple[int, bool, float]:
        delays_ms: dict[int, dict[Link, float]] = {}
        sums_s, num_slow, is_refused = 0.0, 0, bool(pipeline)
        for hosts, pair in of_hosts.items():
            found = traffic(candidate, hosts, links)
            sums_s = max(sums_s, pair.excess_s if found.stages else 0.0)
            num_slow += len(found.stages)
            is_link = any(link in pipeline for _, link in found.links)
            is_refused &= bool(found.stages) or not is_link
            for replica, link in found.links:
                delays_ms.setdefault(replica, {})[link] = pair.delay_ms
        replicas = (delays_ms.get(each, {}) for each in range(layout.num_replicas))
        steps_s = (predicted(tuple(sorted(each.items()))) for each in replicas)
        return num_slow, is_refused, max(steps_s) + sums_s

    moved = sorted({rank for hosts in of_hosts for host in hosts for rank in layout.on(host)})
    path = [(cost(layout), layout)]
    while found := min(
        ((cost(each), each) for each in _swaps(path[-1][1], moved)), key=itemgetter(0), default=None
    ):
        if found[0] >= path[-1][0]:
            break
        path.append(found)
    (_, is_refused, step_s), best = min(path, key=lambda each: each[0][1:])
    return None if is_refused or step_s >= path[0][0][2] else best


def by_hosts(layout: Layout, slow: Iterable[SlowPair]) -> dict[tuple[int, int], SlowPair]:
    """The slowest pair between each two hosts."""
    found: dict[tuple[int, int], SlowPair] = {}
    for pair in sorted(slow, key=lambda each: each.excess_s):
        found[layout.hosts_of(pair.ranks)] = pair
    return found


def _swaps(layout: Layout, moved: Sequence[int]) -> Iterator[Layout]:
    """The layouts in which one of these ranks has changed places with another one."""
    for one, other in product(moved, range(len(layout.host_of))):
        if 0 not in (one, other) and one != other:
            yield layout.swapped(one, other)
