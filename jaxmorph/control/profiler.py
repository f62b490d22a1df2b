"""From measured timelines to what ops, links and copies cost now: running medians."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from jaxmorph.control.measurements import (
    LinkSample,
    RunningEstimate,
    link_samples,
    median,
    op_times,
)
from jaxmorph.records import Link
from jaxmorph.schedule.costs import CopyCosts, LinkDelay, Links, StageCosts, StashBytes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline

_RECENT_STEPS = 20


@dataclass(frozen=True)
class Profile:
    """What a step is made of, as measured.

    Attributes:
        costs: Milliseconds per stage and kind of op, those of all its chunks together.
        links: Latency of each link and direction.
        stash_bytes: What one microbatch keeps on each stage; None where it isn't known.
        copies: What moving a stash to host memory and back takes; None where none has been moved.
    """

    costs: StageCosts
    links: Links
    stash_bytes: StashBytes | None = None
    copies: CopyCosts | None = None

    def to_json(self) -> dict[str, Any]:
        """The profile as a JSON object, with links as `"2-3"`."""
        return {
            "costs": asdict(self.costs),
            "links": {str(link): asdict(state) for link, state in self.links.items()},
            "stash_bytes": None if self.stash_bytes is None else asdict(self.stash_bytes),
            "copies": None if self.copies is None else asdict(self.copies),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Profile":
        """The profile that `to_json` described, of this version or one with more or fewer keys."""
        sizes, copies = data.get("stash_bytes"), data.get("copies")
        return cls(
            StageCosts(**{name: tuple(values) for name, values in data["costs"].items()}),
            {Link.parse(name): LinkDelay(**state) for name, state in data["links"].items()},
            StashBytes(*(tuple(row) for row in sizes.values())) if sizes else None,
            CopyCosts(*(tuple(row) for row in copies.values())) if copies else None,
        )


class Profiler:
    """Keeps the recent steps' medians.

    Args:
        stash_bytes: What one microbatch keeps on each stage, if that is known.
    """

    def __init__(self, num_stages: int, stash_bytes: StashBytes | None = None) -> None:
        self._num_stages = num_stages
        self._stash_bytes = stash_bytes
        estimate = partial(RunningEstimate, _RECENT_STEPS)
        self._ops: defaultdict[tuple[int, OpKind], RunningEstimate] = defaultdict(estimate)
        self._links: defaultdict[tuple[int, int], RunningEstimate] = defaultdict(estimate)
        self._held: dict[tuple[int, int], bool] = {}
        self._copies: defaultdict[tuple[int, str], RunningEstimate] = defaultdict(estimate)

    def observe(self, timeline: Timeline, samples: Sequence[LinkSample] | None = None) -> None:
        """Take in one measured step.

        Args:
            timeline: The ops, transfers and copies of all stages.
            samples: What `link_samples` makes of it, where that is known already.
        """
        copy_ms: dict[tuple[int, str], list[float]] = defaultdict(list)
        for copy in timeline.copies:
            copy_ms[copy.stage, copy.kind].append(copy.end_ms - copy.start_ms)
        for key, took_ms in copy_ms.items():
            self._copies[key].add(median(took_ms))
        for key, time in op_times(timeline).items():
            self._ops[key].add(time.median_ms)
        samples = link_samples(timeline) if samples is None else samples
        for source, destination, is_direct, took_ms in _main_messages(samples):
            self._forget_other_route(source, destination, is_direct)
            self._links[source, destination].add(median(took_ms))

    def profile(self) -> Profile:
        """The medians over the steps seen.

        Where only full backwards have been seen, the whole of them counts as B and nothing as W.
        """
        return Profile(self._costs(), self._link_states(), self._stash_bytes, self._copy_costs())

    def _costs(self) -> StageCosts:
        split = any(kind in (OpKind.B, OpKind.W) for _, kind in self._ops)
        kinds = (OpKind.F, OpKind.B if split else OpKind.BW, OpKind.W)
        stages = range(self._num_stages)
        return StageCosts(
            *(tuple(_median_of(self._ops, (stage, kind)) for stage in stages) for kind in kinds)
        )

    def _forget_other_route(self, source: int, destination: int, is_direct: bool) -> None:
        """What a direct transfer took says nothing of a delegated one, nor the other way round."""
        if self._held.get((source, destination), is_direct) != is_direct:
            del self._links[source, destination]
        self._held[source, destination] = is_direct

    def _link_states(self) -> dict[Link, LinkDelay]:
        links = {Link(min(ends), max(ends)) for ends in self._links}
        return {
            link: LinkDelay(_median_of(self._links, link), _median_of(self._links, link[::-1]))
            for link in sorted(links)
        }

    def _copy_costs(self) -> CopyCosts | None:
        """None before any copy; a stage that has moved nothing takes as long as the slowest."""
        if not self._copies:
            return None
        return CopyCosts(*map(self._copies_per_stage, ("offload", "fetch")))

    def _copies_per_stage(self, kind: str) -> tuple[float, ...]:
        seen = {stage: each.median for (stage, of), each in self._copies.items() if of == kind}
        slowest_ms = max(seen.values(), default=0.0)
        return tuple(seen.get(stage, slowest_ms) for stage in range(self._num_stages))


def _median_of(estimates: Mapping[Any, RunningEstimate], key: tuple[Any, ...]) -> float:
    """0 for what was never seen; `get` makes no entry of its own in a defaultdict."""
    seen = estimates.get(key)
    return 0.0 if seen is None else seen.median


def _main_messages(samples: Sequence[LinkSample]) -> Iterator[tuple[int, int, bool, list[float]]]:
    """What each direction's messages took on the route that most of them went.

    The few on another route are probes of it.
    """
    durations: dict[tuple[int, int], dict[bool, list[float]]] = {}
    for sample in samples:
        routes = durations.setdefault((sample.source, sample.destination), {})
        routes.setdefault(sample.is_direct, []).append(sample.duration_ms)
    for ends, routes in durations.items():
        yield *ends, *max(routes.items(), key=lambda route: len(route[1]))
