"""Stages and their devices' memory: caps on stashes from free memory, and a forecast by tracing.

The caps apply where the configuration sets none; `jaxmorph train --dry-run` prints the forecast.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import jax

from jaxmorph.config import Config
from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.control.step_programs import lower_step
from jaxmorph.errors import UserError, in_users_code
from jaxmorph.placement import Replica
from jaxmorph.program.dataflow import most_payloads
from jaxmorph.records import in_bytes
from jaxmorph.runtime.host_copies import HOST_MEMORY
from jaxmorph.runtime.optimizer import OptimizerSettings, adamw
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.shares import Shares
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import StashBytes
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.schedule.planner import Plan
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel
from jaxmorph.stage.parameters import parameter_count
from jaxmorph.stage.stage_functions import StashMemory, TracedStage, total_bytes, trace_stage
from jaxmorph.training.host_memory import HostForecast, copy_bytes, forecast, host_room
from jaxmorph.training.open_stage import stage_settings
from jaxmorph.training.plan_in_force import op_kinds, plan_step, unmeasured_profile


@dataclass(frozen=True)
class WithinDevices:
    """A run's configuration, with caps from its devices' memory.

    Attributes:
        for_first_plan: Without caps for a fixed schedule, which fails if it doesn't fit.
        for_later_plans: For the plans that adaptation makes.
    """

    for_first_plan: Config
    for_later_plans: Config


def with_device_budget(
    config: Config, rendezvous: Rendezvous, trainer: StageTrainer
) -> WithinDevices:
    """Cap each stage's stash by the free memory of its device, the same on all ranks.

    All ranks call this at the same point, before any step and with their parameters and optimizer
    state in place. It sets `schedule.max_stash_bytes` if the configuration sets no cap, every
    device reports its memory, and the planner can keep the cap.

    Raises:
        UserError: Stashes may be offloaded, but this rank's device has no host memory.
    """
    offloads = config.offload.enabled
    device = trainer.device
    if offloads:
        _require_host_memory(device, rendezvous.rank)
    if config.schedule.is_capped or not (keeps_budget(config) or config.adapts):
        return WithinDevices(config, config)
    # Without offload a stage must hold at least one microbatch, or the group of one W, whether or
    # not that fits.
    least = 1 if offloads else _least_bytes(config, trainer.stash_memory)
    memories = gather(rendezvous, tuple[int | None, int], (free_bytes(device), least))
    free = [free for free, _ in memories if free is not None]
    if len(free) < len(memories):
        return WithinDevices(config, config)
    capped = with_stash_caps(config, free, [least for _, least in memories])
    return WithinDevices(capped if keeps_budget(config) else config, capped)


def keeps_budget(config: Config) -> bool:
    """Whether the first plan can keep a cap from free memory: it is planned, or it offloads."""
    can_keep = config.offload.enabled or config.schedule.name in PLANNED_SCHEDULES
    return can_keep and not config.schedule.is_capped


def _least_bytes(config: Config, stash: StashMemory) -> int:
    """What a stage keeps with as few microbatches as it can."""
    waiting = config.schedule.weight_group - 1 if OpKind.W in op_kinds(config) else 0
    return max(astuple(stash)) + waiting * stash.after_backward_input_bytes


def with_stash_caps(config: Config, free: Sequence[int], least: Sequence[int]) -> Config:
    """Cap each stage's stash at `offload.device_memory_fraction` of its free bytes.

    Args:
        least: The least cap of each stage, bytes.
    """
    fraction = config.offload.device_memory_fraction
    pairs = zip(free, least, strict=True)
    caps = tuple(max(least_bytes, int(fraction * free_bytes)) for free_bytes, least_bytes in pairs)
    schedule = config.schedule.model_copy(update={"max_stash_bytes": caps})
    return config.model_copy(update={"schedule": schedule})


def budget_in_words(asked: Config, within: WithinDevices) -> str:
    """The caps that `with_device_budget` has set, in words; "" if it set none."""
    caps = within.for_later_plans.schedule.max_stash_bytes_per_stage(asked.parallelism.stages)
    if caps is None or within.for_later_plans.schedule == asked.schedule:
        return ""
    whose = "" if within.for_first_plan == within.for_later_plans else " of new plans"
    return f"stashes{whose} may take {', '.join(map(in_bytes, caps))} of what the devices have free"


def free_bytes(device: Any) -> int | None:
    """The free part of the memory that JAX may take on a device; None if it isn't reported."""
    statistics = device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def _require_host_memory(device: Any, rank: int) -> None:
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise UserError(
            f"offload.enabled: got true, expected false: the device of rank {rank} has no "
            f"{HOST_MEMORY} memory, only {', '.join(kinds)}"
        )


