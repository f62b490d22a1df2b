"""Overrides (`section.key=value`, the value read as YAML), and errors that name them.

An error names the place to correct: the override that set the value, or else the file.
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
    """One override: its text as typed, the dotted key, and the value."""

    text: str
    key: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Reads `section.key=value`; an empty value is null.

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
    """An override as errors quote it, on one line."""
    line = printable(text)
    return f"{line if len(line) <= 100 else line[:97] + '...'} (command line)"


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns the tree with the overrides applied in order.

    A number in a key is an index into a list: `emulation.links.0.latency_ms`.
    """
    result = dict(tree)
    for override in overrides:
        result = _with_value(result, override.key.split("."), override.value)
    return result


def _with_value(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """The tree with a value at a key; a parent that can't hold the next key is replaced."""
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
    """Where a configuration comes from: a file, as the user named it, and overrides."""

    path: str
    overrides: tuple[Override, ...]

    @classmethod
    def of(cls, path: str | Path, overrides: Sequence[str]) -> "Origin":
        """A file, and overrides as typed."""
        return cls(printable(str(path)), tuple(map(Override.parse, overrides)))

    def line(self, problem: Problem) -> str:
        """The error for a problem, on one line, with the file or the override at fault."""
        key = problem.key.partition("[")[0]  # `key[3]`: an override sets the whole list
        for override in reversed(self.overrides):
            if override.key == key:
                where = "" if problem.key == key else f"{problem.key}: "
                return f"{as_typed(override.text)}: {where}{problem.message}"
            above = key.startswith(f"{override.key}.")
            below = override.key.startswith(f"{key}.") and not problem.missing
            if above or below:
                return f"{as_typed(override.text)}: {problem.key}: {problem.message}"
        return f"{self.path}: {problem.key}: {problem.message}"

    def error(self, problems: Sequence[Problem]) -> UserError:
        """The error for the first problem, with the number of others."""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return UserError(self.line(problems[0]) + more)


def located_error(path: str | Path, overrides: Sequence[str], error: UserError) -> UserError:
    """Prefixes an error with the file, or the override, that its key comes from.

    Rules that need the model or the data are checked after the configuration is loaded; this gives
    their errors the form of `load_config`'s. An error that begins with no key is returned as it is.
    """
    key, colon, message = str(error).partition(": ")
    if not colon or not _KEY.fullmatch(key):
        return error
    return Origin.of(path, overrides).error([Problem(key, message)])


@contextmanager
def locating_errors(path: str | Path, overrides: Sequence[str]) -> Iterator[None]:
    """Raises the `UserError`s of its block as `located_error` returns them."""
    try:
        yield
    except UserError as error:
        raise located_error(path, overrides, error) from error
