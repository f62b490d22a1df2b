"""How many threads copy, how much each has in flight, and which thread copies which bytes.

First come whole tiles, dealt out to the CTAs in turn; in a tile thread t copies the vectors t,
t + threads, and so on, so that the threads of a warp always touch neighbouring memory. Then come
single vectors, spread over all threads of all CTAs, and last up to 15 single bytes, by CTA 0.
"""

from dataclasses import dataclass

VECTOR_BYTES = 16
WARPGROUP_THREADS = 128


@dataclass(frozen=True)
class CopyTuning:
    """The shape of a copy kernel.

    In each round trip a copy over PCIe moves at most its bytes in flight, until the bus is full.
    More CTAs than that take multiprocessors from computation and gain nothing.

    Attributes:
        ctas: Thread blocks; a short payload gets fewer.
        threads: In each CTA; a multiple of 128 up to 1024.
        loads: 16-byte loads that a thread issues before its first store; threads times loads is at
            most 4096, so that 1024 threads have registers for theirs.
    """

    ctas: int
    threads: int = WARPGROUP_THREADS
    loads: int = 4


# Reasoned, not measured: PCIe 5 x16 moves about 53 GB/s to the host and 35 GB/s from it for threads
# that copy (nvbandwidth's figures for the H100), with round trips of about 0.9 and 1.3 us, so some
# 48 KiB must be in flight either way. `TO_HOST` has a third more. `FROM_HOST` has twice as much as
# `TO_HOST`: a busy bus lengthens the round trips of reads.
TO_HOST = CopyTuning(ctas=8, loads=4)
FROM_HOST = CopyTuning(ctas=8, loads=8)


@dataclass(frozen=True)
class Tiling:
    """The division of a payload among threads.

    Attributes:
        ctas: The tuning's, or fewer if some would have nothing to copy.
        loads: The vectors of a tile that one thread copies.
    """

    num_bytes: int
    ctas: int
    threads: int
    loads: int

    @property
    def row_bytes(self) -> int:
        """The bytes that a CTA's threads copy with one vector each."""
        return self.threads * VECTOR_BYTES

    @property
    def tile_bytes(self) -> int:
        """The bytes that a CTA has in flight."""
        return self.loads * self.row_bytes

    @property
    def num_tiles(self) -> int:
        """Whole tiles; tile k belongs to CTA k % ctas."""
        return self.num_bytes // self.tile_bytes

    @property
    def vectors_at(self) -> int:
        """The offset of the single vectors, in bytes."""
        return self.num_tiles * self.tile_bytes

    @property
    def num_vectors(self) -> int:
        """Whole vectors after the tiles; consecutive rows belong to consecutive CTAs."""
        return (self.num_bytes - self.vectors_at) // VECTOR_BYTES

    @property
    def tail_at(self) -> int:
        """The offset of the single bytes."""
        return self.vectors_at + self.num_vectors * VECTOR_BYTES

    @property
    def tail_bytes(self) -> int:
        """Bytes after the vectors; byte k belongs to thread k of CTA 0."""
        return self.num_bytes - self.tail_at


def tile(num_bytes: int, tuning: CopyTuning) -> Tiling:
    """Divide a payload of at least one byte."""
    rows = -(-num_bytes // (tuning.threads * VECTOR_BYTES))
    return Tiling(num_bytes, min(tuning.ctas, rows), tuning.threads, tuning.loads)