@dataclass(frozen=True)
class StageNeeds:
    """What one stage keeps in device memory, whatever the schedule.

    Attributes:
        prepared_bytes: What the stage computes from its parameters once a step, such as a copy in
            the compute dtype.
        temporary_bytes: An estimate of the most that an op takes beside its inputs.
    """

    layers: tuple[range, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    prepared_bytes: int
    temporary_bytes: int
    stashes: tuple[StashMemory, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes kept from step to step."""
        state_bytes = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return state_bytes + self.prepared_bytes

    @property
    def stash(self) -> StashMemory:
        """The stash of one microbatch, all chunks together."""
        return StashMemory(*map(sum, zip(*map(astuple, self.stashes), strict=True)))

    def peak_stash_bytes(self, order: Sequence[Op]) -> int:
        """The most bytes that stashes take when the stage runs its ops in this order."""
        held = peak = 0
        for op in order:
            until_b, until_w = astuple(self.stashes[op.chunk])
            change = {
                OpKind.F: until_b,
                OpKind.B: until_w - until_b,
                OpKind.W: -until_w,
                OpKind.BW: -until_b,
            }
            held += op.group * change[op.kind]
            peak = max(peak, held)
        return peak


@dataclass(frozen=True)
class StepNeeds:
    """What all stages keep in a step.

    Attributes:
        num_parameters: Of the whole model; tied parameters count once.
        message_bytes: Bytes of one activation, or of its gradient; 0 with one stage.
        plan: The plan for equally long ops and links without delay.
        payload_bytes: The most bytes of messages that each rank's device holds at once.
        host: The host memory of each rank, with all links delegated if the run may do that.
    """

    num_parameters: int
    message_bytes: int
    stages: tuple[StageNeeds, ...]
    plan: Plan
    payload_bytes: tuple[int, ...]
    host: HostForecast

    @property
    def stash_bytes(self) -> tuple[int, ...]:
        """The most bytes of stashes of each stage under the plan, offloaded ones included."""
        rows = zip(self.stages, self.plan.schedule.orders, strict=True)
        return tuple(stage.peak_stash_bytes(order) for stage, order in rows)


def needs_of_step(
    config: Config,
    model: PipelineModel,
    device_bytes: int | None = None,
    shapes: MicrobatchShapes | None = None,
) -> StepNeeds:
    """Forecast the memory of a run's stages, by tracing alone; `layers: auto` counts as even.

    The size of temporary buffers is an estimate; only compiled programs show the real one.

    Args:
        device_bytes: What JAX may take of each stage's device; None: unknown.
        shapes: The data of one microbatch; None: the configured text's.

    Raises:
        UserError: A stage can't keep its cap, or the model can't be traced.
    """
    cut = config.parallelism
    layers = cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)
    ranks = [
        stage_settings(
            config,
            layers,
            rank,
            adapts=config.adapts,
            shapes=shapes,
            replica=Replica(0, cut.data),
        )
        for rank in range(cut.stages)
    ]
    stages = _needs_of_stages(model, ranks)
    if device_bytes is not None and keeps_budget(config):  # caps from what is free beside the state
        free = [device_bytes - stage.state_bytes for stage in stages]
        config = with_stash_caps(config, free, [_least_bytes(config, it.stash) for it in stages])
    sizes = StashBytes(*zip(*(astuple(stage.stash) for stage in stages), strict=True))
    profile = unmeasured_profile(config, sizes)
    # A save copies whole arrays; this overcounts arrays that all devices replicate.
    saved = [cut.tensor * (stage.parameter_bytes + stage.optimizer_bytes) for stage in stages]
    copies = [copy_bytes(config, num_bytes) for num_bytes in saved]
    room = host_room(config, ranks[0].payloads(model), ranks[0].delegated, copies)
    plan = plan_step(config, profile, len(model.tied), room)
    programs = lower_step(plan.schedule, profile, plan.routes, len(model.tied), plan.offloading)
    message_bytes = ranks[0].message_bytes(model)
    parts = max((each.num_parts for each in ranks[0].payloads(model).values()), default=1)
    return StepNeeds(
        num_parameters=parameter_count(model),
        message_bytes=message_bytes,
        stages=stages,
        plan=plan,
        payload_bytes=tuple(
            message_bytes // parts * most_payloads(program) for program in programs
        ),
        host=forecast(config, profile, len(model.tied), room, copies),
    )


def _needs_of_stages(
    model: PipelineModel, ranks: Sequence[StageSettings]
) -> tuple[StageNeeds, ...]:
    @cache  # inner stages are mostly alike: each kind is traced once
    def traced(num_layers: int, is_first: bool, is_last: bool) -> TracedStage:
        return _traced(model, ranks[0], num_layers, is_first, is_last)

    def needs(rank: int, settings: StageSettings) -> StageNeeds:
        own = settings.chunks_of(rank)
        kinds = [traced(len(layers), *ends) for layers, *ends in own]
        return _needs(settings, tuple(layers for layers, *_ in own), kinds)

    return tuple(needs(rank, settings) for rank, settings in enumerate(ranks))


def _traced(
    model: PipelineModel, settings: StageSettings, num_layers: int, is_first: bool, is_last: bool
) -> TracedStage:
    with in_users_code("its model can't be traced", otherwise="model.factory"):
        return trace_stage(
            model,
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
            shapes=settings.shapes,
            stash=settings.stash,
            num_devices=settings.num_devices,
        )


def _temporary_bytes(chunk: TracedStage, settings: StageSettings) -> int:
    # W of a group adds a layer's gradients together, so it has all of them at once.
    others = settings.weight_group - 1 if OpKind.W in settings.kinds else 0
    of_a_layer = _bytes_of(chunk.sums["layers"]) // chunk.functions.num_layers
    return chunk.functions.temporary_bytes + others * of_a_layer


def _needs(
    settings: StageSettings, layers: tuple[range, ...], chunks: Sequence[TracedStage]
) -> StageNeeds:
    updated = params = tuple(chunk.params for chunk in chunks)
    if settings.divides_optimizer:
        updated = Shares.of(params, settings.replica).shapes(params)
    optimizer = settings.optimizer
    if isinstance(optimizer, OptimizerSettings):
        optimizer = adamw(optimizer)
    return StageNeeds(
        layers=layers,
        parameter_bytes=_bytes_of(params),
        gradient_bytes=_bytes_of([chunk.sums for chunk in chunks]),
        optimizer_bytes=_bytes_of(jax.eval_shape(optimizer.init, updated)),
        prepared_bytes=_bytes_of([chunk.prepared for chunk in chunks]),
        temporary_bytes=max(_temporary_bytes(chunk, settings) for chunk in chunks),
        stashes=tuple(chunk.memory for chunk in chunks),
    )


def _bytes_of(tree: Any) -> int:
    return total_bytes(jax.tree.leaves(tree))
