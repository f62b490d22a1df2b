"""How many threads copy, and how much each of them has on its way at a time."""

from dataclasses import dataclass

VECTOR_BYTES = 16
WARPGROUP_THREADS = 128
_MOST_THREADS = 1024
_MOST_CTAS = 1024
_MOST_VECTORS = 4096  # in flight in one CTA, so that 1024 threads have registers for theirs


@dataclass(frozen=True)
class CopyTuning:
    """The shape of a copy kernel.

    A copy over PCIe moves, at best, its bytes in flight in each round trip, until the bus is full.
    CTAs beyond that take multiprocessors from computation and give nothing.

    Attributes:
        ctas: Blocks of threads. A payload too short to occupy them gets fewer.
        threads: In each block; a multiple of 128 up to 1024.
        loads: 16-byte loads that a thread makes before it stores the first of them; threads times
            loads is at most 4096.

    Raises:
        ValueError: If one of them is out of bounds.
    """

    ctas: int
    threads: int = WARPGROUP_THREADS
    loads: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.ctas <= _MOST_CTAS:
            raise ValueError(f"copy tuning: got {self.ctas} CTAs, expected 1 to {_MOST_CTAS}")
        if self.threads % WARPGROUP_THREADS or not 0 < self.threads <= _MOST_THREADS:
            raise ValueError(
                f"copy tuning: got {self.threads} threads, expected a multiple of "
                f"{WARPGROUP_THREADS} up to {_MOST_THREADS}"
            )
        if not 1 <= self.loads <= _MOST_VECTORS // self.threads:
            raise ValueError(
                f"copy tuning: got {self.loads} loads in each of {self.threads} threads, "
                f"expected 1 to {_MOST_VECTORS // self.threads}"
            )

    @property
    def bytes_in_flight(self) -> int:
        """How much is on its way while no block waits."""
        return self.ctas * self.threads * self.loads * VECTOR_BYTES


# Reasoned, not measured: PCIe 5 x16 moves about 53 GB/s to the host and 35 GB/s from it for threads
# that copy (nvbandwidth's figures for the H100), with round trips of about 0.9 and 1.3 us, so some
# 48 KiB must be in flight either way. These have a third more, and twice as much again for reads,
# whose round trips a busy bus lengthens.
TO_HOST = CopyTuning(ctas=8, loads=4)
FROM_HOST = CopyTuning(ctas=8, loads=8)
