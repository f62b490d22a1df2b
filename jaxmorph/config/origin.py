"""Where a configuration's values came from, so that an error can name the place to mend."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxmorph.config.overrides import Override, as_typed
from jaxmorph.config.problems import Problem
from jaxmorph.errors import UserError

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
