"""Which bytes of a payload which thread copies.

First whole tiles, a CTA's turn each, in which thread t copies the vectors t, t + threads, and so
on, so that the threads of a warp always touch neighbouring memory. Then what is left in whole
vectors, spread over all threads of all CTAs, and at last up to 15 single bytes, by CTA 0.
"""

from dataclasses import dataclass

from jaxmorph.pallas_kernels.tuning import VECTOR_BYTES, CopyTuning


@dataclass(frozen=True)
class Tiling:
    """A payload's length, cut by a tuning.

    Attributes:
        ctas: Blocks of threads: the tuning's, or fewer if they would have nothing to copy.
        loads: Vectors of a tile that one thread copies.
    """

    num_bytes: int
    ctas: int
    threads: int
    loads: int

    @property
    def row_bytes(self) -> int:
        """What a CTA's threads copy together by one vector each."""
        return self.threads * VECTOR_BYTES

    @property
    def tile_bytes(self) -> int:
        """What a CTA has in flight."""
        return self.loads * self.row_bytes

    @property
    def num_tiles(self) -> int:
        """Whole ones; tile k is of CTA k % ctas."""
        return self.num_bytes // self.tile_bytes

    @property
    def vectors_at(self) -> int:
        """Where the single vectors begin, in bytes."""
        return self.num_tiles * self.tile_bytes

    @property
    def num_vectors(self) -> int:
        """Whole ones after the tiles; a row of them is a CTA's, and the next row the next CTA's."""
        return (self.num_bytes - self.vectors_at) // VECTOR_BYTES

    @property
    def tail_at(self) -> int:
        """Where the single bytes begin."""
        return self.vectors_at + self.num_vectors * VECTOR_BYTES

    @property
    def tail_bytes(self) -> int:
        """After the vectors; byte k is of thread k of CTA 0."""
        return self.num_bytes - self.tail_at


def tile(num_bytes: int, tuning: CopyTuning) -> Tiling:
    """Cut a payload.

    Args:
        num_bytes: The payload's length, at least 1.
        tuning: How many CTAs and threads there are.
    """
    rows = -(-num_bytes // (tuning.threads * VECTOR_BYTES))
    return Tiling(num_bytes, min(tuning.ctas, rows), tuning.threads, tuning.loads)
