"""Chooses how a model's layers are cut into stages; all ranks get the same cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmorph.config import Config
from jaxmorph.plain_json import dump, parse_line, with_sum
from jaxmorph.report.run_directory import LAYERS, replace_file
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.schedule.partition import even_cut, partition, stage_times_ms
from jaxmorph.stage.layer_costs import LayerCosts, measure_layer_costs
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel, cut_layers
from jaxmorph.training.plan_in_force import op_kinds

_WORTH_IT = 0.02  # a smaller gain is within the noise of the measured costs


@dataclass(frozen=True)
class LayerChoice:
    """A cut: the layers of each virtual stage, in pipeline order.

    Attributes:
        reason: Why, in one line; empty if there was no choice.
    """

    layers: tuple[range, ...]
    reason: str = ""


def choose_layers(
    config: Config,
    rendezvous: Rendezvous,
    num_layers: int,
    measure: Callable[[], LayerCosts],
    chosen: Sequence[int] | None = None,
) -> LayerChoice:
    """Choose the cut; all ranks call this at the same point, and get the same answer.

    With ``parallelism.layers: auto`` rank 0 measures the layers and makes the slowest stage as
    fast as possible. The other ranks wait meanwhile, so that they don't slow the measurement.

    Args:
        measure: Measures the layers' costs; called on rank 0 alone, and only if it matters.
        chosen: The number of layers of each stage that an earlier launch of the run chose; rank
            0 takes it instead of measuring.

    Raises:
        UserError: The model has too few layers, or `parallelism.layers` doesn't fit it.
    """
    cut = config.parallelism
    layers = cut_layers(num_layers, cut.stages, cut.layers, cut.chunks)
    if cut.layers != "auto" or cut.stages in (1, num_layers):
        return LayerChoice(layers)
    if cut.chunks > 1:
        return LayerChoice(layers, "even: a stage's chunks are planned as equally long")
    if cut.tensor > 1:
        return LayerChoice(layers, "even: layers are measured on one device")
    if config.emulation.accelerator is not None:
        return LayerChoice(layers, "even: paced ops last as long whatever the layers")
    rendezvous.exchange({})  # all ranks have started, and are idle from here on
    own = None
    if rendezvous.rank == 0:
        if chosen is None:
            own = cut_by_costs(measure(), num_layers, cut.stages)
        else:
            own = tuple(chosen), "as the run was cut before"
    counts, reason = agree(rendezvous, tuple[tuple[int, ...], str], own)
    return LayerChoice(cut_layers(num_layers, cut.stages, counts), reason)


def cut_by_costs(
    costs: LayerCosts, num_layers: int, num_stages: int
) -> tuple[tuple[int, ...], str]:
    """The cut with the fastest slowest stage, or the even cut if that is nearly as fast.

    Returns:
        The number of layers of each stage, and the reason.
    """
    model_costs = ([costs.layer_ms] * num_layers, costs.embed_ms, costs.head_ms)
    even, best = even_cut(num_layers, num_stages), partition(*model_costs, num_stages)
    even_ms, best_ms = (max(stage_times_ms(layers, *model_costs)) for layers in (even, best))
    if best_ms > (1 - _WORTH_IT) * even_ms:
        reason = f"even: slowest stage {even_ms:.3g} ms a microbatch, and no cut is much faster"
        layers = even
    else:
        reason = (
            f"slowest stage {best_ms:.3g} ms a microbatch, {even_ms:.3g} ms under the even cut "
            f"{' '.join(map(str, even))}"
        )
        layers = best
    measured = (
        f"embedding {costs.embed_ms:.3g}, a layer {costs.layer_ms:.3g}, "
        f"the head {costs.head_ms:.3g} ms"
    )
    return layers, f"{reason}; {measured}"


def measured_on_rank_0(
    config: Config,
    model: PipelineModel,
    microbatch: Callable[[], MicrobatchShapes],
) -> LayerCosts:
    """Measure the layers' costs on this process's device, on arrays of a microbatch."""
    return measure_layer_costs(
        model,
        stage_submesh(make_mesh(config.parallelism.stages), 0),
        microbatch(),
        stash=config.stash,
        kinds=op_kinds(config),
    )


@dataclass(frozen=True)
class _Cut:
    """The contents of `layers.json`: the number of layers of each virtual stage."""

    stages: int
    chunks: int
    layers: tuple[int, ...]


def chosen_before(directory: Path, config: Config, num_layers: int) -> tuple[int, ...] | None:
    """The layers of each virtual stage that an earlier launch of the run chose.

    None if there was no earlier launch, or it had other stages.
    """
    try:
        before = parse_line(_Cut, (directory / LAYERS).read_text(encoding="utf-8"), LAYERS)
    except (OSError, ValueError):
        return None
    cut, counts = config.parallelism, before.layers
    fits = len(counts) == cut.virtual_stages and sum(counts) == num_layers and min(counts) > 0
    return counts if fits and (before.stages, before.chunks) == (cut.stages, cut.chunks) else None


def keep_choice(directory: Path, config: Config, layers: Sequence[range]) -> None:
    """Write `layers.json`, if the configuration leaves the cut to jaxmorph."""
    cut = config.parallelism
    if cut.layers != "auto":
        return
    chosen = _Cut(cut.stages, cut.chunks, tuple(map(len, layers)))
    replace_file(directory / LAYERS, with_sum(dump(chosen)) + "\n")
