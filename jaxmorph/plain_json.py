"""Converts dataclasses of numbers, text, tuples and mappings to JSON and back.

A dataclass becomes an object of its fields. `parse` reads it back and checks every field; an error
is one line, such as ``rank 2: layers: got 'all', expected a list``. It ignores unknown keys, which
another version may have written.

The type of a field decides how it is written where JSON has no such type:

- A NamedTuple is a list, and a mapping whose keys are not text is a list of ``[key, value]``.
- A member of a union of dataclasses has the key ``kind``, the name of its class.
- A number that is not finite is ``Infinity``, ``-Infinity`` or ``NaN``, as Python reads it.
- Bytes are their base64 text, or stand apart (`dump_apart`).

JSON in files has a checksum (`with_sum`), so that no damaged value is taken for a valid one.

This module does not use pydantic, because ranks need it to exchange messages and the GPU check
(`benchmarks.gpu`) runs ranks with only JAX, Flax, Optax and NumPy installed.
"""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints
from zlib import crc32

Json: TypeAlias = dict[str, Any]
"""A JSON object whose form another module owns, such as `Timeline.to_json`."""

_Value = TypeVar("_Value")
_Read: TypeAlias = Callable[[Any], Any]
_Write: TypeAlias = Callable[[Any], Any]
_SUM, _BYTES = "crc32", "bytes"
_LONGEST = 60  # characters of a value quoted in an error


class ParseError(ValueError):
    """JSON of another form than expected; the message is one line: where, got, expected."""


class _MismatchError(ValueError):
    """A `ParseError` whose path is still being built, from the inside out."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason, self.path = reason, path

    def within(self, name: str) -> "_MismatchError":
        """The error as seen from one level further out."""
        return _MismatchError(self.reason, f"{name}.{self.path}" if self.path else name)


def dump(value: Any) -> str:
    """The JSON of a value that may contain dataclasses and configuration sections."""
    return json.dumps(value, default=_as_json)


def _as_json(value: Any) -> Any:
    return b64encode(value).decode() if isinstance(value, bytes) else as_object(value)


def dump_apart(value: Any) -> tuple[str, bytes]:
    """As `dump`, but bytes are returned separately: the JSON has their number and checksum.

    Base64 would take ten times as long. `with_parts` puts them back.
    """
    parts: list[bytes] = []

    def write(value: Any) -> Any:
        if not isinstance(value, bytes):
            return as_object(value)
        parts.append(value)
        return {_BYTES: len(value), _SUM: f"{crc32(value):08x}"}

    return json.dumps(value, default=write), b"".join(parts)


def with_parts(data: Any, read: Callable[[int], bytes], where: str) -> Any:
    """The result of `json.loads`, with the bytes that `dump_apart` took out.

    Args:
        read: Returns the next bytes, as many as asked for; fewer at their end.

    Raises:
        EOFError: There are fewer bytes.
        ParseError: There are other bytes than were written.
    """
    if isinstance(data, list):
        return [with_parts(each, read, where) for each in data]
    if not isinstance(data, dict):
        return data
    if data.keys() != {_BYTES, _SUM}:
        return {key: with_parts(each, read, where) for key, each in data.items()}
    part = read(data[_BYTES])
    if len(part) < data[_BYTES]:
        raise EOFError
    if f"{crc32(part):08x}" != data[_SUM]:
        raise ParseError(f"{where}: got other bytes than were written, by their {_SUM}")
    return part


def as_object(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, as `dump` writes them."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if not is_dataclass(value):
        raise TypeError(f"got {value!r}, expected plain values and dataclasses")
    return {name: write(getattr(value, name)) for name, write in _writers(type(value))}


def with_sum(line: str) -> str:
    """Adds a checksum to a JSON object on one line, as `dump` writes it, under the last key.

    `parse_line` and `without_sum` compare it.
    """
    return f'{line[:-1]}, "{_SUM}": "{_sum_of(line)}"}}'


def without_sum(data: Any, where: str) -> Any:
    """Takes the checksum out of the result of `json.loads`, if it has one, as those of files do.

    Raises:
        ParseError: The object is not the one that was written.
    """
    if not isinstance(data, dict) or _SUM not in data:
        return data
    values = {key: value for key, value in data.items() if key != _SUM}
    if data[_SUM] != _sum_of(json.dumps(values)):
        raise ParseError(f"{where}: got other values than were written, by their {_SUM}")
    return values


def _sum_of(line: str) -> str:
    return f"{crc32(line.encode()):08x}"


def tagged(message: Any) -> dict[str, Any]:
    """A dataclass as an object with its class name as ``kind``, as `parse` reads a union."""
    return {"kind": type(message).__name__} | as_object(message)


@cache
def _writers(kind: type) -> tuple[tuple[str, _Write], ...]:
    types = get_type_hints(kind)
    return tuple((item.name, _writer(types[item.name])) for item in fields(kind))


def _writer(kind: Any) -> _Write:
    """The function that turns a value of a type into one that `json` can write."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        choices = [each for each in inner if each is not NoneType]
        is_tagged = len(choices) > 1 and all(map(is_dataclass, choices))
        write = tagged if is_tagged else _writer(choices[0])
        return write if write is _unchanged else _or_none(write)
    if outer is tuple and inner[1:] == (...,):
        write = _writer(inner[0])
        return write if write is _unchanged else lambda value: [write(each) for each in value]
    if outer in (Mapping, dict):
        write = _writer(inner[1])
        if not _is_text(inner[0]):
            return lambda value: [[key, write(each)] for key, each in value.items()]
        if write is not _unchanged:
            return lambda value: {key: write(each) for key, each in value.items()}
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value


