"""`make reference`: the tables of `docs/reference/run-files.md`, from `jaxmorph.records`.

What a field or a kind of events means stands below it in the source, and nowhere else.
"""

import ast
import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path

from jaxmorph.records import Event, EventKind, StepRecord

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "run-files.md"
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
    told = meanings(kind)
    rows = [f"| `{name.lower()}` | {told[name]} |\n" for name in names(kind)]
    return f"| {head} |\n|---|---|\n{''.join(rows)}"


def with_tables(page: str) -> str:
    """A page with its tables made anew."""
    kinds = {kind.__name__: kind for kind in (StepRecord, Event, EventKind)}
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(kinds[match[2]])}\n", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
