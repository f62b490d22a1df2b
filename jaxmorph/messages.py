"""The messages that ranks send to their launcher, as `plain_json.tagged` writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxmorph.plain_json import Json, parse
from jaxmorph.records import Event, StepRecord


@dataclass(frozen=True)
class RunStarted:
    """Rank 0 begins to train: the fields of `RunHeader` that only a rank knows."""

    data: str
    num_parameters: int
    layers_per_stage: tuple[int, ...]
    schedule: str
    warmup_forwards: tuple[int, ...]
    cut_reason: str = ""
    evaluates: bool = False


@dataclass(frozen=True)
class StepDone:
    """The record of a finished step."""

    record: StepRecord


@dataclass(frozen=True)
class EventEmitted:
    """An event of the run."""

    event: Event


@dataclass(frozen=True)
class StepTimelines:
    """The timelines of a step, for its trace.

    Attributes:
        timelines: `planned` and `measured`: the JSON of each rank's `RankTimes`, not parsed.
        around_change: Whether it is saved because a change is near.
        replica: Whose step it is.
    """

    step: int
    timelines: Mapping[str, tuple[str, ...]]
    around_change: bool = False
    replica: int = 0


@dataclass(frozen=True)
class ProfileUpdated:
    """The latest costs of ops and links (`Profile.to_json`), sent with each sampled step."""

    profile: Json


@dataclass(frozen=True)
class LinksChanged:
    """The degraded links of a replica, with which it begins after a restart: `links_file`.

    Attributes:
        pipeline: The settings that determine the links and their usual delays.
        step: The step of the last change.
        directions: `KnownDirection`s as JSON objects.
    """

    pipeline: Json
    step: int
    directions: tuple[Json, ...]
    replica: int = 0


@dataclass(frozen=True)
class PhaseEnded:
    """A rank has finished a phase of its start, one of `PHASES`.

    Attributes:
        time_s: By the machine's monotonic clock.
    """

    phase: str
    time_s: float


RunMessage: TypeAlias = (
    RunStarted
    | StepDone
    | EventEmitted
    | StepTimelines
    | ProfileUpdated
    | LinksChanged
    | PhaseEnded
)
"""All messages of a rank of a run; only `PhaseEnded` comes from other ranks than rank 0."""

ReplicaMessage: TypeAlias = EventEmitted | StepTimelines | LinksChanged
"""What rank 0 passes on for replicas other than its own."""


def parse_run_message(data: Any) -> RunMessage:
    """Reads a rank's message.

    Raises:
        ParseError: It is not a `RunMessage`.
    """
    return parse(RunMessage, data, "a message of a rank")


@dataclass(frozen=True)
class RankFailed:
    """A rank of any program cannot continue; the launcher itself reads this message.

    Attributes:
        time_s: By the machine's monotonic clock.
        is_user_error: Whether the user made a mistake, which `reason` explains completely.
        says_all: Whether all ranks fail with the same reason, to which no log adds anything.
        follows_others: Whether another rank's failure seems to be the cause.
        silent_s: How long it made no progress, if it has stalled.
        waited_for: The rank that this one waited for in vain, if that is why it failed.
    """

    follows_others: bool
    time_s: float
    rank: int
    reason: str
    is_user_error: bool = False
    says_all: bool = False
    silent_s: float = 0.0
    waited_for: int | None = None
