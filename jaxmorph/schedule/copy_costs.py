"""What it costs to move a stash between a stage's device and host memory."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CopyCosts:
    """How long the copies of one microbatch's stash take, in milliseconds.

    With several chunks a stash is that of one of them. Copies of one direction follow one another,
    as they share its bandwidth; the two directions, and the ops, run beside each other.

    Args:
        offload_ms: From the device to host memory, one per stage.
        fetch_ms: From host memory to the device, one per stage.

    Raises:
        ValueError: Lengths that differ, or a duration that is negative or not finite.
    """

    offload_ms: tuple[float, ...]
    fetch_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.offload_ms) != len(self.fetch_ms):
            raise ValueError(
                f"fetch_ms: got {len(self.fetch_ms)} stages, expected {len(self.offload_ms)}, "
                "as offload_ms has"
            )
        durations = (*self.offload_ms, *self.fetch_ms)
        if not all(math.isfinite(ms) and ms >= 0 for ms in durations):
            raise ValueError(f"got {self}, expected finite numbers of ms, at least 0")

    @classmethod
    def uniform(cls, num_stages: int, copy_ms: float) -> "CopyCosts":
        """Copies that take the same on all stages, in both directions."""
        return cls((copy_ms,) * num_stages, (copy_ms,) * num_stages)
