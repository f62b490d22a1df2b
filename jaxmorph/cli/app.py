"""The ``jaxmorph`` command: its subcommands, their options, and its exit codes."""

import errno
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import jaxmorph
from jaxmorph.cli.doctor import doctor
from jaxmorph.cli.plan import plan
from jaxmorph.cli.trace import trace
from jaxmorph.cli.validate import validate
from jaxmorph.errors import RunFailedError, RunStoppedError, UserError
from jaxmorph.output import write_stderr

# Some versions of Typer use click, others a copy of it: this is UsageError of either.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_Abort: type[Exception] = typer.Abort  # Typer turns Ctrl-C into this

_STARTERS_FOLDER = Path(__file__).parent / "configs"  # links to the repository's, files in a wheel
_STARTERS = {
    "demo": ("demo.yaml",),
    "llama": ("llama.yaml",),
    "own-model": ("causal_mixer.yaml", "causal_mixer.py"),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the entry point of ``jaxmorph``.

    Args:
        arguments: Default: those of this process.

    Raises:
        SystemExit: Always: 0 when done; 1 when the run failed; 2 for the user's mistake, with one
            line on standard error; 130 on Ctrl-C; 143 when SIGTERM or SIGHUP asked the run to end
            and it has saved.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(words or ["--help"], prog_name="jaxmorph", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except UserError as error:
        _fail(2, " ".join(str(error).split()))
    except _UsageError as error:
        message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        _fail(2, " ".join(message.split()))
    except RunFailedError as error:
        _fail(1, str(error))
    except RunStoppedError as error:
        write_stderr(str(error))
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, _Abort):
        _fail(130, "interrupted")
    except OSError as error:
        _end_for(error)


def _end_for(error: OSError) -> NoReturn:
    """End if a file may not be read, or standard output not be written; raise any other error."""
    if error.filename is not None and error.errno in (
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
    ):
        _fail(2, f"{error.filename}: {error.strerror}")
    if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    # Otherwise the interpreter would try to write the rest when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        sys.exit(1)  # `head` has read enough
    _fail(1, f"standard output: cannot be written: {error.strerror}")


def _fail(code: int, message: str) -> NoReturn:
    write_stderr(f"error: {message}")
    sys.exit(code)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxmorph {jaxmorph.__version__}")
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
app.command()(trace)
app.command()(doctor)


@app.command()
def init(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help=f"What to begin with: {', '.join(_STARTERS)}.")
    ] = "demo",
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder of the new files; made if missing.")
    ] = Path(),
) -> int:
    """Write a configuration to start from, such as DIR/demo.yaml; own-model: with a module."""
    if name not in _STARTERS:
        raise UserError(f"NAME: got {name!r}, expected one of {', '.join(_STARTERS)}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"DIR: got {folder}, expected a folder")
    files = [(folder / file, (_STARTERS_FOLDER / file).read_bytes()) for file in _STARTERS[name]]
    for path, _ in files:
        if path.exists():
            raise UserError(f"DIR: got {folder}, expected a folder without {path.name}")
    for path, content in files:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise UserError(f"DIR: {path}: cannot be written: {error.strerror}") from error
    config, *others = (path for path, _ in files)
    written = " and ".join(map(str, (config, *others)))
    typer.echo(f"wrote {written}: jaxmorph train {shlex.quote(str(config))}")
    return 0


@app.command()
def train(
    config: Annotated[
        str | None, typer.Argument(help="The run's YAML file; leave it out with --resume RUN_DIR.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value; the value is read as YAML.")
    ] = None,
    launch: Annotated[
        str,
        typer.Option(
            help="local: start one process per stage on this machine; cluster: join a cluster's "
            "job as one rank; auto: detect a cluster."
        ),
    ] = "auto",
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Resume the run in this directory from its last checkpoint. auto, with CONFIG: "
            "resume the run in run.dir if it has a checkpoint, and begin there if it has none.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the configuration, and print how much memory each stage needs; start and "
            "write nothing.",
        ),
    ] = False,
) -> int:
    """Train a model with a pipeline of stages."""
    from jaxmorph.cli.dry_run import print_dry_run
    from jaxmorph.training.start import resume_or_start, resume_training, start_training

    words = [*([config] if config is not None else []), *(overrides or [])]
    if dry_run:
        if config is None or resume is not None or launch != "auto":
            got = "--resume" if resume is not None else f"--launch {launch}"
            got = "no configuration" if config is None and resume is None else got
            raise UserError(f"--dry-run: got {got}, expected a configuration's YAML file alone")
        print_dry_run(Path(config), overrides or [], Console(highlight=False, markup=False))
    elif resume not in (None, "auto"):
        if nothing_to_do := resume_training(Path(resume), words, launch):
            typer.echo(nothing_to_do)
    elif config is None:
        raise UserError("train: got no configuration, expected a YAML file, or --resume RUN_DIR")
    elif resume == "auto":
        if nothing_to_do := resume_or_start(Path(config), overrides or [], launch):
            typer.echo(nothing_to_do)
    else:
        start_training(Path(config), overrides or [], launch)
    return 0


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.")],
    step: Annotated[
        int | None, typer.Option(help="Export the checkpoint after this many steps; default: last.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Output folder; default: exported/step_N in RUN_DIR.")
    ] = None,
) -> int:
    """Write a run's model in its own format, such as Hugging Face's."""
    from jaxmorph.cli.models import export_model

    typer.echo(export_model(run_dir, step, to))
    return 0


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[Path, typer.Argument(help="A Python script that makes a jaxmorph.Trainer.")],
    stages: Annotated[int, typer.Option(min=1, help="Number of processes, one for each stage.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    logs: Annotated[
        Path | None,
        typer.Option(help="Folder for the processes' logs; default: kept only on failure."),
    ] = None,
) -> int:
    """Run your own script, one process for each stage."""
    from jaxmorph.training.script_launch import launch_script

    launch_script(script, arguments or [], stages, logs)
    return 0