def _or_none(do: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else do(value)


def _is_text(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, str))


def parse(kind: type[_Value] | UnionType, data: Any, where: str) -> _Value:
    """Reads a value of a type from the result of `json.loads`.

    Types are those of JSON, `float` (null is NaN), `bytes`, enums, tuples, mappings, optional
    values, dataclasses and NamedTuples of them, unions of dataclasses, and sections of the
    configuration, which check themselves. `Any` accepts everything.

    Raises:
        ParseError: The value has another type; the message begins with `where`.
    """
    try:
        return _reader(kind)(data)
    except _MismatchError as error:
        raise ParseError(f"{where}: {error}") from None


def parse_line(kind: type[_Value] | UnionType, line: str, where: str) -> _Value:
    """Reads a value of a type from a line of JSON, and compares its checksum; see `parse`."""
    try:
        data = json.loads(line)
    except ValueError:
        raise ParseError(f"{where}: got {_shown(line)}, expected a line of JSON") from None
    return parse(kind, without_sum(data, where), where)


def _mismatch(value: Any, expected: str) -> _MismatchError:
    return _MismatchError(f"got {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@cache
def _reader(kind: Any) -> _Read:
    """The function that reads values of a type; cached, as a long run has 100,000 lines."""
    outer, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if outer in (Union, UnionType):
        choices = [each for each in inner if each is not NoneType]
        read = _reader(choices[0]) if len(choices) == 1 else _union_reader(choices)
        return _or_none(read) if NoneType in inner else read
    if outer is Literal:
        return _choice_reader({each: each for each in inner})
    if outer is tuple and inner[1:] == (...,):
        return _tuple_reader(_reader(inner[0]))
    if outer is tuple:
        return _places_reader(tuple, dict(enumerate(map(_reader, inner))))
    if outer in (Mapping, dict):
        return _mapping_reader(*inner)
    return _class_reader(kind)


def _class_reader(kind: Any) -> _Read:
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if hasattr(kind, "model_validate"):  # a section of the configuration
        read = _reader(Json)
        return lambda value: _make(kind, read(value))
    if hasattr(kind, "_make"):  # a NamedTuple
        types = get_type_hints(kind).items()
        return _places_reader(kind._make, {name: _reader(each) for name, each in types})
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
    if value is None:  # some writers write null for a number that is not finite
        return math.nan
    if type(value) not in (int, float):
        raise _mismatch(value, "a number")
    return float(value)


def _read_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):  # of a message that was not JSON as a whole
        return value
    try:
        return b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise _mismatch(value, "bytes in base64") from None


_PLAIN: Mapping[Any, _Read] = {
    Any: _unchanged,
    bool: _plain_reader(bool, "true or false"),
    bytes: _read_bytes,
    int: _plain_reader(int, "a whole number"),
    str: _plain_reader(str, "a text"),
    float: _read_number,
}


def _tuple_reader(read: _Read) -> _Read:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _mismatch(value, "a list")
        return tuple(_read_parts(range(len(value)), repeat(read), value))

    return read_all


def _places_reader(make: Callable[[Iterable[Any]], Any], reads: Mapping[Any, _Read]) -> _Read:
    def read_all(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(reads):
            raise _mismatch(value, f"a list of {len(reads)}")
        return make(_read_parts(reads, reads.values(), value))

    return read_all


def _mapping_reader(keys: Any, values: Any) -> _Read:
    read, are_text = _reader(values), _is_text(keys)
    read_pairs = _reader(tuple[tuple[keys, Any], ...])

    def read_all(value: Any) -> dict[Any, Any]:
        if are_text and not isinstance(value, Mapping):
            raise _mismatch(value, "an object")
        if keys is not str:
            value = dict(read_pairs([*value.items()] if are_text else value))
        return dict(zip(value, _read_parts(value, repeat(read), value.values()), strict=True))

    return read_all


def _read_parts(names: Iterable[Any], reads: Iterable[_Read], values: Collection[Any]) -> list[Any]:
    """Reads each value; an error names the value."""
    found: list[Any] = []
    try:
        for read, value in zip(reads, values, strict=False):
            found.append(read(value))
    except _MismatchError as error:
        raise error.within(str([*names][len(found)])) from None
    return found


def _dataclass_reader(kind: type) -> _Read:
    types = get_type_hints(kind)
    reads = {item.name: _reader(types[item.name]) for item in fields(kind)}
    required = [
        item.name for item in fields(kind) if item.default is item.default_factory is MISSING
    ]

    def read_all(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _mismatch(value, f"the fields of {kind.__name__}")
        for name in required:
            if name not in value:
                raise _MismatchError("missing", name)
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, read in reads.items():
                if name in value:
                    found[name] = read(value[name])
        except _MismatchError as error:
            raise error.within(name) from None
        return _make(kind, found)

    return read_all


def _make(kind: type, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except ValueError as error:  # from the class's own check
        raise _MismatchError(" ".join(str(error).split())) from None


def _union_reader(kinds: Sequence[type]) -> _Read:
    reads = {kind.__name__: _reader(kind) for kind in kinds}

    def read_one(value: Any) -> Any:
        name = value.get("kind") if isinstance(value, Mapping) else None
        if name not in reads:
            raise _mismatch(value, f"one of the kinds {', '.join(reads)}")
        return _read_parts([name], [reads[name]], [value])[0]

    return read_one
