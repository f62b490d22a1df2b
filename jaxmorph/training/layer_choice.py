"""How the layers of a run are cut into stages, and how all ranks come to the same cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmorph.config import Config
from jaxmorph.data import Batches
from jaxmorph.plain_json import dump, parse_line
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.schedule.partition import even_cut, partition, stage_times_ms
from jaxmorph.stage.layer_costs import LayerCosts, measure_layer_costs
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.training.plan_in_force import op_kinds

_WORTH_IT = 0.02  # measured costs are no better than that: below, cuts would change by chance


@dataclass(frozen=True)
class LayerChoice:
    """How the layers are cut.

    Attributes:
        layers: Those of each virtual stage, in the order of the pipeline.
        reason: Why, in one line; empty where the configuration left nothing to choose.
    """

    layers: tuple[range, ...]
    reason: str = ""


@dataclass(frozen=True)
class _Counts:
    """How many layers each stage has, and why."""

    layers: tuple[int, ...]
    reason: str


def choose_layers(
    config: Config,
    rendezvous: Rendezvous,
    num_layers: int,
    measure: Callable[[], LayerCosts],
    chosen: Sequence[int] | None = None,
) -> LayerChoice:
    """Decides on the cut; every rank calls this at the same point, and all get the same answer.

    With ``parallelism.layers: auto`` rank 0 measures while the others wait, so that nothing else
    runs on this machine's cores, and cuts so that the slowest stage is as fast as can be.

    Args:
        measure: Measures what layers cost; called on rank 0 alone, and only where it matters.
        chosen: The number of layers of each stage, as an earlier life of the run has chosen them,
            which takes the place of measuring; None: there was none. Only rank 0's is read.

    Raises:
        UserError: Stages and layers don't fit one another.
    """
    cut = config.parallelism
    layers = cut_layers(num_layers, cut.stages, cut.layers, cut.chunks)
    if cut.layers != "auto" or cut.stages in (1, num_layers):
        return LayerChoice(layers)
    if cut.chunks > 1:
        return LayerChoice(layers, "even: a stage's chunks are planned as equally long")
    if config.emulation.accelerator is not None:
        return LayerChoice(layers, "even: paced ops last as long whatever the layers")
    rendezvous.exchange({})  # all ranks have started, and are idle from here on
    own = None
    if rendezvous.rank == 0:
        if chosen is None:
            own = _Counts(*cut_by_costs(measure(), num_layers, cut.stages))
        else:
            own = _Counts(tuple(chosen), "as the run was cut before")
    agreed = agree(rendezvous, _Counts, own)
    return LayerChoice(cut_layers(num_layers, cut.stages, agreed.layers), agreed.reason)


def cut_by_costs(
    costs: LayerCosts, num_layers: int, num_stages: int
) -> tuple[tuple[int, ...], str]:
    """The cut whose slowest stage is as fast as can be, unless the even one is all but as good.

    Returns:
        The number of layers of each stage, and the reason, beside the even cut.
    """
    model_costs = ([costs.layer_ms] * num_layers, costs.embed_ms, costs.head_ms)
    even, best = even_cut(num_layers, num_stages), partition(*model_costs, num_stages)
    even_ms, best_ms = (max(stage_times_ms(layers, *model_costs)) for layers in (even, best))
    if best_ms > (1 - _WORTH_IT) * even_ms:
        says = f"even: slowest stage {even_ms:.3g} ms a microbatch, and none is much faster"
        layers = even
    else:
        says = (
            f"slowest stage {best_ms:.3g} ms a microbatch, {even_ms:.3g} ms under the even cut "
            f"{' '.join(map(str, even))}"
        )
        layers = best
    return layers, f"{says}; {_described(costs)}"


def measured_on_rank_0(
    config: Config, model: PipelineModel, batches: Batches | None = None
) -> LayerCosts:
    """What the model's layers cost on this process's device, on the run's first microbatch.

    Without batches that is token 0 throughout: a user's script has no others before its first step.
    """
    nothing = np.zeros((config.batch.microbatch_size, config.data.sequence_length), np.int32)
    return measure_layer_costs(
        model,
        stage_submesh(make_mesh(config.parallelism.stages), 0),
        nothing if batches is None else batches.inputs(0)[0],
        nothing if batches is None else batches.targets(0)[0],
        stash=config.stash,
        kinds=op_kinds(config),
    )


def _described(costs: LayerCosts) -> str:
    return (
        f"embedding {costs.embed_ms:.3g}, a layer {costs.layer_ms:.3g}, "
        f"the head {costs.head_ms:.3g} ms"
    )


FILE = "layers.json"


@dataclass(frozen=True)
class _Cut:
    """What is written of a cut.

    Attributes:
        layers: How many each virtual stage has.
    """

    stages: int
    chunks: int
    layers: tuple[int, ...]


def chosen_before(directory: Path, config: Config, num_layers: int) -> tuple[int, ...] | None:
    """The number of layers of each virtual stage, as an earlier life of the run has chosen them.

    Returns:
        None where there was no such life, or it had other stages.
    """
    try:
        before = parse_line(_Cut, (directory / FILE).read_text(encoding="utf-8"), FILE)
    except (OSError, ValueError):
        return None
    cut, counts = config.parallelism, before.layers
    fits = len(counts) == cut.virtual_stages and sum(counts) == num_layers and min(counts) > 0
    return counts if fits and (before.stages, before.chunks) == (cut.stages, cut.chunks) else None


def keep_choice(directory: Path, config: Config, layers: Sequence[range]) -> None:
    """Write down how the layers are cut, where that was not for the configuration to say."""
    cut = config.parallelism
    if cut.layers != "auto":
        return
    chosen = _Cut(cut.stages, cut.chunks, tuple(map(len, layers)))
    written = directory / f"{FILE}.new"
    written.write_text(dump(chosen) + "\n", encoding="utf-8")
    written.replace(directory / FILE)
