"""The inputs of planning and simulation: durations of ops, delays of links, limits of memory."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from jaxmorph.records import Link
from jaxmorph.schedule.ops import LiveUntil, Op, OpKind


@dataclass(frozen=True)
class StageCosts:
    """Durations of one microbatch's F, B and W on each stage, in milliseconds.

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
        """Costs of ``num_stages`` equal stages."""
        return cls(
            (forward_ms,) * num_stages,
            (backward_input_ms,) * num_stages,
            (backward_weight_ms,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_ms)

    def duration_ms(self, stage: int, kind: OpKind) -> float:
        """Duration of one op of ``kind`` on ``stage``; BW takes B plus W."""
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
    """The time from the end of the producing op until its data arrives, for each direction.

    A message occupies its direction for its bytes divided by the bandwidth; the next message waits
    until then. It arrives once its occupancy and its latency have passed since it got the link.
    Without occupancy, messages overlap. ``forward`` is from the lower to the upper stage.

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
        """Whether messages of a direction wait for one another."""
        return self.forward_occupancy_ms > 0 or self.backward_occupancy_ms > 0


Links = Mapping[Link, LinkDelay]
"""The delay of each link; a link that is not in the mapping has none."""

NO_LATENCY: Links = MappingProxyType({})

JITTER_MARGIN = 0.7
"""The planner assumes the latency of a link plus this many standard deviations.

One message beyond the planned latency delays the whole step; an unused margin costs only memory.
"""


def chain_links(latency_ms: Sequence[float]) -> dict[Link, LinkDelay]:
    """The delays of links 0-1, 1-2, ..., each with the same latency in both directions."""
    return {
        Link(stage, stage + 1): LinkDelay(latency, latency)
        for stage, latency in enumerate(latency_ms)
    }


def require_stages_exist(links: Links, num_stages: int) -> None:
    """Checks the stages that links name.

    Raises:
        ValueError: A link names a stage that does not exist.
    """
    for link in links:
        if not 0 <= link.lower < link.upper < num_stages:
            raise ValueError(f"link {link}: expected two of the stages 0 to {num_stages - 1}")


@dataclass(frozen=True)
class StashBytes:
    """Bytes that one microbatch keeps on each stage: from F until B, and from B until W.

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
        after_forward: What a microbatch holds from F until B.
        after_backward: What it holds from B until W.
        room: What all microbatches together may hold.
    """

    after_forward: int
    after_backward: int
    room: int

    @property
    def needed(self) -> int:
        """The smallest room in which a step with split backwards can run: that of one microbatch.

        A whole backward needs ``after_forward`` only.
        """
        return max(self.after_forward, self.after_backward)

    @property
    def most_forwards(self) -> int | None:
        """How many microbatches may wait for their B at once; None for any number."""
        if not self.after_forward:
            return None
        # Where B leaves more than it frees, forwards must leave room for the next B, or no B could
        # ever run again.
        return (self.room - self.needed) // self.after_forward + 1

    def slots(self, num_microbatches: int) -> Iterator[tuple[int, bool]]:
        """The stage's limits as numbers of microbatches, and whether each counts until W (else B).

        A limit of at least ``num_microbatches`` has no effect and is left out.
        """
        until_backward = self.most_forwards
        if until_backward is not None and 0 < until_backward < num_microbatches:
            yield until_backward, False
        least = min(self.after_forward, self.after_backward)
        if least and self.room // least < num_microbatches:
            yield max(1, self.room // least), True

    def peak(self, order: Sequence[Op]) -> int:
        """The most that a stage holds at once when it runs ``order``."""
        change = {
            OpKind.F: self.after_forward,
            OpKind.B: self.after_backward - self.after_forward,
            OpKind.W: -self.after_backward,
            OpKind.BW: -self.after_forward,
        }
        return max(accumulate((op.group * change[op.kind] for op in order), initial=0))


@dataclass(frozen=True)
class Limits:
    """Limits of a schedule: how much stash a stage holds at once, and the groups of its W.

    Args:
        max_live: Most microbatches, one per stage.
        live_until: The op that frees a microbatch's stash: ``B`` (the paper's count) or ``W``.
        max_stash_bytes: Most bytes, one per stage, counted until W; needs ``stash_bytes``.
        weight_group: How many microbatches one W computes.

    Raises:
        ValueError: A cap or a group below 1, an unknown ``live_until``, both kinds of cap, or a cap
            in bytes without the stash's sizes.
    """

    max_live: tuple[int, ...] | None = None
    live_until: LiveUntil = "B"
    max_stash_bytes: tuple[int, ...] | None = None
    stash_bytes: StashBytes | None = None
    weight_group: int = 1

    def __post_init__(self) -> None:
        if self.weight_group < 1:
            raise ValueError(f"weight_group: got {self.weight_group}, expected at least 1")
        if self.live_until not in ("B", "W"):
            raise ValueError(f"live_until: got {self.live_until!r}, expected 'B' or 'W'")
        for stage, cap in enumerate(self.max_live or ()):
            if cap < 1:
                raise ValueError(
                    f"max_live[{stage}]: got {cap}, expected at least 1 (a stage that can hold no "
                    "microbatch cannot run)"
                )
        if self.max_stash_bytes is not None and self.max_live is not None:
            raise ValueError("max_stash_bytes: got max_live as well, expected one of the two")
        if self.max_stash_bytes is not None and self.stash_bytes is None:
            raise ValueError(
                "max_stash_bytes: got no stash_bytes, expected what one microbatch keeps"
            )

    def of_whole_backwards(self) -> "Limits":
        """The limits where B and W are one op, so that nothing is kept for W."""
        single = replace(self, weight_group=1)
        if self.stash_bytes is None:
            return single
        forward = self.stash_bytes.after_forward
        return replace(single, stash_bytes=StashBytes(forward, (0,) * len(forward)))

    def of_single_weights(self, num_stages: int, num_microbatches: int) -> "Limits":
        """Limits for a schedule of one W per microbatch that keeps these once its W are grouped.

        In a group, all stashes except the last wait longer for their W, so they need extra room.
        Every stage must have room for a group.
        """
        waiting = min(self.weight_group, num_microbatches) - 1
        if not waiting:
            return self
        memory = self.stage_memory(num_stages, num_microbatches)
        rooms = tuple(
            stage.room  # for all microbatches, so there is no limit to keep
            if stage.room >= num_microbatches * stage.needed
            else stage.room - waiting * stage.after_backward
            for stage in memory
        )
        if self.max_stash_bytes is not None:
            return replace(self, max_stash_bytes=rooms, weight_group=1)
        capped = self.max_live is not None and self.live_until == "W"
        return replace(self, max_live=rooms if capped else self.max_live, weight_group=1)

    def caps(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """How many microbatches may wait for their B on each stage, at most ``num_microbatches``.

        Raises:
            ValueError: The limits are for another number of stages.
        """
        counts = (stage.most_forwards for stage in self.stage_memory(num_stages, num_microbatches))
        return tuple(
            num_microbatches if count is None else max(0, min(count, num_microbatches))
            for count in counts
        )

    def stage_memory(self, num_stages: int, num_microbatches: int) -> tuple[StageMemory, ...]:
        """What a microbatch holds on each stage, and the room there; without a limit, all fit.

        Raises:
            ValueError: The limits are for another number of stages.
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
    """How long the copy of one stash to host memory and back takes on each stage, in milliseconds.

    With several chunks, each chunk has a stash of its own. Copies of one direction share its
    bandwidth, so they run one after another; the two directions and the ops overlap.

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
        _check_durations("offload_ms", self.offload_ms)
        _check_durations("fetch_ms", self.fetch_ms)

    @classmethod
    def uniform(cls, num_stages: int, copy_ms: float) -> "CopyCosts":
        """Copies that take the same time on all stages and in both directions."""
        return cls((copy_ms,) * num_stages, (copy_ms,) * num_stages)


def _check_length(field: str, values: Sequence[float], expected: int, per: str) -> None:
    if len(values) != expected:
        raise ValueError(f"{field}: got {len(values)} values, expected {expected} (one per {per})")


def _check_durations(field: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            where = f"{field}[{index}]" if len(values) > 1 else field
            raise ValueError(f"{where}: got {value}, expected a finite number of ms, at least 0")
