"""The ``jaxmorph`` command: parses its arguments and calls what they ask for."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.schedule.answer import answer_lines, solve
from jaxmorph.schedule.draw import save_timelines
from jaxmorph.schedule.draw.save import require_format
from jaxmorph.schedule.problem import parse_problem
from jaxmorph.schedule.report import print_answer

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


@app.callback()
def _jaxmorph() -> None:
    """Pipeline-parallel training in JAX that stays fast when links turn slow or fail."""


_PER_STAGE = "One number, or one per stage: 10 or 10,12,9,10."
_PER_LINK = "One number, or one per link: 20 or 20,0,0."
_FIELD = re.compile(r"(output file|\w+)(?=[\[:])")  # what an error begins with
_OPTIONS = {"num_stages": "stages", "num_microbatches": "microbatches", "output file": "out"}


@app.command()
def plan(
    context: typer.Context,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches in a step.")] = 12,
    forward_ms: Annotated[str, typer.Option(help=f"Time of F. {_PER_STAGE}")] = "10",
    backward_input_ms: Annotated[str, typer.Option(help=f"Time of B. {_PER_STAGE}")] = "10",
    backward_weight_ms: Annotated[str, typer.Option(help=f"Time of W. {_PER_STAGE}")] = "10",
    link_ms: Annotated[str, typer.Option(help=f"Latency, both directions. {_PER_LINK}")] = "0",
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, zb-h1, zb-h2, paper or adaptive.")
    ] = "adaptive",
    max_live: Annotated[
        str | None, typer.Option(help="Most microbatches a stage may hold: 5 or 7,5,3,1.")
    ] = None,
    live_until: Annotated[str, typer.Option(help="A microbatch is held until its B or W.")] = "B",
    planned_link_ms: Annotated[
        str | None, typer.Option(help="Latency the planner believes, if not --link-ms.")
    ] = None,
    warmup_forwards: Annotated[
        str | None, typer.Option(help="Forwards before the first backward: 7,5,3,1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write a .png, .svg, .txt or .json (Chrome trace).")
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(help="Answer this file's problems, one JSON object a line.")
    ] = None,
) -> int:
    """Plan a step, simulate it, and draw it."""
    if batch is not None:
        _require_alone(context, "batch")
        return _answer_batch(batch)
    fields = {
        "name": schedule,
        "num_stages": stages,
        "num_microbatches": microbatches,
        "forward_ms": _numbers(forward_ms),
        "backward_input_ms": _numbers(backward_input_ms),
        "backward_weight_ms": _numbers(backward_weight_ms),
        "link_ms": _numbers(link_ms),
        "schedule": schedule,
        "max_live": _numbers(max_live),
        "live_until": live_until,
        "planned_link_ms": _numbers(planned_link_ms),
        "warmup_forwards": _numbers(warmup_forwards),
    }
    with _options_named_in_errors():
        if out is not None:
            require_format(out)
        answer = solve(parse_problem(fields))
        if out is not None:
            save_timelines(out, {answer.schedule.name: answer.timeline})
    if as_json:
        typer.echo(json.dumps(answer.to_json(), allow_nan=False))
    else:
        print_answer(answer, Console(highlight=False))
    return 0


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
def model(
    factory: Annotated[str, typer.Option(help="The model's Python module.")] = "models.gpt2",
    preset: Annotated[
        str | None, typer.Option(help="One preset; all of them if not given.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens in the vocabulary.")] = 50257,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 1024,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages to cut it into.")] = 1,
) -> int:
    """Print the parameter counts of a model's presets, found without making them."""
    from jaxmorph.model_table import print_model_table

    names = [preset] if preset is not None else None
    print_model_table(Console(highlight=False), factory, names, vocab_size, sequence_length, stages)
    return 0


@contextmanager
def _options_named_in_errors() -> Iterator[None]:
    """Has an error that begins with a problem's field begin with the option it came from."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if found := _FIELD.match(text):
            option = _OPTIONS.get(found[0], found[0].replace("_", "-"))
            text = f"--{option}{text[found.end() :]}"
        raise UserError(text) from error


def _require_alone(context: typer.Context, name: str) -> None:
    """Refuses an option that would not be heeded, because ``name`` was given too."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name != name and source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name}: got {parameter.opts[0]} as well, expected no other option")


def _answer_batch(path: Path) -> int:
    """Prints an answer a line; returns the exit code, 2 when any line was bad."""
    bad = False
    try:
        with path.open("rb") as lines:
            for answer in answer_lines(lines):
                bad = bad or "error" in answer
                typer.echo(json.dumps(answer, allow_nan=False))
    except OSError as error:
        raise UserError(f"--batch: cannot read {path}: {error.strerror}") from error
    return 2 if bad else 0


def _numbers(text: str | None) -> object:
    """``10`` as a number, ``10,12`` as a list; words stay text, for ``parse_problem`` to refuse."""
    if text is None:
        return None
    values = [_number(word) for word in text.split(",")]
    return values if len(values) > 1 else values[0]


def _number(word: str) -> object:
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word
