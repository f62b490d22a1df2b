"""Overrides, `section.key=value` with the value read as YAML, and errors that name them.

An error names the place to mend: the override that set a value, or else the file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmorph.config.problems import Problem, printable
from jaxmorph.config.yaml_text import NotYamlError, parse_yaml
from jaxmorph.errors import UserError


@dataclass(frozen=True)
class Override:
    """One override: its text as typed, the dotted key and the value that replaces the key's."""

    text: str
    key: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Reads `section.key=value`.

        Args:
            text: the override as typed; an empty value is null.

        Returns:
            The override.

        Raises:
            UserError: there is no key, no `=`, or the value is not YAML.
        """
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise UserError(f"{as_typed(text)}: expected section.key=value")
        try:
            return cls(text, key, parse_yaml(value))
        except NotYamlError as error:
            raise UserError(f"{as_typed(text)}: the value is not YAML: {error}") from error


def as_typed(text: str) -> str:
    """An override as errors name it, on one line."""
    line = printable(text)
    return f"{line if len(line) <= 100 else line[:97] + '...'} (command line)"


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns the tree with each override's value in its place, the last one winning.

    A number in a key is one of a list: `emulation.links.0.latency_ms`.
    """
    result = dict(tree)
    for override in overrides:
        result = _with_value(result, override.key.split("."), override.value)
    return result


def _with_value(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """The tree with a value put in; what is in the way and can't hold the next key is replaced."""
    if not keys:
        return value
    first, *rest = keys
    if isinstance(tree, list) and first.isdecimal() and int(first) < len(tree):
        at = int(first)
        return [*tree[:at], _with_value(tree[at], rest, value), *tree[at + 1 :]]
    under = tree if isinstance(tree, Mapping) else {}
    return {**under, first: _with_value(under.get(first), rest, value)}


_KEY = re.compile(r"\w+(\.\w+)*(\[\d+\])?")


@dataclass(frozen=True)
class Origin:
    """A configuration file as the user named it, and the overrides put over it."""

    path: str
    overrides: tuple[Override, ...]

    def line(self, problem: Problem) -> str:
        """The one-line error for a problem, naming the file or the override at fault."""
        key = problem.key.partition("[")[0]  # an override gives a list as a whole, or one for all
        for override in reversed(self.overrides):
            if override.key == key:
                where = "" if problem.key == key else f"{problem.key}: "
                return f"{as_typed(override.text)}: {where}{problem.says}"
            above = key.startswith(f"{override.key}.")
            below = override.key.startswith(f"{key}.") and not problem.missing
            if above or below:
                return f"{as_typed(override.text)}: {problem.key}: {problem.says}"
        return f"{self.path}: {problem.key}: {problem.says}"

    def error(self, problems: Sequence[Problem]) -> UserError:
        """The first of the problems as an error that counts the others."""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return UserError(self.line(problems[0]) + more)


def placed_error(path: str | Path, overrides: Sequence[str], error: UserError) -> UserError:
    """The same error with the file, or the override, that its key came from in front.

    Args:
        error: of the form `section.key: what is wrong`, or `section.key[3]: ...`; of another form
            it is left as it is.

    Returns:
        The error to raise, in the form of `load_config`'s own.
    """
    key, colon, says = str(error).partition(": ")
    if not colon or not _KEY.fullmatch(key):
        return error
    return _origin(path, overrides).error([Problem(key, says)])


@contextmanager
def placing_errors(path: str | Path, overrides: Sequence[str]) -> Iterator[None]:
    """While this lasts, errors come out as `placed_error` has them.

    Raises:
        UserError: where one was raised meanwhile.
    """
    try:
        yield
    except UserError as error:
        raise placed_error(path, overrides, error) from error


def _origin(path: str | Path, overrides: Sequence[str]) -> Origin:
    return Origin(str(path), tuple(Override.parse(text) for text in overrides))
