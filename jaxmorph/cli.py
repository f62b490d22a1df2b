"""The ``jaxmorph`` command: parses its arguments and calls what they ask for."""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.plan_command import plan
from jaxmorph.validate_command import validate

# Typer brings its own copy of click or click itself, by version: this is that one's UsageError.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_Abort: type[Exception] = typer.Abort  # what Ctrl-C has become by then

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; the entry point of ``jaxmorph``.

    Args:
        arguments: Words after the command's name; those of this process when None.

    Raises:
        SystemExit: Always: 0 when done, 1 when the run failed, 2 for the user's mistake, which is
            told in one line on standard error, 130 on Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        sys.exit(app(words or ["--help"], prog_name="jaxmorph", standalone_mode=False))
    except UserError as error:
        _fail(2, " ".join(str(error).split()))
    except _UsageError as error:
        message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        _fail(2, " ".join(message.split()))
    except RunFailedError as error:
        _fail(1, str(error))
    except (KeyboardInterrupt, _Abort):
        _fail(130, "interrupted")


def _fail(code: int, message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxmorph {metadata.version('jaxmorph')}")
        raise typer.Exit


@app.callback()
def _jaxmorph(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Plan pipeline-parallel training around slow links, and train with the plan in JAX."""


app.command()(plan)
app.command()(validate)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, the value read as YAML.")
    ] = None,
    launch: Annotated[
        str,
        typer.Option(help="local: start the stages here; cluster: be one rank; auto: find out."),
    ] = "auto",
) -> int:
    """Train a model through a pipeline."""
    from jaxmorph.start import start_training

    start_training(config, overrides or [], launch)
    return 0


@app.command()
def compare(
    config: Annotated[Path, typer.Argument(help="A YAML file with a section `compare`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, the value read as YAML.")
    ] = None,
) -> int:
    """Run systems under conditions of links, and table and draw their steps."""
    from jaxmorph.compare import start_comparison

    return 1 if start_comparison(config, overrides or []) else 0


@app.command()
def model(
    factory: Annotated[str, typer.Option(help="The model's Python module.")] = "models.gpt2",
    preset: Annotated[
        str | None, typer.Option(help="One preset; if not given, all of them.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens in the vocabulary.")] = 50257,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 1024,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages to cut it into.")] = 1,
) -> int:
    """Print how many parameters presets have."""
    from jaxmorph.model_table import print_model_table

    names = [preset] if preset is not None else None
    print_model_table(Console(highlight=False), factory, names, vocab_size, sequence_length, stages)
    return 0
