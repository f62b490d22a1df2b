"""The options that `plan` and `validate` share, and the problem's fields that they set."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmorph.errors import UserError

_PER_STAGE = "One number, or one per stage: 10 or 10,12,9,10."
_PER_LINK = "One number, or one per link: 20 or 20,0,0."

ForwardMs = Annotated[str, typer.Option(help=f"Time of F (forward). {_PER_STAGE}")]
BackwardInputMs = Annotated[
    str, typer.Option(help=f"Time of B (gradient of the input). {_PER_STAGE}")
]
BackwardWeightMs = Annotated[
    str, typer.Option(help=f"Time of W (gradient of the weights). {_PER_STAGE}")
]
LinkMs = Annotated[str, typer.Option(help=f"Latency in both directions. {_PER_LINK}")]
LinkForwardMs = Annotated[
    str | None, typer.Option(help="Latency of activations; default: --link-ms.")
]
LinkBackwardMs = Annotated[
    str | None, typer.Option(help="Latency of gradients; default: --link-ms.")
]
LinkOccupancyMs = Annotated[
    str | None, typer.Option(help="Time for which a message delays the next one on its link.")
]
LinkJitterMs = Annotated[
    str | None,
    typer.Option(help="Standard deviation of the latency; plans add 0.7 of it to the latency."),
]
LinkModel = Annotated[
    str,
    typer.Option(
        help="How to simulate links. latency: messages overlap; serialized: one at a time; "
        "blocking: direct transfers, which hold both stages' queues."
    ),
]
TimeStep = Annotated[
    float | None, typer.Option(metavar="MS", help="Round times up to multiples of this.")
]
MaxLive = Annotated[
    str | None, typer.Option(help="The most microbatches that a stage may hold: 5 or 7,5,3,1.")
]
LiveUntil = Annotated[str, typer.Option(help="Count a microbatch as held until its B or its W.")]
MaxStashBytes = Annotated[
    str | None,
    typer.Option(
        help="The most bytes of stashes that a stage may hold. One number, or one per stage."
    ),
]
StashBytesAfterForward = Annotated[
    str | None, typer.Option(help="Bytes of a microbatch's stash from F to B.")
]
StashBytesAfterBackward = Annotated[
    str | None, typer.Option(help="Bytes of a microbatch's stash from B to W.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Out = Annotated[
    Path | None, typer.Option(help="Also draw the step: .png, .svg, .txt or .json (Chrome trace).")
]

_LISTS = (
    "forward_ms",
    "backward_input_ms",
    "backward_weight_ms",
    "link_ms",
    "link_forward_ms",
    "link_backward_ms",
    "link_occupancy_ms",
    "link_jitter_ms",
    "planned_link_ms",
    "max_live",
    "max_stash_bytes",
    "stash_bytes_after_forward",
    "stash_bytes_after_backward",
    "warmup_forwards",
)
_FIELDS = {  # options that are a field as they stand
    "stages": "num_stages",
    "microbatches": "num_microbatches",
    "schedule": "schedule",
    "chunks": "chunks",
    "link_model": "link_model",
    "time_step": "time_step_ms",
    "live_until": "live_until",
    "weight_group": "weight_group",
}
_OPTIONS = {field: option for option, field in _FIELDS.items()} | {
    "output file": "out",
    "schedule file": "export",
}
_NAMED = re.compile(r"(output file|schedule file|\w+)(?=[\[:])")


def problem_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The problem's fields that options set; None sets nothing."""
    given = {name: value for name, value in options.items() if value is not None}
    fields = {name: numbers(given[name]) for name in _LISTS if name in given}
    return fields | {field: given[name] for name, field in _FIELDS.items() if name in given}


def numbers(text: str) -> object:
    """``10`` as a number, ``10,12`` as a list; other words stay text for ``parse_problem``."""
    values = [_number(word) for word in text.split(",")]
    return values if len(values) > 1 else values[0]


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options on the command line, by the name of their parameter."""
    return {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def require_without(given: Mapping[str, Any], name: str, *others: str) -> None:
    """Refuse options that have no effect together with the option ``name``.

    Args:
        others: The options that ``name`` excludes; without any, all.

    Raises:
        UserError: ``name`` and one of them are given.
    """
    for other in given if name in given else ():
        if other != name and (not others or other in others):
            alone = "no other option" if not others else "only one of them"
            raise UserError(f"{flag(name)}: got {flag(other)} as well, expected {alone}")


def flag(name: str) -> str:
    """An option as the user types it."""
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


@contextmanager
def options_named_in_errors(context: typer.Context) -> Iterator[None]:
    """Replace the problem's field at the start of an error by its option."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if found := _NAMED.match(text):
            option = _OPTIONS.get(found[0], found[0])
            if option in context.params:
                text = f"{flag(option)}{text[found.end() :]}"
        raise UserError(text) from error


def _number(word: str) -> object:
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word
