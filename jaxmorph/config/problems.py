"""Turns pydantic's errors into one line each: key, what was got, what was expected."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from yaml import YAMLError

from jaxmorph.config.sections import LARGEST, MOST_BYTES, Expected, Section
from jaxmorph.config.yaml_text import format_yaml

CROSS_FIELD = "cross_field"  # the type of the pydantic error with which `Config` reports its rules
_MAX_QUOTED = 60  # characters of a value in an error


@dataclass(frozen=True)
class Problem:
    """What is wrong with a key (dotted; empty for the whole tree); `message` follows the key."""

    key: str
    message: str
    missing: bool = False


def mismatch(key: str, got: Any, expected: str) -> Problem:
    """The problem of a key with a wrong value."""
    return Problem(key, f"got {show(got)}, expected {expected}")


def unknown_key(key: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> Problem:
    """The problem of an unknown key, with the name that was probably meant, or else all names.

    Args:
        known: the names that exist in its place.
        elsewhere: dotted keys of other sections, one of which may end in the same name.
    """
    name = key.rpartition(".")[2]
    near = get_close_matches(name, known, n=1)
    near = near or [other for other in elsewhere if other.rpartition(".")[2] == name]
    hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"
    return Problem(key, f"unknown key; {hint}")


def printable(text: str) -> str:
    """The text with a space for each character that would break or garble a line."""
    return "".join(character if character.isprintable() else " " for character in text)


def show(value: Any) -> str:
    """A value as an error quotes it: one line of YAML, cut if it is long."""
    try:
        text = repr(value) if isinstance(value, str) else format_yaml(value, one_line=True)
    except YAMLError:  # a value given from Python may be anything
        text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


def find_problems(
    schema: type[BaseModel], error: ValidationError, tree: Mapping
) -> tuple[Problem, ...]:
    """Returns a problem for each key at fault; pydantic reports one for each branch of a union."""
    problems: dict[str, Problem] = {}
    for details in error.errors(include_url=False):
        for problem in _problems_of(schema, details, tree):
            problems.setdefault(problem.key, problem)
    return tuple(problems.values())


def _problems_of(schema: type[BaseModel], details: Any, tree: Mapping) -> Iterator[Problem]:
    if details["type"] == CROSS_FIELD:
        yield from details["ctx"]["problems"]
        return
    section, keys, field = _locate(schema, details["loc"])
    key = ".".join(map(str, keys))
    if details["type"] in ("extra_forbidden", "invalid_key"):
        yield unknown_key(key, tuple(section.model_fields), _all_keys(schema))
    elif details["type"] == "missing":
        yield Problem(key, f"missing, expected {expected_of(field, section)}", missing=True)
    elif (most := details.get("ctx", {}).get("le")) in (LARGEST, MOST_BYTES):
        yield mismatch(key, _value_at(tree, keys), f"a whole number of at most {most}")
    else:
        yield mismatch(key, _value_at(tree, keys), expected_of(field, section))


def _locate(
    schema: type[BaseModel], location: Sequence[int | str]
) -> tuple[type[BaseModel], tuple, FieldInfo | None]:
    """The innermost section, the key and the field of a location; its tail names union branches."""
    section, field = schema, None
    for depth, part in enumerate(location, start=1):
        if isinstance(part, int) and depth < len(location):
            continue  # an entry in a list of sections; the mistake is inside it
        if isinstance(part, int):
            return section, tuple(location), field
        field = section.model_fields.get(part)
        inner = field and section_in(field.annotation)
        if not inner or depth == len(location):
            return section, tuple(location[:depth]), field
        section = inner
    return section, (), field


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section of an annotation such as `Section | None`."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def expected_of(field: FieldInfo | None, within: type[BaseModel]) -> str:
    """What a field expects: by its `Expected`, its choices, or its section."""
    if field is None:
        return within.expected_of_other_keys if issubclass(within, Section) else "another value"
    for annotation in field.metadata:
        if isinstance(annotation, Expected):
            return annotation.text
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(field.annotation)))}"
    section = section_in(field.annotation)
    return f"a section of keys: {', '.join(section.model_fields)}" if section else "another value"


def _all_keys(schema: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """Every key of a schema, dotted."""
    keys = []
    for name, field in schema.model_fields.items():
        section = section_in(field.annotation)
        keys += [prefix + name, *(_all_keys(section, f"{prefix}{name}.") if section else ())]
    return tuple(keys)


def _value_at(tree: Any, keys: Sequence) -> Any:
    for key in keys:
        tree = tree[key]
    return tree
