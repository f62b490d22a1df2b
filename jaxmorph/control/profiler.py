"""The current costs of ops, links and copies: running medians of ranks' times."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from jaxmorph.control.link_state import link_of
from jaxmorph.control.measurements import OpTime, RunningEstimate, StepSamples, by_direction
from jaxmorph.control.rank_times import RankTimes, copies_ms_of, joined_messages, op_times_of
from jaxmorph.records import Link
from jaxmorph.schedule.costs import CopyCosts, LinkDelay, Links, StageCosts, StashBytes
from jaxmorph.schedule.ops import OpKind

_RECENT_STEPS = 20


@dataclass(frozen=True)
class Profile:
    """The measured costs of a step.

    Attributes:
        costs: Milliseconds by stage and kind of op, all chunks together.
        stash_bytes: What one microbatch keeps on each stage; None: unknown.
        copies: The time to move a stash to host memory and back; None: none was moved.
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
        """The profile that `to_json` of any version wrote."""
        sizes, copies = data.get("stash_bytes"), data.get("copies")
        return cls(
            StageCosts(**{name: tuple(values) for name, values in data["costs"].items()}),
            {Link.parse(name): LinkDelay(**state) for name, state in data["links"].items()},
            StashBytes(*(tuple(row) for row in sizes.values())) if sizes else None,
            CopyCosts(*(tuple(row) for row in copies.values())) if copies else None,
        )


class Profiler:
    """Keeps the medians of recent steps."""

    def __init__(self, num_stages: int, stash_bytes: StashBytes | None = None) -> None:
        self._num_stages = num_stages
        self._stash_bytes = stash_bytes
        estimate = partial(RunningEstimate, _RECENT_STEPS)
        self._ops: defaultdict[tuple[int, OpKind], RunningEstimate] = defaultdict(estimate)
        self._links: defaultdict[tuple[int, int], RunningEstimate] = defaultdict(estimate)
        self._is_direct: dict[tuple[int, int], bool] = {}
        self._copies: defaultdict[tuple[int, str], RunningEstimate] = defaultdict(estimate)

    def observe(self, ranks: Sequence[RankTimes]) -> None:
        """Add a measured step by all ranks' times."""
        self.add(op_times_of(ranks), copies_ms_of(ranks), by_direction(joined_messages(ranks)))

    def add(
        self,
        ops: Mapping[tuple[int, OpKind], OpTime],
        copies_ms: Mapping[tuple[int, str], float],
        samples: StepSamples,
    ) -> None:
        """Add a step by its `op_times_of`, `copies_ms_of` and samples."""
        for key, took_ms in copies_ms.items():
            self._copies[key].add(took_ms)
        for key, time in ops.items():
            self._ops[key].add(time.median_ms)
        for (source, destination), each in samples.items():
            self._forget_other_route(source, destination, each.is_direct)
            self._links[source, destination].add(each.median_ms)

    def profile(self) -> Profile:
        """The medians of recent steps; a run of full backwards counts them as B and none as W."""
        return Profile(self._costs(), self._link_states(), self._stash_bytes, self._copy_costs())

    def _costs(self) -> StageCosts:
        split = any(kind in (OpKind.B, OpKind.W) for _, kind in self._ops)
        kinds = (OpKind.F, OpKind.B if split else OpKind.BW, OpKind.W)
        stages = range(self._num_stages)
        return StageCosts(
            *(tuple(_median_of(self._ops, (stage, kind)) for stage in stages) for kind in kinds)
        )

    def _forget_other_route(self, source: int, destination: int, is_direct: bool) -> None:
        """Drop the times of the other route: they say nothing about this one."""
        if self._is_direct.get((source, destination), is_direct) != is_direct:
            del self._links[source, destination]
        self._is_direct[source, destination] = is_direct

    def _link_states(self) -> dict[Link, LinkDelay]:
        links = set(map(link_of, self._links))
        return {
            link: LinkDelay(_median_of(self._links, link), _median_of(self._links, link[::-1]))
            for link in sorted(links)
        }

    def _copy_costs(self) -> CopyCosts | None:
        """None before any copy; a stage without copies gets the slowest stage's time."""
        if not self._copies:
            return None
        return CopyCosts(*map(self._copies_per_stage, ("offload", "fetch")))

    def _copies_per_stage(self, kind: str) -> tuple[float, ...]:
        seen = {stage: each.median for (stage, of), each in self._copies.items() if of == kind}
        slowest_ms = max(seen.values(), default=0.0)
        return tuple(seen.get(stage, slowest_ms) for stage in range(self._num_stages))


def _median_of(estimates: Mapping[Any, RunningEstimate], key: tuple[Any, ...]) -> float:
    """0 for what was never seen."""
    seen = estimates.get(key)  # unlike [], adds no entry to a defaultdict
    return 0.0 if seen is None else seen.median
