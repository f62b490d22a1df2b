"""``jaxmorph train --dry-run``: whether a configuration can be run, and what stages will keep."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.byte_sizes import in_bytes
from jaxmorph.config import Config, load_config, placed_error
from jaxmorph.errors import UserError
from jaxmorph.reporting.text import describe_routes, numbers, short_count

if TYPE_CHECKING:  # both import JAX
    from jaxmorph.training.device_needs import StageNeeds, StepNeeds
    from jaxmorph.training.run_parts import RunParts

_LABEL_WIDTH = 9
_WORDS = """\
state      parameters, gradients, the optimizer's state, and parameters as they are computed with
stash      what one microbatch keeps from F to B, and from B to W
held       the most microbatches that keep one at once; stashes: what they take together
What programs need while they run comes on top. A slow link may have a run hold more;
schedule.max_live and schedule.max_stash_bytes say how much it may."""


def print_dry_run(path: Path, overrides: Sequence[str], console: Console) -> None:
    """Check a configuration, its data and its model, and print what each stage will keep.

    Nothing is written or started, and of a GPU only the memory that it takes to look at it is used.

    Args:
        path: The configuration file.
        overrides: `section.key=value` each.
        console: Where to print.

    Raises:
        UserError: If the configuration, its data or its model are at fault, or a stage can't keep
            its cap.
    """
    # Before JAX looks for devices: a GPU that something computes on is not to be taken.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxmorph.runtime.own_devices import device_kind
    from jaxmorph.stage.on_device import taken_on_device
    from jaxmorph.start import check_run
    from jaxmorph.training.device_needs import needs_of_step

    config = load_config(path, overrides)
    traced_for = [f"{device_kind()}, as JAX has it here"]
    try:
        parts = check_run(config)
        sizes = config.batch.microbatch_size, config.data.sequence_length
        traced_for.append(taken_on_device(parts.model, *sizes))
        needs = needs_of_step(config, parts.model)
    except UserError as error:
        raise placed_error(path, overrides, error) from error
    for label, text in _rows(config, parts, needs, "; ".join(filter(None, traced_for))):
        console.print(f"{label:{_LABEL_WIDTH}} {text}", soft_wrap=True)
    console.print(_table(needs))
    console.print(_WORDS, soft_wrap=True)


def _rows(
    config: Config, parts: "RunParts", needs: "StepNeeds", traced_for: str
) -> Iterator[tuple[str, str]]:
    """What is known of the whole run."""
    batch, schedule = config.batch, needs.plan.schedule
    parameters = short_count(needs.num_parameters)
    yield "model", f"{config.model.factory} {config.model.preset}, {parameters} parameters"
    yield "data", parts.source
    yield (
        "batch",
        f"{batch.microbatches} microbatches of {batch.microbatch_size} sequences of "
        f"{config.data.sequence_length}: {config.tokens_per_step:,} tokens a step",
    )
    yield (
        "schedule",
        f"{schedule.name}, warm-up forwards {numbers(schedule.warmup_forwards)}: with ops that all "
        "take as long, and links that take no time; a run plans by what it measures",
    )
    if needs.message_bytes:
        routes = describe_routes({str(link): route for link, route in needs.plan.routes.items()})
        yield "links", f"{routes}; {in_bytes(needs.message_bytes)} a message"
    if needs.plan.offloading is not None:
        yield "offload", "of these stashes, what is beyond a stage's cap waits in host memory"
    yield "traced", f"for {traced_for}"


def _table(needs: "StepNeeds") -> Table:
    names = "layers", "state", "stash F-B", "stash B-W", "held", "stashes", "in all"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("stage", *names):
        table.add_column(name, justify="right", no_wrap=True)
    peaks = needs.plan.schedule.peak_live("W")
    for number, stage in enumerate(needs.stages):
        cells = _cells(stage, peaks[number], needs.stash_bytes[number])
        table.add_row(str(number), *cells)
    return table


def _cells(stage: "StageNeeds", held: int, stash_bytes: int) -> Iterator[str]:
    yield " ".join(f"{own.start}-{own.stop - 1}" for own in stage.layers)
    yield in_bytes(stage.state_bytes)
    yield in_bytes(stage.stash.after_forward_bytes)
    yield in_bytes(stage.stash.after_backward_input_bytes)
    yield str(held)
    yield in_bytes(stash_bytes)
    yield in_bytes(stage.state_bytes + stash_bytes)
