"""``jaxmorph train --dry-run``: whether a configuration fits, and what its stages will keep."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.config import Config, load_config, placing_errors
from jaxmorph.records import in_bytes
from jaxmorph.report.text import describe_routes, numbers, short_count

if TYPE_CHECKING:  # both import JAX
    from jaxmorph.training.device_memory import StageNeeds, StepNeeds
    from jaxmorph.training.run_parts import RunParts

_LABEL_WIDTH = 9
_WIDEST = 400  # columns: numbers that are cut off would be worse than lines that are wrapped
_WORDS = """\
state      parameters, gradients, the optimizer's state, and parameters as they are computed with
stash      what one microbatch keeps from F to B, and from B to W
held       the most stashes at once{of_chunks}, and what they take together
What programs need while they run comes on top, and the results of an op before what it read is
freed. A slow link may have a run hold more, up to the caps and to what its devices have free."""


@dataclass(frozen=True)
class _DryRun:
    """What is known of a run that isn't started.

    Attributes:
        needs: What its stages will keep.
        device: What it was traced for, in words.
        device_bytes: What JAX may take of that; None: it doesn't tell.
    """

    config: Config
    parts: "RunParts"
    needs: "StepNeeds"
    device: str
    device_bytes: int | None


def print_dry_run(path: Path, overrides: Sequence[str], console: Console) -> None:
    """Check a configuration, its data and its model, and print what each stage will keep.

    Nothing is written or started, and of a GPU only the memory that it takes to look at it is used.

    Raises:
        UserError: If the configuration, its data or its model are at fault, or a stage can't keep
            its cap.
    """
    found = _look_at(path, overrides)
    for label, text in _rows(found):
        console.print(f"{label:{_LABEL_WIDTH}} {text}", soft_wrap=True)
    console.width = max(console.width, _WIDEST)
    console.print(_table(found))
    chunks = found.config.parallelism.chunks
    of_chunks = ", those of each chunk by themselves" if chunks > 1 else ""
    console.print(_WORDS.format(of_chunks=of_chunks), soft_wrap=True)


def _look_at(path: Path, overrides: Sequence[str]) -> _DryRun:
    # Before JAX looks for devices: a GPU that something computes on is not to be taken.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxmorph.runtime.join import own_devices
    from jaxmorph.training.device_memory import needs_of_step
    from jaxmorph.training.resume import require_no_checkpoints
    from jaxmorph.training.start import check_run

    config = load_config(path, overrides)
    device = own_devices()[0]
    device_bytes = (device.memory_stats() or {}).get("bytes_limit")
    with placing_errors(path, overrides):
        parts = check_run(config)
        require_no_checkpoints(config)
        taken = _taken(config, parts)
        needs = needs_of_step(config, parts.model, device_bytes)
    words = "; ".join(filter(None, (f"{device.device_kind}, as JAX has it here", taken)))
    return _DryRun(config, parts, needs, words, device_bytes)


def _taken(config: Config, parts: "RunParts") -> str:
    from jaxmorph.stage.model import taken_on_device

    return taken_on_device(parts.model, config.batch.microbatch_size, config.data.sequence_length)


def _rows(found: _DryRun) -> Iterator[tuple[str, str]]:
    """What is known of the whole run."""
    config, needs, cut = found.config, found.needs, found.config.parallelism
    batch, schedule = config.batch, needs.plan.schedule
    parameters = short_count(needs.num_parameters)
    yield "model", f"{config.model.factory} {config.model.preset}, {parameters} parameters"
    yield "data", found.parts.source
    yield (
        "batch",
        f"{batch.microbatches} microbatches of {batch.microbatch_size} sequences of "
        f"{config.data.sequence_length}: {config.tokens_per_step:,} tokens a step",
    )
    if cut.layers == "auto" and cut.stages not in (1, found.parts.model.num_layers):
        yield "layers", "cut evenly here; a run times them first, and may cut otherwise"
    yield (
        "schedule",
        f"{schedule.name}, warm-up forwards {numbers(schedule.warmup_forwards)}: with ops that all "
        "take as long, and links that take no time; a run plans by what it measures",
    )
    if needs.message_bytes:
        routes = describe_routes({str(link): route for link, route in needs.plan.routes.items()})
        yield "links", f"{routes}; {in_bytes(needs.message_bytes)} a message"
    if needs.plan.offloading is not None:
        yield "offload", "what is beyond a stage's cap of these stashes waits in host memory"
    told = "" if found.device_bytes is None else f", {in_bytes(found.device_bytes)} for JAX"
    yield "device", f"traced for {found.device}{told}"


def _table(found: _DryRun) -> Table:
    needs = found.needs
    names = ["stage", "layers", "state", "stash F-B", "stash B-W", "held", "stashes", "in all"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in names if needs.plan.offloading is None else names[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    peaks = needs.plan.schedule.peak_live("W")
    for number, stage in enumerate(needs.stages):
        cells = _cells(stage, peaks[number], needs.stash_bytes[number])
        if not needs.plan.schedule.splits_backward:
            cells[3] = "-"
        table.add_row(*[str(number), *cells][: len(table.columns)])
    return table


def _cells(stage: "StageNeeds", held: int, stash_bytes: int) -> list[str]:
    return [
        " ".join(f"{own.start}-{own.stop - 1}" for own in stage.layers),
        in_bytes(stage.state_bytes),
        in_bytes(stage.stash.after_forward_bytes),
        in_bytes(stage.stash.after_backward_input_bytes),
        str(held),
        in_bytes(stash_bytes),
        in_bytes(stage.state_bytes + stash_bytes),
    ]
