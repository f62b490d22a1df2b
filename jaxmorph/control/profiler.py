"""From measured timelines to what ops and links cost now: running medians, robust to spikes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from jaxmorph.control.copy_profile import CopyProfile
from jaxmorph.control.estimates import RunningEstimate, median, robust_spread
from jaxmorph.control.link_samples import LinkSample, link_samples
from jaxmorph.control.op_times import op_times
from jaxmorph.schedule.copy_costs import CopyCosts
from jaxmorph.schedule.costs import Link, Links, LinkState, StageCosts
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline


@dataclass(frozen=True)
class Spreads:
    """How much what a step is made of varies: robust standard deviations, milliseconds.

    Attributes:
        costs: Of ops, per stage and kind, from microbatch to microbatch.
        links: Of messages, in the place of each direction's latency.
    """

    costs: StageCosts
    links: Links

    def to_json(self) -> dict[str, Any]:
        """The spreads as a JSON object, with links as `"2-3"`."""
        return {"costs": asdict(self.costs), "links": _links_to_json(self.links)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Spreads":
        """The spreads that `to_json` described."""
        return cls(_costs_from_json(data["costs"]), _links_from_json(data["links"]))


@dataclass(frozen=True)
class Profile:
    """What a step is made of, as measured.

    Attributes:
        costs: Milliseconds per stage and kind of op, those of all its chunks together.
        links: Latency of each link and direction.
        stash_bytes: What one microbatch keeps on each stage; None where it isn't known.
        spreads: How much costs and latencies vary; None where it isn't known.
        copies: What moving a stash to host memory and back takes; None where none has been moved.
    """

    costs: StageCosts
    links: Links
    stash_bytes: StashBytes | None = None
    spreads: Spreads | None = None
    copies: CopyCosts | None = None

    def to_json(self) -> dict[str, Any]:
        """The profile as a JSON object, with links as `"2-3"`."""
        return {
            "costs": asdict(self.costs),
            "links": _links_to_json(self.links),
            "stash_bytes": None if self.stash_bytes is None else asdict(self.stash_bytes),
            "spreads": None if self.spreads is None else self.spreads.to_json(),
            "copies": None if self.copies is None else asdict(self.copies),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Profile":
        """The profile that `to_json` described, by this version or by one that told less."""
        sizes, spreads = data.get("stash_bytes"), data.get("spreads")
        copies = data.get("copies")
        return cls(
            _costs_from_json(data["costs"]),
            _links_from_json(data["links"]),
            StashBytes(*(tuple(row) for row in sizes.values())) if sizes else None,
            Spreads.from_json(spreads) if spreads else None,
            CopyCosts(*(tuple(row) for row in copies.values())) if copies else None,
        )


class _Quantity:
    """What one kind of op or one direction of a link takes: the last steps' medians and spreads."""

    def __init__(self, num_steps: int) -> None:
        self._medians, self._spreads = RunningEstimate(num_steps), RunningEstimate(num_steps)

    def add(self, median_ms: float, spread_ms: float) -> None:
        self._medians.add(median_ms)
        self._spreads.add(spread_ms)

    @property
    def median_ms(self) -> float:
        return self._medians.median

    @property
    def spread_ms(self) -> float:
        return self._spreads.median


