"""From measured timelines to what ops and links cost now: running medians, robust to spikes."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxmorph.control.copy_profile import CopyProfile
from jaxmorph.program.instructions import Transfer
from jaxmorph.schedule.copy_costs import CopyCosts
from jaxmorph.schedule.costs import Link, Links, LinkState, StageCosts
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline


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
        """The profile that `to_json` described."""
        costs = {name: tuple(values) for name, values in data["costs"].items()}
        links = {Link.parse(name): LinkState(**state) for name, state in data["links"].items()}
        sizes = data.get("stash_bytes")
        stash = StashBytes(*(tuple(row) for row in sizes.values())) if sizes else None
        told = data.get("copies")
        copies = CopyCosts(*(tuple(row) for row in told.values())) if told else None
        return cls(StageCosts(**costs), links, stash, copies)


class Profiler:
    """Keeps the recent steps' medians.

    Args:
        num_stages: Number of stages.
        stash_bytes: What one microbatch keeps on each stage, if that is known.
        num_steps: How many of the last steps count.
    """

    def __init__(
        self, num_stages: int, stash_bytes: StashBytes | None = None, num_steps: int = 20
    ) -> None:
        self._num_stages = num_stages
        self._stash_bytes = stash_bytes
        self._op_ms: dict[tuple[int, OpKind], deque[float]] = defaultdict(
            lambda: deque(maxlen=num_steps)
        )
        self._transfer_ms: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=num_steps)
        )
        self._held: dict[tuple[int, int], bool] = {}
        self._copies = CopyProfile(num_stages, num_steps)

    def observe(self, timeline: Timeline) -> None:
        """Take in one measured step.

        Args:
            timeline: The ops, transfers and copies of all stages.
        """
        self._copies.observe(timeline)
        for key, duration_ms in _median_op_ms(timeline):
            self._op_ms[key].append(duration_ms)
        for (source, destination, is_held), duration_ms in _median_transfer_ms(timeline):
            self._forget_other_route(source, destination, is_held)
            self._transfer_ms[source, destination].append(duration_ms)

    def profile(self) -> Profile:
        """The medians over the steps seen.

        Returns:
            Costs and link latencies. Where only full backwards have been seen, the whole of them
            counts as B and nothing as W.
        """
        forward = self._per_stage(OpKind.F)
        backward_input = self._per_stage(OpKind.B)
        backward_weight = self._per_stage(OpKind.W)
        if not any(backward_input):
            backward_input = self._per_stage(OpKind.BW)
        costs = StageCosts(forward, backward_input, backward_weight)
        return Profile(costs, self._links(), self._stash_bytes, self._copies.costs())

    def _per_stage(self, kind: OpKind) -> tuple[float, ...]:
        return tuple(
            float(np.median(seen)) if (seen := self._op_ms.get((stage, kind))) else 0.0
            for stage in range(self._num_stages)
        )

    def _forget_other_route(self, source: int, destination: int, is_held: bool) -> None:
        """What a direct transfer took says nothing of a delegated one, nor the other way round."""
        if self._held.get((source, destination), is_held) != is_held:
            self._transfer_ms[source, destination].clear()
        self._held[source, destination] = is_held

    def _links(self) -> dict[Link, LinkState]:
        links: dict[Link, LinkState] = {}
        for source, destination in self._transfer_ms:
            link = Link(min(source, destination), max(source, destination))
            links[link] = LinkState(
                forward_latency_ms=self._latency_ms(link.lower, link.upper),
                backward_latency_ms=self._latency_ms(link.upper, link.lower),
            )
        return links

    def _latency_ms(self, source: int, destination: int) -> float:
        seen = self._transfer_ms.get((source, destination))
        return float(np.median(seen)) if seen else 0.0


def _median_op_ms(timeline: Timeline) -> Iterator[tuple[tuple[int, OpKind], float]]:
    """Median time of each stage's ops of a kind: what one microbatch takes through all chunks."""
    durations: dict[tuple[int, OpKind, int], list[float]] = defaultdict(list)
    for span in timeline.spans():
        key = (span.stage, span.op.kind, span.op.chunk)
        durations[key].append(span.end_ms - span.start_ms)
    sums: dict[tuple[int, OpKind], float] = defaultdict(float)
    for (stage, kind, _), values in durations.items():
        sums[stage, kind] += float(np.median(values))
    yield from sums.items()


def _median_transfer_ms(timeline: Timeline) -> Iterator[tuple[tuple[int, int, bool], float]]:
    """Median time of the transfers of each direction, and whether they held queues.

    Both ends hold a direct transfer from when they reach it until it is over. The end that came
    later waited for nobody, so the smaller of the two durations is the transfer itself. A delegated
    one is its receiver's alone, from when it was sent.
    """
    ends_ms: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for span in timeline.transfers:
        ends_ms[span.label, span.holds_queue].append(span.end_ms - span.start_ms)
    durations: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for (label, is_held), seen in ends_ms.items():
        transfer = Transfer.parse(label)
        if len(seen) == (2 if is_held else 1):
            durations[transfer.source, transfer.destination, is_held].append(min(seen))
    return ((key, float(np.median(values))) for key, values in durations.items())
