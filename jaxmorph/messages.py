"""Plain values as JSON and back, and the messages that ranks send to the process that started them.

A dataclass is written as an object of its fields. `parse` reads it back and checks every field:
what is wrong is one line, such as ``rank 2: layers: got 'all', expected a list``. Keys that the
dataclass doesn't have are ignored: other versions may write more.

It does without pydantic: ranks read what they exchange by it, and the check of a GPU
(`benchmarks.gpu`) runs ranks where only JAX, Flax, Optax and NumPy are installed.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxmorph.records import Event, StepRecord

Json: TypeAlias = dict[str, Any]
"""A JSON object whose form another module owns, such as `Timeline.to_json`."""

_Value = TypeVar("_Value")
_Read: TypeAlias = Callable[[Any], Any]
_LONGEST = 60  # characters of a value quoted in an error


class ParseError(ValueError):
    """JSON that is not what its reader expects; the message is one line: where, got, expected."""


class _MismatchError(ValueError):
    """The same, before it is known where the value comes from; built from the inside out."""

    def __init__(self, says: str, path: str = "") -> None:
        super().__init__(f"{path}: {says}" if path else says)
        self.says, self.path = says, path

    def within(self, name: str) -> "_MismatchError":
        """The same, one level further out."""
        return _MismatchError(self.says, f"{name}.{self.path}" if self.path else name)


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

    Types are those of JSON, `float`, for which null is NaN, tuples, mappings from strings,
    optional values, and dataclasses of them. `Any` is left as it is.

    Raises:
        ParseError: It is another type's; the error begins with `where`.
    """
    try:
        return _reader(kind)(data)
    except _MismatchError as error:
        raise ParseError(f"{where}: {error}") from None


def parse_line(kind: type[_Value], line: str, where: str) -> _Value:
    """A value of a type, from a line of JSON; see `parse`."""
    try:
        data = json.loads(line)
    except ValueError:
        raise ParseError(f"{where}: got {_shown(line)}, expected a line of JSON") from None
    return parse(kind, data, where)


def _mismatch(value: Any, expected: str) -> _MismatchError:
    return _MismatchError(f"got {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@cache
def _reader(kind: Any) -> _Read:
    """What reads values of a type; made once, as a long run has a hundred thousand lines."""
    outer, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if outer in (Union, UnionType) and NoneType in inner:
        (choice,) = (each for each in inner if each is not NoneType)
        read = _reader(choice)
        return lambda value: None if value is None else read(value)
    if outer is Literal:
        return _choice_reader({each: each for each in inner})
    if outer is tuple and inner[1:] == (...,):
        return _tuple_reader(_reader(inner[0]))
    if outer is tuple:
        return _places_reader([_reader(each) for each in inner])
    if outer in (Mapping, dict):
        return _mapping_reader(_reader(inner[1]))
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice_reader({each.value: each for each in kind})
    raise TypeError(f"got the type {kind}, expected one that `parse` lists")


def _choice_reader(choices: Mapping[Any, Any]) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise _mismatch(value, f"one of {', '.join(choices)}")
        return choices[value]

    return read


def _plain_reader(kind: type, expected: str) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _mismatch(value, expected)
        return value

    return read


def _read_number(value: Any) -> float:
    if value is None:  # JSON has no word for a number that is not finite
        return math.nan
    if type(value) not in (int, float):
        raise _mismatch(value, "a number")
    return float(value)


_PLAIN: Mapping[Any, _Read] = {
    Any: lambda value: value,
    bool: _plain_reader(bool, "true or false"),
    int: _plain_reader(int, "a whole number"),
    str: _plain_reader(str, "a text"),
    float: _read_number,
}


def _tuple_reader(read: _Read) -> _Read:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _mismatch(value, "a list")
        return tuple(_read_parts((at, read, each) for at, each in enumerate(value)).values())

    return read_all


def _places_reader(reads: Sequence[_Read]) -> _Read:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(reads):
            raise _mismatch(value, f"a list of {len(reads)}")
        parts = ((at, *each) for at, each in enumerate(zip(reads, value, strict=True)))
        return tuple(_read_parts(parts).values())

    return read_all


def _mapping_reader(read: _Read) -> _Read:
    def read_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _mismatch(value, "an object")
        return _read_parts((name, read, each) for name, each in value.items())

    return read_all


def _read_parts(parts: Iterable[tuple[Any, _Read, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, read, value in parts:
        try:
            found[name] = read(value)
        except _MismatchError as error:
            raise error.within(str(name)) from None
    return found


def _dataclass_reader(kind: type) -> _Read:
    types = get_type_hints(kind)
    parts = [
        (item.name, _reader(types[item.name]), item.default is item.default_factory is MISSING)
        for item in fields(kind)
    ]

    def read_all(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _mismatch(value, f"the fields of {kind.__name__}")
        for name, _, is_required in parts:
            if is_required and name not in value:
                raise _MismatchError("missing", name)
        there = ((name, read, value[name]) for name, read, _ in parts if name in value)
        return kind(**_read_parts(there))

    return read_all


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
