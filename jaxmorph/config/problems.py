"""One-line errors about a configuration: where, which key, what was got, what was expected."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from yaml import YAMLError

from jaxmorph.config.sections import LARGEST, MOST_BYTES, Expected, Section
from jaxmorph.config.yaml_text import format_yaml

CROSS_FIELD = "cross_field"  # the type of pydantic error by which `Config` reports its own rules
_LONGEST_VALUE = 60  # characters of a value quoted in an error


@dataclass(frozen=True)
class Problem:
    """Something wrong with a key (dotted; empty for the whole tree), in words that follow it."""

    key: str
    says: str
    missing: bool = False


def mismatch(key: str, got: Any, expected: str) -> Problem:
    """The problem of a key whose value is not what is expected."""
    return Problem(key, f"got {show(got)}, expected {expected}")


def unknown_key(key: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> Problem:
    """The problem of a key that does not exist, with the name that was probably meant.

    Args:
        known: the names that exist in its place.
        elsewhere: dotted keys of other places, of which one may end in the same name.

    Returns:
        The problem, naming the nearest known name, or else all of them.
    """
    name = key.rpartition(".")[2]
    near = get_close_matches(name, known, n=1)
    near = near or [other for other in elsewhere if other.rpartition(".")[2] == name]
    hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"
    return Problem(key, f"unknown key; {hint}")


def printable(text: str) -> str:
    """Text as it was typed, with spaces for characters that would break or garble a line."""
    return "".join(character if character.isprintable() else " " for character in text)


def show(value: Any) -> str:
    """A value as an error quotes it: on one line, in YAML's words, cut when long."""
    try:
        text = repr(value) if isinstance(value, str) else format_yaml(value, one_line=True)
    except YAMLError:  # from Python there may be anything
        text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def find_problems(
    schema: type[BaseModel], error: ValidationError, tree: Mapping
) -> tuple[Problem, ...]:
    """Says in the tree's own terms what pydantic found wrong with it.

    Args:
        schema: the model that was validated.
        tree: the values that were validated.

    Returns:
        One problem for each key at fault (pydantic reports each branch of a union).
    """
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
        yield Problem(key, f"missing, expected {_expected(field, section)}", missing=True)
    elif (most := details.get("ctx", {}).get("le")) in (LARGEST, MOST_BYTES):
        yield mismatch(key, _value_at(tree, keys), f"a whole number of at most {most}")
    else:
        yield mismatch(key, _value_at(tree, keys), _expected(field, section))


def _locate(
    schema: type[BaseModel], location: Sequence[int | str]
) -> tuple[type[BaseModel], tuple, FieldInfo | None]:
    """The innermost section, key and field of a location, whose tail names union branches."""
    section, field = schema, None
    for depth, part in enumerate(location, start=1):
        if isinstance(part, int) and depth < len(location):
            continue  # one of a list of sections; what is wrong is inside it
        if isinstance(part, int):
            return section, tuple(location), field
        field = section.model_fields.get(part)
        inner = field and _section_in(field.annotation)
        if not inner or depth == len(location):
            return section, tuple(location[:depth]), field
        section = inner
    return section, (), field


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section an annotation is, or may be (`Section | None`)."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def _expected(field: FieldInfo | None, within: type[BaseModel]) -> str:
    """What a field expects: its own words, its choices, or a section."""
    if field is None:
        return within.expected_of_others if issubclass(within, Section) else "another value"
    for note in field.metadata:
        if isinstance(note, Expected):
            return note.text
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(field.annotation)))}"
    section = _section_in(field.annotation)
    return f"a section of keys: {', '.join(section.model_fields)}" if section else "another value"


def _all_keys(schema: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """Every dotted key of a schema."""
    keys = []
    for name, field in schema.model_fields.items():
        section = _section_in(field.annotation)
        keys += [prefix + name, *(_all_keys(section, f"{prefix}{name}.") if section else ())]
    return tuple(keys)


def _value_at(tree: Any, keys: Sequence) -> Any:
    for key in keys:
        tree = tree[key]
    return tree
