"""``jaxmorph plan``: turns options into a problem, solves it, and prints the answer."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxmorph.cli import plan_options as options
from jaxmorph.cli.layer_cut import LayerCut, cut_fields, parse_layers, print_cut
from jaxmorph.cli.mesh_table import parse_mesh, print_mesh
from jaxmorph.control.answer import Answer, answer_lines, solve
from jaxmorph.errors import UserError
from jaxmorph.report.answers import print_answer, print_comparison, save_answers
from jaxmorph.report.draw.save import require_format
from jaxmorph.schedule.files import require_schedule_file, save_schedule
from jaxmorph.schedule.planner import INTERLEAVED, SCHEDULE_NAMES
from jaxmorph.schedule.problem import Problem, default_chunks, parse_problem
from jaxmorph.schedule.what_if import apply_changes, parse_change

Given = Mapping[str, Any]  # options on the command line, by the name of their parameter


def plan(
    context: typer.Context,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches in a step.")] = 12,
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
    schedule: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(SCHEDULE_NAMES)}."),
    ] = "adaptive",
    chunks: Annotated[
        int | None,
        typer.Option(help="Virtual stages on each stage, for interleaved; default 2, as in a V."),
    ] = None,
    max_live: options.MaxLive = None,
    live_until: options.LiveUntil = "B",
    max_stash_bytes: options.MaxStashBytes = None,
    stash_bytes_after_forward: options.StashBytesAfterForward = None,
    stash_bytes_after_backward: options.StashBytesAfterBackward = None,
    weight_group: Annotated[int, typer.Option(metavar="K", help="One W for K microbatches.")] = 1,
    planned_link_ms: Annotated[
        str | None, typer.Option(help="Plan for this latency, but simulate --link-ms.")
    ] = None,
    warmup_forwards: Annotated[
        str | None,
        typer.Option(
            help="Least forwards before each stage's first B: 7,5,3,1; the rest as in paper."
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Compare schedules: 1f1b,zb-h2,adaptive.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Take sizes, costs and links from a run.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Also plan with a change: link=2:0ms, link=2-3:0ms or stage=1:0.5x. Several "
            "changes apply together."
        ),
    ] = None,
    layers_cost: Annotated[
        str | None,
        typer.Option(help="Cut layers into stages, given the time of each layer's F: 1,1,2,3."),
    ] = None,
    embedding_cost: Annotated[
        float | None, typer.Option(metavar="MS", help="Time of F of the embedding.")
    ] = None,
    head_cost: Annotated[
        float | None, typer.Option(metavar="MS", help="Time of F of the head.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DxTxG",
            help="Print instead who is where with D replicas of --stages, T tensor devices a stage "
            "and G devices a host, and which pairs of hosts carry what: 2x4x8.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    out: options.Out = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the schedule: .csv (PyTorch's compute-only format), .json, .txt."),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(help="Solve this file's problems, one JSON object a line; no other options."),
    ] = None,
) -> int:
    """Plan a step, simulate it, and draw it."""
    given = options.given_options(context)
    if batch is not None:
        options.require_without(given, "batch")
        return _answer_batch(batch)
    if mesh is not None:
        options.require_without({name: given[name] for name in given if name != "stages"}, "mesh")
        print_mesh(parse_mesh(mesh, stages))
        return 0
    with options.options_named_in_errors(context):
        _check(given, out, export)
        if compare is not None or what_if:
            return _plan_several(context, given)
        return _plan_one(context, given)


def _check(given: Given, out: Path | None, export: Path | None) -> None:
    options.require_without(given, "compare", "what_if", "layers_cost", "schedule", "export")
    options.require_without(given, "what_if", "layers_cost", "export")
    options.require_without(given, "layers_cost", "profile", "chunks")
    options.require_without(given, "profile", "stages")
    schedule = given.get("schedule", "")
    if "layers_cost" in given and default_chunks(schedule) > 1:
        expected = "a schedule of one chunk, as the layers are cut into stages"
        raise UserError(f"--schedule: got {schedule} beside --layers-cost, expected {expected}")
    for name in ("embedding_cost", "head_cost"):
        if name in given and "layers_cost" not in given:
            raise UserError(f"{options.flag(name)}: got no --layers-cost, expected both")
    if out is not None:
        require_format(out)
    if export is not None:
        require_schedule_file(export)


def _plan_one(context: typer.Context, given: Given) -> int:
    cut = None
    fields = _fields(context, given)
    if "layers_cost" in given:
        cut = parse_layers(given, fields)
        fields |= cut_fields(cut, cut.layers)
    problem = parse_problem(fields)
    answer = solve(problem)
    if "out" in given:
        save_answers(given["out"], {answer.schedule.name: answer}, problem)
    if "export" in given:
        save_schedule(given["export"], answer.schedule)
    even = None
    if cut is not None:
        even = solve(parse_problem(fields | cut_fields(cut, cut.even)))
    _print_one(answer, cut, even, as_json=context.params["as_json"])
    return 0


def _plan_several(context: typer.Context, given: Given) -> int:
    problems = _compared(context, given) if "compare" in given else _changed(context, given)
    answers, refused = _solve_all(problems)
    if "out" in given:
        first, *rest = problems.values()
        alike = all(problem.links == first.links for problem in rest)
        save_answers(given["out"], answers, first if alike else None)
    if context.params["as_json"]:
        errors = [{"name": name, "error": error} for name, error in refused.items()]
        solved = [answer.to_json() for answer in answers.values()]
        typer.echo(json.dumps([*solved, *errors], allow_nan=False))
    else:
        print_comparison(answers, refused, Console(highlight=False))
    return 0


def _solve_all(problems: Mapping[str, Problem]) -> tuple[dict[str, Answer], dict[str, str]]:
    """Answers by name, and the reasons of the others; raises if there is no answer at all."""
    answers: dict[str, Answer] = {}
    refused: dict[str, str] = {}
    for name, problem in problems.items():
        try:
            answers[name] = solve(problem)
        except UserError as error:
            refused[name] = str(error)
    if not answers:
        raise UserError(next(iter(refused.values())))
    return answers, refused


def _compared(context: typer.Context, given: Given) -> dict[str, Problem]:
    """The same problem with each schedule; ``--chunks`` applies only to interleaved."""
    problems: dict[str, Problem] = {}
    names = [name.strip() for name in given["compare"].split(",")]
    if "chunks" in given and INTERLEAVED not in names:
        raise UserError(f"chunks: got {given['chunks']}, expected {INTERLEAVED} among --compare's")
    for name in names:
        if name not in SCHEDULE_NAMES:
            expected = f"expected some of {', '.join(SCHEDULE_NAMES)}"
            raise UserError(f"compare: got {name!r}, {expected}")
        if name in problems:
            raise UserError(f"compare: got {name} twice, expected each schedule once")
        chosen = {**given, "schedule": name}
        if name != INTERLEAVED:
            chosen.pop("chunks", None)
        problems[name] = parse_problem(_fields(context, chosen))
    return problems


def _changed(context: typer.Context, given: Given) -> dict[str, Problem]:
    """The problem as it is, and with all changes."""
    problem = parse_problem(_fields(context, given))
    changes = [parse_change(text) for text in given["what_if"]]
    now, then = "as it is", f"what if {', '.join(map(str, changes))}"
    return {
        now: replace(problem, name=now),
        then: replace(apply_changes(problem, changes), name=then),
    }


def _fields(context: typer.Context, given: Given) -> dict[str, Any]:
    """A problem's fields: given options override a run's measurements, which override defaults."""
    chosen = options.problem_fields(given)
    fields = options.problem_fields(context.params) | {"chunks": given.get("chunks")}
    if "profile" in given:
        from jaxmorph.cli.measured_run import read_run, run_fields

        run = read_run(given["profile"])
        fields |= run_fields(*run, chosen.get("schedule"), chosen.get("chunks"))
        if "link_ms" in chosen:  # for both directions
            fields |= {"link_forward_ms": None, "link_backward_ms": None}
        if "max_stash_bytes" in chosen:
            fields["max_live"] = None
        if "max_live" in chosen:
            fields["max_stash_bytes"] = None
    fields |= chosen
    return {"name": fields["schedule"], **fields}


def _print_one(answer: Answer, cut: LayerCut | None, even: Answer | None, *, as_json: bool) -> None:
    if as_json:
        data = answer.to_json()
        if cut is not None and even is not None:
            data |= cut.to_json() | {"even_makespan_ms": even.timeline.makespan_ms}
        typer.echo(json.dumps(data, allow_nan=False))
        return
    console = Console(highlight=False)
    print_answer(answer, console)
    if cut is not None and even is not None:
        print_cut(cut, answer, even, console)


def _answer_batch(path: Path) -> int:
    """Print an answer for each line; the exit code is 2 if any line was bad."""
    bad = False
    try:
        with path.open("rb") as lines:
            for answer in answer_lines(lines):
                bad = bad or "error" in answer
                typer.echo(json.dumps(answer, allow_nan=False))
    except OSError as error:
        raise UserError(f"--batch: cannot read {path}: {error.strerror}") from error
    return 2 if bad else 0