class Profiler:
    """Keeps the recent steps' medians and spreads.

    Args:
        stash_bytes: What one microbatch keeps on each stage, if that is known.
        num_steps: How many of the last steps count.
    """

    def __init__(
        self, num_stages: int, stash_bytes: StashBytes | None = None, num_steps: int = 20
    ) -> None:
        self._num_stages = num_stages
        self._stash_bytes = stash_bytes
        new_quantity = partial(_Quantity, num_steps)
        self._ops: defaultdict[tuple[int, OpKind], _Quantity] = defaultdict(new_quantity)
        self._links: defaultdict[tuple[int, int], _Quantity] = defaultdict(new_quantity)
        self._held: dict[tuple[int, int], bool] = {}
        self._copies = CopyProfile(num_stages, num_steps)

    def observe(self, timeline: Timeline, samples: Sequence[LinkSample] | None = None) -> None:
        """Take in one measured step.

        Args:
            timeline: The ops, transfers and copies of all stages.
            samples: What `link_samples` makes of it, where that is known already.
        """
        self._copies.observe(timeline)
        samples = link_samples(timeline) if samples is None else samples
        for key, time in op_times(timeline).items():
            self._ops[key].add(time.median_ms, time.spread_ms)
        for source, destination, is_held, took_ms in _main_messages(samples):
            self._forget_other_route(source, destination, is_held)
            self._links[source, destination].add(median(took_ms), robust_spread(took_ms))

    def profile(self) -> Profile:
        """The medians over the steps seen, and how much the values vary within a step.

        Returns:
            Costs and link latencies. Where only full backwards have been seen, the whole of them
            counts as B and nothing as W.
        """
        spreads = Spreads(self._costs(_spread_ms), self._link_states(_spread_ms))
        costs, links = self._costs(_median_ms), self._link_states(_median_ms)
        return Profile(costs, links, self._stash_bytes, spreads, self._copies.costs())

    def _costs(self, read: Callable[[_Quantity], float]) -> StageCosts:
        split = any(kind in (OpKind.B, OpKind.W) for _, kind in self._ops)
        kinds = (OpKind.F, OpKind.B if split else OpKind.BW, OpKind.W)
        return StageCosts(*(tuple(self._per_stage(kind, read)) for kind in kinds))

    def _per_stage(self, kind: OpKind, read: Callable[[_Quantity], float]) -> list[float]:
        seen = (self._ops.get((stage, kind)) for stage in range(self._num_stages))
        return [0.0 if quantity is None else read(quantity) for quantity in seen]

    def _forget_other_route(self, source: int, destination: int, is_held: bool) -> None:
        """What a direct transfer took says nothing of a delegated one, nor the other way round."""
        if self._held.get((source, destination), is_held) != is_held:
            del self._links[source, destination]
        self._held[source, destination] = is_held

    def _link_states(self, read: Callable[[_Quantity], float]) -> dict[Link, LinkState]:
        links = {Link(min(ends), max(ends)) for ends in self._links}
        return {
            link: LinkState(*(self._latency_ms(ends, read) for ends in (link, link[::-1])))
            for link in sorted(links)
        }

    def _latency_ms(self, ends: tuple[int, ...], read: Callable[[_Quantity], float]) -> float:
        source, destination = ends
        quantity = self._links.get((source, destination))
        return 0.0 if quantity is None else read(quantity)


def _median_ms(quantity: _Quantity) -> float:
    return quantity.median_ms


def _spread_ms(quantity: _Quantity) -> float:
    return quantity.spread_ms


def _main_messages(samples: Sequence[LinkSample]) -> Iterator[tuple[int, int, bool, list[float]]]:
    """What each direction's messages took on the route that most of them went.

    The few on another route are probes of it.
    """
    durations: dict[tuple[int, int], dict[bool, list[float]]] = {}
    for sample in samples:
        routes = durations.setdefault((sample.source, sample.destination), {})
        routes.setdefault(sample.is_held, []).append(sample.duration_ms)
    for ends, routes in durations.items():
        yield *ends, *max(routes.items(), key=lambda route: len(route[1]))


def _links_to_json(links: Links) -> dict[str, Any]:
    return {str(link): asdict(state) for link, state in links.items()}


def _links_from_json(data: Mapping[str, Any]) -> dict[Link, LinkState]:
    return {Link.parse(name): LinkState(**state) for name, state in data.items()}


def _costs_from_json(data: Mapping[str, Any]) -> StageCosts:
    return StageCosts(**{name: tuple(values) for name, values in data.items()})
