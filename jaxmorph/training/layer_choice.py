"""Chooses how a model's layers are cut and placed on ranks; all ranks get the same answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmorph.config import Config, per_stage
from jaxmorph.config.schema import IN_A_V
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, simulate_step
from jaxmorph.errors import UserError
from jaxmorph.plain_json import dump, parse_line, with_sum
from jaxmorph.report.run_directory import LAYERS, replace_file
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.partition import cut_layers, even_cut, partition, stage_times_ms
from jaxmorph.stage.layer_costs import LayerCosts, measure_layer_costs
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel
from jaxmorph.training.first_plan import planned_links
from jaxmorph.training.plan_in_force import op_kinds, plan_step

_WORTH_IT = 0.02  # a smaller gain is within the noise of the measured costs


@dataclass(frozen=True)
class LayerChoice:
    """A cut: the layers of each virtual stage, in pipeline order.

    Attributes:
        reason: Why it was chosen, in one line; empty if there was no choice.
    """

    layers: tuple[range, ...]
    reason: str = ""


def choose_layers(
    config: Config,
    rendezvous: Rendezvous,
    num_layers: int,
    measure: Callable[[], LayerCosts],
    directory: Path | None = None,
) -> LayerChoice:
    """Choose the cut; all ranks call this at the same point, and get the same answer.

    With ``parallelism.layers: auto`` rank 0 measures the layers and makes the slowest stage as
    fast as possible. The other ranks wait meanwhile, so that they don't slow the measurement.

    Args:
        measure: Measures the layers' costs; called on rank 0 alone, and only if it matters.
        directory: The run's, which keeps the choice: a later launch reads it instead of measuring.

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
        chosen = None if directory is None else chosen_before(directory, config, num_layers)
        if chosen is None:
            own = cut_by_costs(measure(), num_layers, cut.stages)
            if directory is not None:
                keep_choice(directory, config, own[0])
        else:
            own = chosen, "as the run was cut before"
    counts, reason = agree(rendezvous, tuple[tuple[int, ...], str], own)
    return LayerChoice(cut_layers(num_layers, cut.stages, counts), reason)


def cut_by_costs(
    costs: LayerCosts, num_layers: int, num_stages: int
) -> tuple[tuple[int, ...], str]:
    """The cut whose slowest stage is fastest, or the even cut if that is nearly as fast.

    Returns:
        The number of layers of each stage, and the reason.
    """
    layer_ms, embed_ms, head_ms = map(sum, (costs.layer_ms, costs.embed_ms, costs.head_ms))
    model_costs = ([layer_ms] * num_layers, embed_ms, head_ms)
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
    measured = f"embedding {embed_ms:.3g}, a layer {layer_ms:.3g}, the head {head_ms:.3g} ms"
    return layers, f"{reason}; {measured}"


def choose_placement(
    config: Config,
    rendezvous: Rendezvous,
    model: PipelineModel,
    measure: Callable[[], LayerCosts],
    before: bool | None = None,
) -> tuple[Config, str]:
    """Replace `schedule.placement: auto` by the schedule whose step is predicted to be shorter.

    All ranks call this at the same point, before a run's first step, and get the same answer. As
    in `choose_layers`, rank 0 measures while the others wait.

    Args:
        before: Whether the layers are in a V in the checkpoint from which the run resumes; they
            stay as they are. None: the run is new.

    Returns:
        The configuration, and the reason in one line; empty if there was no choice.
    """
    if config.schedule.placement != "auto":
        return config, ""
    if before is not None or config.parallelism.stages == 1:
        return config.placed(in_a_v=bool(before)), ""
    rendezvous.exchange({})  # all ranks have started, and are idle from here on
    own = None
    if rendezvous.rank == 0:
        own = _v_is_shorter(config, model.num_layers, len(model.tied), measure)
    in_a_v, reason = agree(rendezvous, tuple[bool, str], own)
    return config.placed(in_a_v=in_a_v), reason


def _v_is_shorter(
    config: Config, num_layers: int, num_tied: int, measure: Callable[[], LayerCosts]
) -> tuple[bool, str]:
    """Whether a step of zb-v is predicted to be shorter than adaptive's, and the reason."""
    in_line, in_a_v = config.placed(in_a_v=False), config.placed(in_a_v=True)
    costs, parallelism = None, config.parallelism
    if config.emulation.accelerator is None:
        if parallelism.tensor > 1:
            return False, "adaptive: layers are measured on one device"
        costs = measure()
    try:
        cut = cut_layers(num_layers, parallelism.stages, "even", in_a_v.parallelism.chunks)
        v_ms = _predicted_ms(in_a_v, cut, costs, num_tied)
    except UserError as error:
        return False, f"adaptive: zb-v does not fit: {error}"
    counts = parallelism.layers
    if counts == "auto" and costs is not None:
        counts, _ = cut_by_costs(costs, num_layers, parallelism.stages)
    cut = cut_layers(num_layers, parallelism.stages, counts)
    line_ms = _predicted_ms(in_line, cut, costs, num_tied)
    is_v = v_ms < (1 - _WORTH_IT) * line_ms
    chosen = IN_A_V if is_v else "adaptive"
    return is_v, f"{chosen}: steps of {line_ms:.4g} ms predicted for adaptive, {v_ms:.4g} for zb-v"


def _predicted_ms(
    config: Config, cut: Sequence[range], costs: LayerCosts | None, num_tied: int
) -> float:
    """The predicted step time of a configuration's schedule, that of its slowest replica.

    Links have no delays except those in `schedule.link_ms`.
    """
    accelerator, placement = config.emulation.accelerator, config.placement
    if accelerator is not None:
        times = accelerator.model_dump().values()
        of_stages = StageCosts(*(per_stage(each, placement.num_ranks) for each in times))
    else:
        assert costs is not None
        by_op = [
            [
                sum(
                    len(cut[stage]) * layer_ms
                    + (embed_ms if stage == 0 else 0.0)
                    + (head_ms if stage == placement.num_virtual_stages - 1 else 0.0)
                    for stage in placement.own_stages(rank)
                )
                for rank in range(placement.num_ranks)
            ]
            for layer_ms, embed_ms, head_ms in zip(
                costs.layer_ms, costs.embed_ms, costs.head_ms, strict=True
            )
        ]
        of_stages = StageCosts(*map(tuple, by_op))

    def step_ms(own: Config) -> float:
        profile = Profile(of_stages, planned_links(own.schedule.link_ms, {}))
        made = plan_step(own, profile, num_tied)
        programs = lower_step(made.schedule, profile, made.routes, num_tied)
        return simulate_step(programs, profile, {}).makespan_ms

    return max(step_ms(config.of_replica(index)) for index in range(config.parallelism.data))


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


def keep_choice(directory: Path, config: Config, layers: tuple[int, ...]) -> None:
    """Write `layers.json`, the number of layers of each virtual stage."""
    chosen = _Cut(config.parallelism.stages, config.parallelism.chunks, layers)
    replace_file(directory / LAYERS, with_sum(dump(chosen)) + "\n")
