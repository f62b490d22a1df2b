"""What each stage of a run will keep in its device's memory, found by tracing it: nothing runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxmorph.config import Config
from jaxmorph.planning.plan_in_force import plan_step, unmeasured_profile
from jaxmorph.program.instructions import Payload
from jaxmorph.runtime.optimizer import OptimizerSettings, adamw
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.schedule.memory import StashBytes, peak_stash_bytes
from jaxmorph.schedule.planner import Plan
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameter_count import parameter_count
from jaxmorph.stage.stash import StashMemory, total_bytes
from jaxmorph.stage.tracing import TracedStage, trace_stage
from jaxmorph.training.stage_settings import stage_settings


@dataclass(frozen=True)
class StageNeeds:
    """What one stage keeps, whatever the schedule.

    Attributes:
        layers: The layers of each of its chunks.
        parameter_bytes: Of these, float32.
        gradient_bytes: Of their accumulators.
        optimizer_bytes: Of the optimizer's state.
        prepared_bytes: Of what is computed from the parameters once a step: most often nothing, or
            the same in the type that the model computes in.
        stash: What one microbatch keeps, in all chunks together.
    """

    layers: tuple[range, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    prepared_bytes: int
    stash: StashMemory

    @property
    def state_bytes(self) -> int:
        """What is kept all the time."""
        state_bytes = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return state_bytes + self.prepared_bytes


@dataclass(frozen=True)
class StepNeeds:
    """What all stages keep in a step.

    Attributes:
        num_parameters: Of the whole model, a tied one counted once.
        message_bytes: Of one microbatch's activation or gradient between two stages; 0 with one.
        stages: Each one's part that no schedule changes.
        plan: The step as it is planned when all ops take as long and links take no time.
        stash_bytes: The most that the stashes of each stage take under it, offloaded ones counted.
    """

    num_parameters: int
    message_bytes: int
    stages: tuple[StageNeeds, ...]
    plan: Plan
    stash_bytes: tuple[int, ...]


def needs_of_step(config: Config, model: PipelineModel) -> StepNeeds:
    """What the stages of a run will keep on their devices.

    What programs need while they run comes on top of it: only compiling tells that.

    Args:
        config: The run; `layers: auto` counts as even.
        model: Its model, which is traced for the default device.

    Raises:
        UserError: If a stage can't keep its cap.
    """
    cut = config.parallelism
    layers = cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)
    ranks = [stage_settings(config, layers, rank) for rank in range(cut.stages)]
    stages = _needs_of_stages(model, ranks)
    sizes = StashBytes(
        tuple(stage.stash.after_forward_bytes for stage in stages),
        tuple(stage.stash.after_backward_input_bytes for stage in stages),
    )
    plan = plan_step(config, unmeasured_profile(config, sizes), len(model.tied))
    return StepNeeds(
        parameter_count(model),
        _message_bytes(model, ranks[0]),
        stages,
        plan,
        peak_stash_bytes(plan.schedule.orders, sizes, cut.chunks),
    )


def _message_bytes(model: PipelineModel, settings: StageSettings) -> int:
    sizes = (
        math.prod(payload.shape) * payload.dtype.itemsize
        for channel, payload in settings.payloads(model).items()
        if channel.payload is not Payload.TIED
    )
    return max(sizes, default=0)


def _needs_of_stages(
    model: PipelineModel, ranks: Sequence[StageSettings]
) -> tuple[StageNeeds, ...]:
    """Each rank's; virtual stages of a kind, as inner ones most often are, are traced once."""

    @cache
    def traced(num_layers: int, is_first: bool, is_last: bool) -> TracedStage:
        return trace_stage(
            model,
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
            microbatch_size=ranks[0].microbatch_size,
            sequence_length=ranks[0].sequence_length,
            stash=ranks[0].stash,
        )

    def needs(rank: int, settings: StageSettings) -> StageNeeds:
        own = settings.own_stages(rank)
        layers = tuple(settings.layers[i] for i in own)
        kinds = ((len(settings.layers[i]), i == 0, settings.is_last(i)) for i in own)
        return _needs(settings, layers, [traced(*kind) for kind in kinds])

    return tuple(needs(rank, settings) for rank, settings in enumerate(ranks))


def _needs(
    settings: StageSettings, layers: tuple[range, ...], chunks: Sequence[TracedStage]
) -> StageNeeds:
    params = tuple(chunk.params for chunk in chunks)
    optimizer = settings.optimizer
    if isinstance(optimizer, OptimizerSettings):
        optimizer = adamw(optimizer)
    memories = [chunk.memory for chunk in chunks]
    return StageNeeds(
        layers=layers,
        parameter_bytes=_bytes_of(params),
        gradient_bytes=_bytes_of([chunk.sums for chunk in chunks]),
        optimizer_bytes=_bytes_of(jax.eval_shape(optimizer.init, params)),
        prepared_bytes=_bytes_of([chunk.prepared for chunk in chunks]),
        stash=StashMemory(
            sum(memory.after_forward_bytes for memory in memories),
            sum(memory.after_backward_input_bytes for memory in memories),
        ),
    )


def _bytes_of(tree: Any) -> int:
    return total_bytes(jax.tree.leaves(tree))
