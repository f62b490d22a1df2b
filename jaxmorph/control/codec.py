"""Plain values as JSON, and back: frozen dataclasses of numbers, words, tuples and mappings.

JSON has no mappings with other keys than words, and no number that is not finite. Such a mapping is
written as `{"entries": [[key, value], ...]}`, such a number as `{"number": "inf"}`.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

_Value = TypeVar("_Value")
_ENTRIES, _NUMBER = "entries", "number"


def encode(value: object) -> Any:
    """The value as JSON has it; `decode` makes an equal one of that."""
    return _to_json(_adapter(type(value)).dump_python(value))


def decode(kind: type[_Value], data: Any) -> _Value:
    """The value that `encode` has made JSON of.

    Raises:
        ValueError: The data is no such value; the error names each part that is wrong.
    """
    return _adapter(kind).validate_python(_from_json(data))


@cache
def _adapter(kind: type[_Value]) -> TypeAdapter[_Value]:
    return TypeAdapter(kind)


def _to_json(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return {_NUMBER: str(value)}
        case Mapping() if all(isinstance(key, str) for key in value) and not _is_written(value):
            return {key: _to_json(each) for key, each in value.items()}
        case Mapping():
            return {_ENTRIES: [[_to_json(key), _to_json(each)] for key, each in value.items()]}
        case set() | frozenset():
            return [_to_json(each) for each in sorted(value)]
        case list() | tuple():
            return [_to_json(each) for each in value]
        case _:
            return value


def _from_json(data: Any) -> Any:
    match data:
        case {"number": str(number)} if _is_written(data):
            return float(number)
        case {"entries": list(entries)} if _is_written(data):
            return {_key(_from_json(key)): _from_json(each) for key, each in entries}
        case dict():
            return {key: _from_json(each) for key, each in data.items()}
        case list():
            return [_from_json(each) for each in data]
        case _:
            return data


def _is_written(data: Mapping[Any, Any]) -> bool:
    """Whether it reads as what `_to_json` writes for something that JSON doesn't have."""
    return len(data) == 1 and not data.keys().isdisjoint((_ENTRIES, _NUMBER))


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, list) else value