@app.command()
def sample(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; empty: begin a document.")],
    tokens: Annotated[int, typer.Option(help="The most tokens to add.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(help="Below 1: favour likely tokens; 0: always take the likeliest token."),
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Draw only from this many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    step: Annotated[
        int | None, typer.Option(help="Use the checkpoint after this many steps; default: last.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or a tokenizer.json; default: the run's.")
    ] = None,
) -> int:
    """Print a prompt and its continuation by a run's model."""
    from jaxmorph.cli.models import sample as sample_text
    from jaxmorph.report.terminal import open_console
    from jaxmorph.training.saved_model import SamplingSettings

    settings = SamplingSettings(tokens, temperature, top_k, seed)
    text = sample_text(run_dir, prompt, settings, step=step, tokenizer=tokenizer)
    console, _ = open_console()
    console.file.write(text + "\n")
    return 0


@app.command()
def compare(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file with a section `compare`; leave it out with --resume RUN_DIR."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value; the value is read as YAML.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Measure what the comparison in this directory lacks. auto, with CONFIG: continue "
            "the comparison in run.dir, or begin it there.",
        ),
    ] = None,
    redo_disturbed: Annotated[
        bool,
        typer.Option(
            "--redo-disturbed",
            help="With --resume: also measure again what was measured beside other work.",
        ),
    ] = False,
) -> int:
    """Measure systems under conditions of links."""
    from jaxmorph.compare.comparison import run_comparison

    if redo_disturbed and resume is None:
        raise UserError("--redo-disturbed: got no comparison, expected --resume RUN_DIR too")
    given = [*([config] if config is not None else []), *(overrides or [])]
    num_failed = run_comparison(given, resume, redo_disturbed=redo_disturbed)
    return 1 if num_failed else 0


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A directory that train or compare has written.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file; default: report.html in RUN_DIR.")
    ] = None,
) -> int:
    """Write a run or a comparison, with its charts, as one HTML page."""
    from jaxmorph.report.page import write_report

    typer.echo(write_report(run_dir, out))
    return 0


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="adaptation.key=value: other settings to try.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the replayed run and its report.")
    ] = None,
) -> int:
    """Replay a run's decisions, also with other settings."""
    from jaxmorph.cli.replay import print_replay
    from jaxmorph.report.terminal import open_console

    console, _ = open_console()
    return print_replay(run_dir, overrides or [], out, console)


@app.command()
def model(
    factory: Annotated[str, typer.Option(help="gpt2, llama, or a Python module.")] = "gpt2",
    preset: Annotated[str | None, typer.Option(help="A preset; default: all presets.")] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens in the vocabulary.")] = 50257,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 1024,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages to cut the model into.")] = 1,
) -> int:
    """Print the number of parameters of a model's presets."""
    from jaxmorph.cli.models import print_model_table

    names = [preset] if preset is not None else None
    print_model_table(Console(highlight=False), factory, names, vocab_size, sequence_length, stages)
    return 0
