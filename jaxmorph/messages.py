"""The messages that ranks send to the process that started them, as `tagged` writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxmorph.plain_json import Json, parse
from jaxmorph.records import Event, StepRecord


@dataclass(frozen=True)
class RunStarted:
    """Rank 0 begins to train: the fields of `RunHeader` that a rank alone knows."""

    data: str
    num_parameters: int
    layers_per_stage: tuple[int, ...]
    schedule: str
    warmup_forwards: tuple[int, ...]
    cut_reason: str = ""
    evaluates: bool = False


@dataclass(frozen=True)
class StepDone:
    """A step is over."""

    record: StepRecord


@dataclass(frozen=True)
class EventEmitted:
    """An event beside the steps."""

    event: Event


@dataclass(frozen=True)
class StepTimelines:
    """A step that leaves a trace.

    Attributes:
        timelines: `planned` and `measured`, as `Timeline.to_json` writes them.
        around_change: Whether the trace is kept because a change is near.
    """

    step: int
    timelines: Mapping[str, Json]
    around_change: bool = False


@dataclass(frozen=True)
class ProfileUpdated:
    """What ops and links cost by now, as `Profile.to_json` writes it; with each sampled step."""

    profile: Json


@dataclass(frozen=True)
class LinksChanged:
    """What the run has to know of degraded links when it starts again: `links.json`.

    Attributes:
        pipeline: What decides which links there are, and what a message on them takes.
        step: The one that showed it.
        ways: Each direction, as `KnownDirection.to_json` writes it.
    """

    pipeline: Json
    step: int
    ways: tuple[Json, ...]


@dataclass(frozen=True)
class ObservationKept:
    """A line of `control/`, from which `jaxmorph replay` makes the run's decisions again.

    Attributes:
        begins: Whether a new file begins with it.
    """

    line: str
    begins: bool


@dataclass(frozen=True)
class PhaseEnded:
    """A rank has come to the end of a phase of its start, one of `PHASES`.

    Attributes:
        time_s: When, by the machine's monotonic clock.
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
    | ObservationKept
    | PhaseEnded
)
"""What a rank of a run sends to the process that started it; all but `PhaseEnded` from rank 0."""


def parse_run_message(data: Any) -> RunMessage:
    """The message that a rank sent.

    Raises:
        ParseError: It is none.
    """
    return parse(RunMessage, data, "a message of a rank")


@dataclass(frozen=True)
class RankFailed:
    """A rank that can't go on, of whatever program; the launcher reads this one itself.

    Attributes:
        time_s: When, by the machine's monotonic clock.
        is_user_error: Whether the user made a mistake, of which `reason` says all.
        says_all: Whether all ranks fail with the same reason, to which no log would add anything.
        follows_others: Whether the failure seems to be the consequence of another rank's.
    """

    follows_others: bool
    time_s: float
    rank: int
    reason: str
    is_user_error: bool = False
    says_all: bool = False
