"""What planning and simulation start from: how long ops take, how slow links are, what fits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

from jaxmorph.records import Link
from jaxmorph.schedule.ops import LiveUntil, Op, OpKind


@dataclass(frozen=True)
class StageCosts:
    """How long one microbatch's ops take on each stage, in milliseconds.

    Args:
        forward_ms: Duration of F, one per stage.
        backward_input_ms: Duration of B, one per stage.
        backward_weight_ms: Duration of W, one per stage.

    Raises:
        ValueError: No stages, lengths that differ, or a duration that is negative or not finite.
    """

    forward_ms: tuple[float, ...]
    backward_input_ms: tuple[float, ...]
    backward_weight_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.forward_ms:
            raise ValueError("forward_ms: got no stages, expected at least one")
        for field in ("forward_ms", "backward_input_ms", "backward_weight_ms"):
            values = getattr(self, field)
            _check_length(field, values, self.num_stages, "stage")
            _check_durations(field, values)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_ms: float,
        backward_input_ms: float,
        backward_weight_ms: float,
    ) -> "StageCosts":
        """Costs of ``num_stages`` stages that are all alike."""
        return cls(
            (forward_ms,) * num_stages,
            (backward_input_ms,) * num_stages,
            (backward_weight_ms,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_ms)

    def duration_ms(self, stage: int, kind: OpKind) -> float:
        """Duration of one op of ``kind`` on ``stage``; BW takes as long as B and W."""
        match kind:
            case OpKind.F:
                return self.forward_ms[stage]
            case OpKind.B:
                return self.backward_input_ms[stage]
            case OpKind.W:
                return self.backward_weight_ms[stage]
            case OpKind.BW:
                return self.backward_input_ms[stage] + self.backward_weight_ms[stage]


@dataclass(frozen=True)
class LinkDelay:
    """How late data arrives after the op that produced it has ended.

    A message that occupies its direction of the link keeps the next one waiting, and arrives its
    occupancy and latency after it got the link. Without occupancy, messages overlap.

    Args:
        forward_latency_ms: Lower to upper stage (activations), milliseconds.
        backward_latency_ms: Upper to lower stage (gradients), milliseconds.
        forward_occupancy_ms: How long a message occupies the direction to the upper stage: its
            bytes divided by the bandwidth, milliseconds.
        backward_occupancy_ms: The same of the direction to the lower stage.

    Raises:
        ValueError: A latency or an occupancy is negative or not finite.
    """

    forward_latency_ms: float = 0.0
    backward_latency_ms: float = 0.0
    forward_occupancy_ms: float = 0.0
    backward_occupancy_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_durations(field.name, (getattr(self, field.name),))

    @property
    def occupies(self) -> bool:
        """Whether a message keeps the next one of its direction waiting."""
        return self.forward_occupancy_ms > 0 or self.backward_occupancy_ms > 0


Links = Mapping[Link, LinkDelay]
"""The state of each link; a link that is not in the mapping delays nothing."""

NO_LATENCY: Links = MappingProxyType({})

JITTER_MARGIN = 0.7
"""A link that jitters is planned for at its latency and this many standard deviations.

Beyond the nominal latency a late message spreads over the step, while a margin that is not needed
costs only memory.
"""


def chain_links(latency_ms: Sequence[float]) -> dict[Link, LinkDelay]:
    """The state of links 0-1, 1-2, ..., each with one latency in both directions."""
    return {
        Link(stage, stage + 1): LinkDelay(latency, latency)
        for stage, latency in enumerate(latency_ms)
    }


def neighbour_links(links: Links, num_stages: int) -> tuple[LinkDelay, ...]:
    """The states of links 0-1, 1-2, ..., one for each pair of neighbours.

    Raises:
        ValueError: A link names a stage that does not exist.
    """
    for link in links:
        if not 0 <= link.lower < link.upper < num_stages:
            raise ValueError(f"link {link}: expected two of the stages 0 to {num_stages - 1}")
    healthy = LinkDelay()
    return tuple(links.get(Link(stage, stage + 1), healthy) for stage in range(num_stages - 1))


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


@dataclass(frozen=True)
class Limits:
    """How much each stage can hold: a number of microbatches, or of bytes, or anything.

    Args:
        max_live: Most microbatches whose stash a stage may hold at once, one per stage;
            None for no limit.
        live_until: The op that ends a microbatch's stash: ``B`` (the paper's count) or ``W``.
        max_stash_bytes: Most bytes of stash that a stage may hold at once, one per stage; None
            for no limit. Counted until W, with the sizes of ``stash_bytes``.
        stash_bytes: What one microbatch keeps on each stage; needed with ``max_stash_bytes``.

    Raises:
        ValueError: A cap below 1 (no microbatch could ever run), an unknown ``live_until``, both
            kinds of cap, or one in bytes without the stash's sizes.
    """

    max_live: tuple[int, ...] | None = None
    live_until: LiveUntil = "B"
    max_stash_bytes: tuple[int, ...] | None = None
    stash_bytes: StashBytes | None = None

    def __post_init__(self) -> None:
        if self.live_until not in ("B", "W"):
            raise ValueError(f"live_until: got {self.live_until!r}, expected 'B' or 'W'")
        for stage, cap in enumerate(self.max_live or ()):
            if cap < 1:
                raise ValueError(
                    f"max_live[{stage}]: got {cap}, expected at least 1 (a stage that can hold no "
                    "microbatch cannot run)"
                )
        if self.max_stash_bytes is not None:
            self._check_bytes()

    def _check_bytes(self) -> None:
        if self.max_live is not None:
            raise ValueError("max_stash_bytes: got max_live as well, expected one of the two")
        if self.stash_bytes is None:
            raise ValueError(
                "max_stash_bytes: got no stash_bytes, expected what one microbatch keeps"
            )

    def caps(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """How many microbatches may wait for their B on each stage, at most ``num_microbatches``.

        Raises:
            ValueError: The limits are not of ``num_stages`` stages.
        """
        counts = (stage.most_forwards for stage in self.stage_memory(num_stages, num_microbatches))
        return tuple(
            num_microbatches if count is None else max(0, min(count, num_microbatches))
            for count in counts
        )

    def stage_memory(self, num_stages: int, num_microbatches: int) -> tuple[StageMemory, ...]:
        """What a microbatch holds on each stage, and how much fits; without a limit, all do.

        Raises:
            ValueError: The limits are not of ``num_stages`` stages.
        """
        if self.max_stash_bytes is not None and self.stash_bytes is not None:
            _check_length("max_stash_bytes", self.max_stash_bytes, num_stages, "stage")
            sizes = (self.stash_bytes.after_forward, self.stash_bytes.after_backward_input)
            _check_length("stash_bytes", sizes[0], num_stages, "stage")
            return tuple(map(StageMemory, *sizes, self.max_stash_bytes))
        after_backward = 1 if self.live_until == "W" else 0
        caps = self.max_live or (num_microbatches,) * num_stages
        _check_length("max_live", caps, num_stages, "stage")
        return tuple(StageMemory(1, after_backward, min(cap, num_microbatches)) for cap in caps)


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


def _check_length(field: str, values: Sequence[float], expected: int, per: str) -> None:
    if len(values) != expected:
        raise ValueError(f"{field}: got {len(values)} values, expected {expected} (one per {per})")


def _check_durations(field: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            where = f"{field}[{index}]" if len(values) > 1 else field
            raise ValueError(f"{where}: got {value}, expected a finite number of ms, at least 0")
