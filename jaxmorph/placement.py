"""Where virtual stages run: which chunk of which rank is which part of the pipeline.

A `Placement` knows what depends on it: neighbours, links, and the ranks of the two ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

from jaxmorph.records import Link

PlacementKind = Literal["wrap", "v"]
"""``wrap``: each chunk goes from the first rank to the last. ``v``: chunk 0 does, and chunk 1 goes
back, so that the first rank has both ends of the pipeline."""


class Place(NamedTuple):
    """Where a virtual stage runs: a rank and one of its chunks."""

    rank: int
    chunk: int


class Placement(NamedTuple):
    """S ranks with V chunks each: chunk c of rank r is virtual stage c * S + r.

    The pipeline goes around the ranks V times; with V = 1 a rank is a stage. In a V, which has two
    chunks, chunk 1 of rank r is virtual stage 2 S - 1 - r instead.
    """

    num_ranks: int
    num_chunks: int = 1
    kind: PlacementKind = "wrap"

    @property
    def num_virtual_stages(self) -> int:
        """Of all ranks together."""
        return self.num_ranks * self.num_chunks

    def virtual_stage(self, place: Place) -> int:
        """The number of a place in the order of the pipeline."""
        rank, chunk = place
        return chunk * self.num_ranks + (self._mirrored(rank) if self._goes_back(chunk) else rank)

    def place(self, virtual_stage: int) -> Place:
        """Where a virtual stage runs."""
        chunk, rank = divmod(virtual_stage, self.num_ranks)
        return Place(self._mirrored(rank) if self._goes_back(chunk) else rank, chunk)

    def places(self) -> list[Place]:
        """All places, in the order of the pipeline."""
        return [*map(self.place, range(self.num_virtual_stages))]

    def own_stages(self, rank: int) -> list[int]:
        """The virtual stages of a rank, in the order of its chunks."""
        return [self.virtual_stage(Place(rank, chunk)) for chunk in range(self.num_chunks)]

    @property
    def first(self) -> Place:
        """The place that reads the inputs and has the embedding."""
        return self.place(0)

    @property
    def last(self) -> Place:
        """The place that reads the targets and has the head."""
        return self.place(self.num_virtual_stages - 1)

    def after(self, place: Place) -> Place | None:
        """The next place, or None."""
        following = self.virtual_stage(place) + 1
        return self.place(following) if following < self.num_virtual_stages else None

    def before(self, place: Place) -> Place | None:
        """The previous place, or None."""
        virtual_stage = self.virtual_stage(place)
        return self.place(virtual_stage - 1) if virtual_stage else None

    def hops(self) -> Iterator[tuple[Place, Place]]:
        """The pairs of places that follow each other; one within a rank needs no message."""
        return pairwise(self.places())

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that activations and gradients take, each once, in the order of first use."""
        ranks = ((source.rank, target.rank) for source, target in self.hops())
        return tuple(dict.fromkeys(Link.of(*pair) for pair in ranks if len({*pair}) == 2))

    @property
    def ends_link(self) -> Link | None:
        """The link that tied gradients take; None if one rank has both ends of the pipeline."""
        first, last = self.first.rank, self.last.rank
        return Link.of(first, last) if first != last else None

    def _goes_back(self, chunk: int) -> bool:
        return self.kind == "v" and chunk == 1

    def _mirrored(self, rank: int) -> int:
        return self.num_ranks - 1 - rank


@dataclass(frozen=True)
class Replica:
    """One of several copies of the pipeline, which divide a step's microbatches among them."""

    index: int = 0
    count: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether there is no other replica."""
        return self.count == 1

    def share(self, array: Any) -> Any:
        """This replica's microbatches of an array whose first axis is the step's microbatches."""
        size = len(array) // self.count
        return array[self.index * size : (self.index + 1) * size]


ALONE = Replica()
"""The only replica."""


class Position(NamedTuple):
    """Where a rank is in the mesh; printed as `r1 stage 2`."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"r{self.replica} stage {self.stage}"


@dataclass(frozen=True)
class Layout:
    """Which rank is which stage of which replica, and on which host.

    Attributes:
        ranks: By replica and stage; at first stage s of replica r is rank r * S + s.
        host_of: The number of each rank's host.
    """

    ranks: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]

    @classmethod
    def first(cls, num_stages: int, num_replicas: int = 1, ranks_per_host: int = 1) -> "Layout":
        """The layout in which a run starts; the ranks of a host follow one another."""
        of_replica = (range(r * num_stages, (r + 1) * num_stages) for r in range(num_replicas))
        host_of = (rank // ranks_per_host for rank in range(num_stages * num_replicas))
        return cls(tuple(map(tuple, of_replica)), tuple(host_of))

    def on_hosts(self, names: Sequence[str]) -> "Layout":
        """The same layout, with each rank on the host that `names` has for it."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return replace(self, host_of=tuple(numbers[name] for name in names))

    @property
    def num_replicas(self) -> int:
        """Of the pipeline."""
        return len(self.ranks)

    @property
    def positions(self) -> dict[int, Position]:
        """Where each rank is."""
        return {
            rank: Position(replica, stage)
            for replica, of_replica in enumerate(self.ranks)
            for stage, rank in enumerate(of_replica)
        }

    def peers(self, stage: int) -> tuple[int, ...]:
        """The ranks of one stage, by replica."""
        return tuple(of_replica[stage] for of_replica in self.ranks)

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts that have ranks."""
        return sorted({*self.host_of})

    def hosts_of(self, ranks: tuple[int, int]) -> tuple[int, int]:
        """The numbers of two ranks' hosts, the lower one first."""
        low, high = sorted(self.host_of[rank] for rank in ranks)
        return low, high

    def on(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, own in enumerate(self.host_of) if own == host]

    def between(self, hosts: tuple[int, int]) -> list[tuple[int, int]]:
        """The pairs of a rank on the first host and a rank on the second."""
        low, high = hosts
        return [*product(self.on(low), self.on(high))]

    def swapped(self, a: int, b: int) -> "Layout":
        """The layout in which two ranks have changed places."""
        places = {a: b, b: a}
        ranks = tuple(tuple(places.get(rank, rank) for rank in each) for each in self.ranks)
        return replace(self, ranks=ranks)


def placement_of(name: str, num_stages: int, num_chunks: int) -> Placement:
    """Where the virtual stages of a schedule are; ``num_chunks`` is that of ``interleaved``."""
    match name:
        case "zb-v" | "dualpipe-v":
            return Placement(num_stages, 2, "v")
        case "interleaved":
            return Placement(num_stages, num_chunks)
        case _:
            return Placement(num_stages)
