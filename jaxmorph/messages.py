"""Plain values as JSON and back, and the messages that ranks send to the process that started them.

A dataclass is written as an object of its fields. `parse` reads it back and checks every field;
keys that the dataclass doesn't have are ignored, as other versions may write more.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from jaxmorph.records import Event, StepRecord

Json: TypeAlias = dict[str, Any]
"""A JSON object whose form another module owns, such as `Timeline.to_json`."""

_Value = TypeVar("_Value")
_LONGEST = 60  # characters of a value quoted in an error


class ParseError(ValueError):
    """JSON that is not what its reader expects.

    The message is one line, such as ``rank 2: layers.0: got 'all', expected a valid integer``.
    """


def dump(value: Any) -> str:
    """The JSON of a value, in which dataclasses may stand anywhere; NaN stays NaN."""
    return json.dumps(value, default=as_object)


def as_object(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by their names; what they hold stays as it is."""
    if not is_dataclass(value):
        raise TypeError(f"got {value!r}, expected plain values and dataclasses")
    return {item.name: getattr(value, item.name) for item in fields(value)}


def parse(kind: type[_Value], data: Any, where: str) -> _Value:
    """A value of a type, from what `json.loads` gives.

    Raises:
        ParseError: It is another type's; the error begins with `where`.
    """
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise ParseError(f"{where}: {_first_problem(error)}") from None


def parse_line(kind: type[_Value], line: str, where: str) -> _Value:
    """A value of a type, from a line of JSON; see `parse`."""
    try:
        return _adapter(kind).validate_json(line)
    except ValidationError as error:
        raise ParseError(f"{where}: {_first_problem(error)}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first_problem(error: ValidationError) -> str:
    """The first field that is wrong: which, what it is, and what was expected."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    expected = {
        "json_invalid": "expected a line of JSON",
        "unexpected_keyword_argument": "expected no such field",
    }.get(first["type"], first["msg"].replace("Input should be", "expected"))
    is_missing = first["type"] == "missing"
    says = "missing" if is_missing else f"got {_shown(first['input'])}, {expected}"
    return f"{field}: {says}" if field else says


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def tagged(message: Any) -> dict[str, Any]:
    """A dataclass as an object that says which one it is, for `parse_tagged`."""
    return {"kind": type(message).__name__} | as_object(message)


def parse_tagged(kinds: Iterable[type[_Value]], data: Any, where: str) -> _Value:
    """A value of one of several dataclasses, from what `tagged` wrote.

    Raises:
        ParseError: It is none of them, or lacks a field.
    """
    by_name = {kind.__name__: kind for kind in kinds}
    name = data.get("kind") if isinstance(data, Mapping) else None
    if name not in by_name:
        expected = f"a message of the kinds {', '.join(by_name)}"
        raise ParseError(f"{where}: got {_shown(data)}, expected {expected}")
    return parse(by_name[name], data, f"{where}: {name}")


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
        ways: Each direction, as `KnownWay.to_json` writes it.
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
    return parse_tagged(get_args(RunMessage), data, "a message of a rank")


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
