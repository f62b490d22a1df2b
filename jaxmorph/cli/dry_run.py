"""``jaxmorph train --dry-run``: checks a configuration, and forecasts its ranks' memory."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.config import Config, load_config, locating_errors
from jaxmorph.config.sections import Parallelism
from jaxmorph.records import in_bytes
from jaxmorph.report.text import describe_routes, numbers, short_count

if TYPE_CHECKING:  # both import JAX
    from jaxmorph.training.device_memory import StageNeeds, StepNeeds
    from jaxmorph.training.host_memory import HostForecast
    from jaxmorph.training.run_parts import RunParts

_LABEL_WIDTH = 9
_WIDEST = 400  # columns: wrapped lines are better than numbers cut off
_LEGEND = """\
state      parameters, gradients, optimizer state, and parameters in the compute dtype
stash      what one microbatch keeps from F to B, and from B to W
held       the most stashes at once{of_chunks}, and their bytes together
messages   activations and gradients received or to be sent, the most at once
{of_devices}Temporary buffers of an op come on top: an estimate, with every result whole, where XLA
fuses many, is {temporary}. When a link is slow, a run may hold more stashes, up to the caps and to
the free memory of its devices."""
_HOST_LEGEND = """slots      of delegated messages{delegated}
away       offloaded stashes, the most at once
copy       of parameters and optimizer state, while a checkpoint is written
All of it is pinned. When a link is slow, a plan may use more slots, up to limits.host_gib."""


@dataclass(frozen=True)
class _DryRun:
    """The findings about a run.

    Attributes:
        needs: The memory of its stages.
        device: The device that the run was traced for, in words.
        device_bytes: What JAX may take of that device; None: not reported.
        unreached: The parameters that no gradient reaches, in words; "" if there are none.
    """

    config: Config
    parts: "RunParts"
    needs: "StepNeeds"
    device: str
    device_bytes: int | None
    unreached: str


def print_dry_run(path: Path, overrides: Sequence[str], console: Console) -> None:
    """Check a configuration, its data and its model, and print the memory of each stage.

    Nothing is written or started.

    Raises:
        UserError: The configuration, data or model is wrong, or a stage can't keep its cap.
    """
    found = _check(path, overrides)
    for label, text in _rows(found):
        console.print(f"{label:{_LABEL_WIDTH}} {text}", soft_wrap=True)
    console.width = max(console.width, _WIDEST)
    console.print(_table(found))
    chunks = found.config.parallelism.chunks
    of_chunks = ", counted for each chunk" if chunks > 1 else ""
    temporary = in_bytes(max(stage.temporary_bytes for stage in found.needs.stages))
    devices = found.config.parallelism.tensor
    of_devices = f"All of this is of each of a stage's {devices} devices.\n" * (devices > 1)
    legend = _LEGEND.format(of_chunks=of_chunks, of_devices=of_devices, temporary=temporary)
    console.print(legend, soft_wrap=True)
    host = found.needs.host
    console.print(_host_table(host))
    delegated = ", with all links delegated, as the run measures them" * found.config.adapts
    console.print(_HOST_LEGEND.format(delegated=delegated), soft_wrap=True)
    for line in _host_lines(found.config, host):
        console.print(line, soft_wrap=True)


def _check(path: Path, overrides: Sequence[str]) -> _DryRun:
    # Before JAX starts: otherwise it takes most of a GPU's memory, which a run may be using.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxmorph.runtime.join import own_devices
    from jaxmorph.runtime.rendezvous import SoleRank
    from jaxmorph.stage.model import device_choices
    from jaxmorph.training.device_memory import needs_of_step
    from jaxmorph.training.resume import require_no_checkpoints
    from jaxmorph.training.run_parts import check_together, unreached_in_words
    from jaxmorph.training.start import check_run

    config = load_config(path, overrides)
    device = own_devices()[0]
    device_bytes = (device.memory_stats() or {}).get("bytes_limit")
    with locating_errors(path, overrides):
        parts = check_run(config)
        require_no_checkpoints(config)
        sizes = config.batch.microbatch_size, config.data.sequence_length
        taken = device_choices(parts.model, *sizes, parts.shapes.extras)
        unreached = check_together(config, SoleRank(), parts.model, parts.shapes, parts.microbatch)
        needs = needs_of_step(config, parts.model, device_bytes, parts.shapes)
    words = "; ".join(filter(None, (f"{device.device_kind}, the device of JAX here", taken)))
    return _DryRun(config, parts, needs, words, device_bytes, unreached_in_words(unreached))


def _rows(found: _DryRun) -> Iterator[tuple[str, str]]:
    """Labels and texts about the whole run."""
    config, needs, cut = found.config, found.needs, found.config.parallelism
    batch, schedule = config.batch, needs.plan.schedule
    parameters = short_count(needs.num_parameters)
    yield "model", f"{config.model.factory} {config.model.preset}, {parameters} parameters"
    if found.unreached:
        yield "warning", found.unreached
    yield "data", found.parts.source
    of_replica = f", {config.microbatches} of them in each replica" if cut.data > 1 else ""
    yield (
        "batch",
        f"{batch.microbatches} microbatches of {batch.microbatch_size} sequences of "
        f"{config.data.sequence_length}: {config.tokens_per_step:,} tokens a step{of_replica}",
    )
    yield "loss", f"the mean over a step's {_counted(found)}"
    if cut.data * cut.tensor > 1:
        of_one = "; the tables are of one replica" if cut.data > 1 else ""
        yield "ranks", _ranks_in_words(cut) + of_one
    if cut.layers == "auto" and cut.stages not in (1, found.parts.model.num_layers):
        yield "layers", "cut evenly here; a run times them first, and may cut them differently"
    if config.schedule.placement == "auto":
        yield "placement", "for adaptive here; a run times layers first, and may choose zb-v"
    yield (
        "schedule",
        f"{schedule.name}, warm-up forwards {numbers(schedule.warmup_forwards)}: planned for equal "
        "ops and links without delay; a run plans with measured costs",
    )
    if needs.message_bytes:
        routes = describe_routes({str(link): route for link, route in needs.plan.routes.items()})
        yield "links", f"{routes}; {in_bytes(needs.message_bytes)} a message"
    if needs.plan.offloading is not None:
        yield "offload", "stashes beyond a stage's cap wait in host memory"
    memory = "" if found.device_bytes is None else f", {in_bytes(found.device_bytes)} for JAX"
    yield "device", f"traced for {found.device}{memory}"


def _counted(found: _DryRun) -> str:
    from jaxmorph.stage.model import has_a_loss_each

    if has_a_loss_each(found.parts.shapes.targets):
        return "targets that are not negative"
    batch = found.config.batch
    return f"{batch.microbatches * batch.microbatch_size} examples"


def _ranks_in_words(cut: Parallelism) -> str:
    devices = f", with {cut.tensor} devices each" if cut.tensor > 1 else ""
    replicas = f" of each of {cut.data} replicas" if cut.data > 1 else ""
    return f"{cut.stages * cut.data}, one for each of {cut.stages} stages{replicas}{devices}"


def _table(found: _DryRun) -> Table:
    needs = found.needs
    names = ["stage", "layers", "state", "stash F-B", "stash B-W", "held", "stashes"]
    names += ["messages", "total"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in names if needs.plan.offloading is None else names[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    peaks = needs.plan.schedule.peak_live("W")
    for number, stage in enumerate(needs.stages):
        held = needs.stash_bytes[number], needs.payload_bytes[number]
        cells = _cells(stage, peaks[number], *held)
        if not needs.plan.schedule.splits_backward:
            cells[3] = "-"
        table.add_row(*[str(number), *cells][: len(table.columns)])
    return table


def _host_table(host: "HostForecast") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("rank", "slots", "away", "copy", "on its host"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, own in enumerate(host.ranks):
        parts = (own.slots, own.stashes, own.checkpoint, own.total)
        table.add_row(str(rank), *map(in_bytes, parts))
    return table


def _host_lines(config: Config, host: "HostForecast") -> Iterator[str]:
    """What all ranks take together, and what the limit costs."""
    num_replicas = config.parallelism.data
    num_ranks = num_replicas * len(host.ranks)
    # Without shares of the optimizer, only replica 0 copies its state for a checkpoint.
    copies = config.num_optimizer_shares
    of_each = (num_replicas * (own.total - own.checkpoint) for own in host.ranks)
    together = in_bytes(sum(of_each) + copies * sum(own.checkpoint for own in host.ranks))
    here = in_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    yield f"A host with all {num_ranks} ranks needs {together}; this one has {here}."
    if config.limits.host_gib is not None:
        most = in_bytes(max(own.total for own in host.unlimited))
        yield (
            f"limits.host_gib is {config.limits.host_gib:g} a rank; without it a rank takes up to "
            f"{most}, and the planned step is {host.step_ratio:.3f} times as long as then."
        )


def _cells(stage: "StageNeeds", held: int, stash_bytes: int, payload_bytes: int) -> list[str]:
    return [
        " ".join(f"{own.start}-{own.stop - 1}" for own in stage.layers),
        in_bytes(stage.state_bytes),
        in_bytes(stage.stash.after_forward_bytes),
        in_bytes(stage.stash.after_backward_input_bytes),
        str(held),
        in_bytes(stash_bytes),
        in_bytes(payload_bytes),
        in_bytes(stage.state_bytes + stash_bytes + payload_bytes),
    ]
