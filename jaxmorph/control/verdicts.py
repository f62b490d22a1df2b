"""What detection says of a direction of a link, and what it goes by."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class LinkHealth(StrEnum):
    """The states of one direction of a link.

    Attributes:
        HEALTHY: Messages take about as long as when the link was first measured.
        SLOW: They take longer, for more than a message or two.
        DEAD: It has no direct path: what was sent on that did not arrive in time.
        RECOVERING: It was slow, and messages take no longer than when it was healthy; or dead, and
            its direct path is up; not for long enough yet.
    """

    HEALTHY = "healthy"
    SLOW = "slow"
    DEAD = "dead"
    RECOVERING = "recovering"


@dataclass(frozen=True)
class Evidence:
    """The numbers that a verdict rests on, all in milliseconds.

    Attributes:
        samples_ms: What the messages took that decided it, oldest first.
        baseline_ms: What a message takes while the link is healthy.
        spread_ms: How much that varies: a robust standard deviation.
        threshold_ms: What a message may take and still count as healthy.
    """

    samples_ms: tuple[float, ...]
    baseline_ms: float
    spread_ms: float
    threshold_ms: float


@dataclass(frozen=True)
class Verdict:
    """What detection says of one direction of a link.

    Attributes:
        latency_ms: What planning should take a message to last now, milliseconds.
        jitter_ms: How much that varies now: a robust standard deviation.
        step: The step after which it came to this state.
        reason: The same as a sentence.
    """

    source: int
    destination: int
    health: LinkHealth
    latency_ms: float
    jitter_ms: float
    step: int
    evidence: Evidence
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        """The verdict that `to_json` described."""
        evidence = {**data["evidence"], "samples_ms": tuple(data["evidence"]["samples_ms"])}
        health = LinkHealth(data["health"])
        return cls(**{**data, "health": health, "evidence": Evidence(**evidence)})
