"""What a stage's microbatches hold, and how much of it fits: by count or in bytes, one rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxmorph.schedule.ops import Op, OpKind


@dataclass(frozen=True)
class StashBytes:
    """What one microbatch keeps on each stage, as the compiled programs say.

    Args:
        after_forward: From F until B, bytes, one per stage.
        after_backward_input: From B until W, bytes, one per stage.

    Raises:
        ValueError: Lengths that differ, or a size below 0.
    """

    after_forward: tuple[int, ...]
    after_backward_input: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.after_forward) != len(self.after_backward_input):
            raise ValueError(
                f"stash_bytes: got {len(self.after_forward)} stages after F and "
                f"{len(self.after_backward_input)} after B, expected the same"
            )
        if any(size < 0 for size in (*self.after_forward, *self.after_backward_input)):
            raise ValueError(f"stash_bytes: got {self}, expected sizes of at least 0 bytes")


class StageMemory(NamedTuple):
    """One stage's memory, in microbatches or in bytes.

    Args:
        forward_holds: What a microbatch holds from F until B.
        backward_holds: What it holds from B until W.
        room: What all microbatches together may hold.
    """

    forward_holds: int
    backward_holds: int
    room: int

    @property
    def needed(self) -> int:
        """The least room in which a step can run: that of one microbatch."""
        return max(self.forward_holds, self.backward_holds)

    @property
    def most_forwards(self) -> int | None:
        """How many microbatches may wait for their B at once; None for any number.

        Where B leaves more than it found, the next B needs room beside them, or none could ever
        end.
        """
        if not self.forward_holds:
            return None
        return (self.room - self.needed) // self.forward_holds + 1

    def slots(self, num_microbatches: int) -> Iterator[tuple[int, bool]]:
        """Numbers of places that limit the stage, and whether they are kept until W, not only B.

        Args:
            num_microbatches: How many there are: more places are no limit.
        """
        until_backward = self.most_forwards
        if until_backward is not None and 0 < until_backward < num_microbatches:
            yield until_backward, False
        least = min(self.forward_holds, self.backward_holds)
        if least and self.room // least < num_microbatches:
            yield max(1, self.room // least), True

    def peak(self, order: Sequence[Op]) -> int:
        """The most that a stage holds at once when it runs ``order``."""
        change = {
            OpKind.F: self.forward_holds,
            OpKind.B: self.backward_holds - self.forward_holds,
            OpKind.W: -self.backward_holds,
            OpKind.BW: -self.forward_holds,
        }
        held = peak = 0
        for kind, _, _ in order:
            held += change[kind]
            peak = max(peak, held)
        return peak
