"""The options that planning and validating share, and what they say as fields of a problem."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmorph.errors import UserError

_PER_STAGE = "One number, or one per stage: 10 or 10,12,9,10."
_PER_LINK = "One number, or one per link: 20 or 20,0,0."

ForwardMs = Annotated[str, typer.Option(help=f"Time of F. {_PER_STAGE}")]
BackwardInputMs = Annotated[str, typer.Option(help=f"Time of B. {_PER_STAGE}")]
BackwardWeightMs = Annotated[str, typer.Option(help=f"Time of W. {_PER_STAGE}")]
LinkMs = Annotated[str, typer.Option(help=f"Latency, both directions. {_PER_LINK}")]
LinkForwardMs = Annotated[
    str | None, typer.Option(help="Latency of activations, if not --link-ms.")
]
LinkBackwardMs = Annotated[str | None, typer.Option(help="Latency of gradients, if not --link-ms.")]
LinkOccupancyMs = Annotated[
    str | None, typer.Option(help="How long a message keeps the next one waiting.")
]
LinkJitterMs = Annotated[
    str | None,
    typer.Option(help="Standard deviation of the latency; planned for: latency plus 0.7 of it."),
]
LinkModel = Annotated[
    str,
    typer.Option(
        help="How to simulate links. latency: messages overlap; serialized: one at a time; "
        "blocking: direct transfers, which hold both stages' queues."
    ),
]
TimeStep = Annotated[
    float | None, typer.Option(metavar="MS", help="Round times up to whole steps of a clock.")
]
MaxLive = Annotated[
    str | None, typer.Option(help="Most microbatches a stage may hold: 5 or 7,5,3,1.")
]
LiveUntil = Annotated[str, typer.Option(help="A microbatch is held until its B or W.")]
MaxStashBytes = Annotated[
    str | None, typer.Option(help="Most bytes a stage may hold until W. One, or one per stage.")
]
StashBytesAfterForward = Annotated[
    str | None, typer.Option(help="Bytes that a microbatch holds from F to B.")
]
StashBytesAfterBackward = Annotated[
    str | None, typer.Option(help="Bytes that a microbatch holds from B to W.")
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
}
_OPTIONS = {field: option for option, field in _FIELDS.items()} | {
    "output file": "out",
    "schedule file": "export",
}
_NAMED = re.compile(r"(output file|schedule file|\w+)(?=[\[:])")


def problem_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """What options say as fields of a problem; those that were not given say nothing.

    Args:
        options: Values by the name of their parameter.
    """
    given = {name: value for name, value in options.items() if value is not None}
    fields = {name: numbers(given[name]) for name in _LISTS if name in given}
    return fields | {field: given[name] for name, field in _FIELDS.items() if name in given}


def numbers(text: str) -> object:
    """``10`` as a number, ``10,12`` as a list; words stay text, for ``parse_problem`` to refuse."""
    values = [_number(word) for word in text.split(",")]
    return values if len(values) > 1 else values[0]


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options that stand on the command line, by the name of their parameter."""
    return {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def require_without(given: Mapping[str, Any], name: str, *others: str) -> None:
    """Refuses options that would not be heeded, because ``name`` was given too.

    Args:
        given: The options on the command line.
        name: The option that excludes others.
        others: Those it excludes; all when there are none.

    Raises:
        UserError: One of them was given.
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
    """Has an error that begins with a problem's field begin with the option it came from."""
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
