"""`make reference`: the tables of `docs/reference/commands.md`, from the commands' signatures.

Typer makes the command line from the same signatures. Its own help is not used, because its wording
depends on Typer's version.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo

from jaxmorph.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
_TABLES = re.compile(r"(<!-- Commands: .*? -->\n).*?(?=<!-- end -->)", re.DOTALL)


def command_tables() -> str:
    """A heading, a sentence and a table for each command."""
    callbacks = [command.callback for command in app.registered_commands]
    return "\n".join(_command(callback) for callback in callbacks if callback is not None)


def _command(callback: Callable) -> str:
    hints = get_type_hints(callback, include_extras=True)
    parameters = inspect.signature(callback).parameters
    rows = [
        _parameter(name, *get_args(hints[name]), default=parameter.default)
        for name, parameter in parameters.items()
        if get_origin(hints[name]) is Annotated
    ]
    head = "| argument or option | value | default | what it is |\n|---|---|---|---|\n"
    sentence = inspect.cleandoc(callback.__doc__ or "").split("\n\n")[0]
    return f"## jaxmorph {callback.__name__}\n\n{sentence}\n\n{head if rows else ''}{''.join(rows)}"


_VALUES = {int: "whole number", float: "number", str: "text", Path: "path"}


def _parameter(name: str, kind: Any, declared: Any, *, default: Any) -> str:
    is_argument = isinstance(declared, ArgumentInfo)
    named = (declared.default, *(declared.param_decls or ()))  # the first one stands for a default
    flags = [flag for flag in named if isinstance(flag, str) and flag.startswith("-")]
    shown = name.upper() if is_argument else ", ".join(flags or [f"--{name.replace('_', '-')}"])
    kinds = {found for part in (kind, *get_args(kind)) for found in (part, *get_args(part))}
    value = next((_VALUES[found] for found in _VALUES if found in kinds), "")
    value = declared.metavar or value
    if any(get_origin(found) is list for found in kinds):
        value += ", repeatable"
    has_default = not any(default is none for none in (None, False, inspect.Parameter.empty))
    is_required = default is inspect.Parameter.empty
    first = f"`{default}`" if has_default else "required" if is_required else ""
    text = " ".join((declared.help or "").split()).replace("|", "\\|")
    return f"| `{shown}` | {value} | {first} | {text} |\n"


def with_command_tables(page: str) -> str:
    """The page with its tables made again."""
    return _TABLES.sub(lambda match: f"{match[1]}\n{command_tables()}\n", page)


if __name__ == "__main__":
    PAGE.write_text(with_command_tables(PAGE.read_text("utf-8")), encoding="utf-8")
