"""The chain of virtual stages that a microbatch passes, laid over the ranks."""

from typing import NamedTuple


class Place(NamedTuple):
    """Where a virtual stage runs: a rank, and which of the rank's chunks it is."""

    rank: int
    chunk: int


class Pipeline(NamedTuple):
    """S ranks with V chunks each: chunk c of rank r is virtual stage c * S + r.

    So the chain goes around the ranks V times, and with V = 1 a rank is a stage.

    Args:
        num_chunks: Number of virtual stages each rank runs, V.
    """

    num_ranks: int
    num_chunks: int = 1

    def after(self, place: Place) -> Place | None:
        """Where activations go from here; None at the end of the chain, which has the head."""
        rank, chunk = place
        if rank + 1 < self.num_ranks:
            return Place(rank + 1, chunk)
        return Place(0, chunk + 1) if chunk + 1 < self.num_chunks else None

    def before(self, place: Place) -> Place | None:
        """Where gradients go from here; None at the start of the chain, which embeds."""
        rank, chunk = place
        if rank > 0:
            return Place(rank - 1, chunk)
        return Place(self.num_ranks - 1, chunk - 1) if chunk > 0 else None
