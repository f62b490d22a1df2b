"""Where a configuration's values came from, so that an error can name the place to mend."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmorph.config.overrides import Override, as_typed
from jaxmorph.config.problems import Problem, mismatch, unknown_key
from jaxmorph.errors import UserError


@dataclass(frozen=True)
class Origin:
    """A configuration file as the user named it, and the overrides put over it."""

    path: str
    overrides: tuple[Override, ...]

    def line(self, problem: Problem) -> str:
        """The one-line error for a problem, naming the file or the override at fault."""
        for override in reversed(self.overrides):
            if override.key == problem.key:
                return f"{as_typed(override.text)}: {problem.says}"
            above = problem.key.startswith(f"{override.key}.")
            below = override.key.startswith(f"{problem.key}.") and not problem.missing
            if above or below:
                return f"{as_typed(override.text)}: {problem.key}: {problem.says}"
        return f"{self.path}: {problem.key}: {problem.says}"

    def error(self, problems: Sequence[Problem]) -> UserError:
        """The first of the problems as an error that counts the others."""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return UserError(self.line(problems[0]) + more)


def config_error(
    path: str | Path, overrides: Sequence[str], key: str, got: Any, expected: str
) -> UserError:
    """The error for a value that only shows itself wrong once the model or the data are known.

    Args:
        path: the configuration file.
        overrides: the command line's overrides.
        key: the dotted key at fault.
        got: its value.
        expected: what was expected, in words that follow "expected".

    Returns:
        The error to raise, in the form of `load_config`'s own.
    """
    return _origin(path, overrides).error([mismatch(key, got, expected)])


def unknown_key_error(
    path: str | Path, overrides: Sequence[str], key: str, known: Sequence[str]
) -> UserError:
    """The error for a key that its reader (a model's factory) does not know.

    Args:
        path: the configuration file.
        overrides: the command line's overrides.
        key: the dotted key.
        known: the names that exist in its place, of which the nearest is suggested.

    Returns:
        The error to raise, in the form of `load_config`'s own.
    """
    return _origin(path, overrides).error([unknown_key(key, known)])


def _origin(path: str | Path, overrides: Sequence[str]) -> Origin:
    return Origin(str(path), tuple(Override.parse(text) for text in overrides))
