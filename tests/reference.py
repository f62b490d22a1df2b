"""`make reference`: the tables of `docs/reference/`, from `jaxmorph.records` and `jaxmorph.config`.

What a field, a kind of events or a configuration key means stands below it in the source, and
nowhere else.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from jaxmorph.config import Config
from jaxmorph.config.problems import expected_of, section_in
from jaxmorph.config.yaml_text import format_yaml
from jaxmorph.records import Event, EventKind, StepRecord

_FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGE = _FOLDER / "run-files.md"
CONFIGURATION = _FOLDER / "configuration.md"
_TABLE = re.compile(r"(<!-- (\w+): `make reference` .*? -->\n).*?(?=<!-- end -->)", re.DOTALL)


def meanings(kind: type) -> dict[str, str]:
    """The text below each of a class's fields or members, by its name."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    return {
        name: " ".join(ast.literal_eval(text.value).split())
        for statement, text in pairwise(found.body)
        if (name := _assigned(statement)) is not None and isinstance(text, ast.Expr)
    }


def _assigned(statement: ast.stmt) -> str | None:
    target = None
    if isinstance(statement, ast.AnnAssign):
        target = statement.target
    elif isinstance(statement, ast.Assign):
        target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def names(kind: type) -> list[str]:
    """What a class's table has rows for: the fields of a line, or all members."""
    if is_dataclass(kind):
        return [item.name for item in fields(kind) if item.metadata.get("in_line") != "never"]
    return list(kind.__members__)


def table(kind: type) -> str:
    """A class's table."""
    head = "field | what it is" if is_dataclass(kind) else "kind | what has happened"
    texts = meanings(kind)
    rows = [f"| `{name.lower()}` | {texts[name]} |\n" for name in names(kind)]
    return f"| {head} |\n|---|---|\n{''.join(rows)}"


def with_tables(page: str) -> str:
    """A page with its tables made again."""
    kinds = {kind.__name__: kind for kind in (StepRecord, Event, EventKind)}

    def table_of(name: str) -> str:
        return configuration_tables() if name == "Config" else table(kinds[name])

    return _TABLE.sub(lambda match: f"{match[1]}\n{table_of(match[2])}\n", page)


def configuration_tables() -> str:
    """A heading and a table for each section of a configuration."""
    return "\n".join(
        f"{'#' * (2 + key.count('.'))} {key}\n\n{_linked(text)}\n\n"
        f"| key | values | default | |\n|---|---|---|---|\n{''.join(rows)}"
        for key, text, rows in _sections(Config, "", set())
    )


def _sections(
    within: type[BaseModel], prefix: str, seen: set[type]
) -> Iterator[tuple[str, str, list[str]]]:
    """Each section's key, text and rows; sections inside it follow it."""
    for name, field in within.model_fields.items():
        section = section_in(field.annotation)
        if section is None and within is Config:
            yield name, f"A key without a section, as in `{name}=...`.", [_row(Config, name)]
        elif section is not None and section not in seen:
            seen.add(section)
            rows = [_row(section, key) for key in section.model_fields]
            yield prefix + name, inspect.cleandoc(section.__doc__ or ""), rows
            yield from _sections(section, f"{prefix}{name}.", seen)


def _row(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    default = field.get_default(call_default_factory=True)
    plain = list(default) if isinstance(default, tuple) else default
    shown = "required" if field.is_required() else f"`{format_yaml(plain, one_line=True)}`"
    values = expected_of(field, section).replace("|", "\\|")
    return f"| `{name}` | {values} | {shown} | {_linked(_inherited(section).get(name, ''))} |\n"


def _inherited(section: type[BaseModel]) -> dict[str, str]:
    """The `meanings` of a section, with those of the sections that it extends."""
    own = [each for each in section.__mro__ if each.__module__.startswith("jaxmorph")]
    return {name: text for each in reversed(own) for name, text in meanings(each).items()}


def _linked(text: str) -> str:
    """The text with links in place of the names of pages."""
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


if __name__ == "__main__":
    for page in (PAGE, CONFIGURATION):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
