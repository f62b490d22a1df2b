"""``jaxmorph validate``: checks a schedule file, and simulates the schedule."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxmorph.cli import plan_options as options
from jaxmorph.control.answer import Answer, solve
from jaxmorph.errors import UserError
from jaxmorph.report.answers import print_answer, save_answers
from jaxmorph.report.draw.save import require_format
from jaxmorph.schedule.files import load_schedule
from jaxmorph.schedule.problem import problem_of
from jaxmorph.schedule.schedule import Schedule, ScheduleError


def validate(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(help="PyTorch's .csv, or a .json or .txt of plan --export."),
    ],
    forward_ms: options.ForwardMs = "10",
    backward_input_ms: options.BackwardInputMs = "10",
    backward_weight_ms: options.BackwardWeightMs = "10",
    link_ms: options.LinkMs = "0",
    link_forward_ms: options.LinkForwardMs = None,
    link_backward_ms: options.LinkBackwardMs = None,
    link_occupancy_ms: options.LinkOccupancyMs = None,
    link_jitter_ms: options.LinkJitterMs = None,
    link_model: options.LinkModel = "latency",
    time_step: options.TimeStep = None,
    max_live: options.MaxLive = None,
    live_until: options.LiveUntil = "B",
    max_stash_bytes: options.MaxStashBytes = None,
    stash_bytes_after_forward: options.StashBytesAfterForward = None,
    stash_bytes_after_backward: options.StashBytesAfterBackward = None,
    as_json: options.AsJson = False,
    out: options.Out = None,
) -> int:
    """Check a schedule in a file, and simulate it."""
    if file.suffix in (".yaml", ".yml"):
        raise UserError(
            f"{file}: got a YAML file, expected a schedule in a .csv, .json or .txt file; "
            f"jaxmorph train {file} --dry-run checks a run's configuration"
        )
    schedule = load_schedule(file)
    with options.options_named_in_errors(context):
        if out is not None:
            require_format(out)
        try:
            schedule.validate()
        except ScheduleError as fault:
            _print_fault(schedule, fault, as_json=as_json)
            return 2
        problem = problem_of(schedule, options.problem_fields(context.params))
        answer = solve(problem)
        if out is not None:
            save_answers(out, {schedule.name: answer}, problem)
    _print_answer(answer, as_json=as_json)
    return 0


def _print_answer(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"valid": True, **answer.to_json()}, allow_nan=False))
        return
    console = Console(highlight=False)
    console.print("ok: every op runs", style="bold green")
    print_answer(answer, console)


def _print_fault(schedule: Schedule, fault: ScheduleError, *, as_json: bool) -> None:
    if as_json:
        broken = {"kind": fault.kind, "reason": fault.reason, "grid": fault.grid}
        typer.echo(json.dumps({"name": schedule.name, "valid": False, **broken}))
        return
    console = Console(highlight=False, markup=False)
    console.print(f"{fault.kind}: {fault.reason}", style="bold red", soft_wrap=True)
    console.print(f"{schedule.name}, the op marked as >op<:", style="dim", soft_wrap=True)
    console.print(fault.grid, soft_wrap=True)
