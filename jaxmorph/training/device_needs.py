"""What each stage of a run will keep in its device's memory, found by tracing it: nothing runs."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import jax

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.optimizer import OptimizerSettings, adamw
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.schedule.costs import StashBytes
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import Plan
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameters import parameter_count
from jaxmorph.stage.stage_functions import StashMemory, TracedStage, total_bytes, trace_stage
from jaxmorph.training.device_budget import heeds_budget, with_stash_caps
from jaxmorph.training.open_stage import stage_settings
from jaxmorph.training.plan_in_force import plan_step, unmeasured_profile


@dataclass(frozen=True)
class StageNeeds:
    """What one stage keeps, whatever the schedule.

    Attributes:
        parameter_bytes: Bytes of its parameters, which are float32.
        prepared_bytes: Bytes of what is computed from the parameters once a step: most often
            nothing, or the same in the type that the model computes in.
    """

    layers: tuple[range, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    prepared_bytes: int
    stashes: tuple[StashMemory, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of what is kept all the time."""
        state_bytes = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return state_bytes + self.prepared_bytes

    @property
    def stash(self) -> StashMemory:
        """What one microbatch keeps, in all chunks together."""
        return StashMemory(*map(sum, zip(*map(astuple, self.stashes), strict=True)))

    def peak_stash_bytes(self, order: Sequence[Op]) -> int:
        """The most bytes that its stashes take when it runs its ops in an order."""
        held = peak = 0
        for op in order:
            until_b, until_w = astuple(self.stashes[op.chunk])
            change = {
                OpKind.F: until_b,
                OpKind.B: until_w - until_b,
                OpKind.W: -until_w,
                OpKind.BW: -until_b,
            }
            held += change[op.kind]
            peak = max(peak, held)
        return peak


@dataclass(frozen=True)
class StepNeeds:
    """What all stages keep in a step.

    Attributes:
        num_parameters: Of the whole model, a tied one counted once.
        message_bytes: Bytes of a microbatch's activation between two stages, and of its gradient; 0
            where there is but one stage.
        plan: The step as it is planned when all ops take as long and links take no time.
    """

    num_parameters: int
    message_bytes: int
    stages: tuple[StageNeeds, ...]
    plan: Plan

    @property
    def stash_bytes(self) -> tuple[int, ...]:
        """The most bytes that each stage's stashes take under the plan, offloaded ones too."""
        rows = zip(self.stages, self.plan.schedule.orders, strict=True)
        return tuple(stage.peak_stash_bytes(order) for stage, order in rows)


def needs_of_step(
    config: Config, model: PipelineModel, device_bytes: int | None = None
) -> StepNeeds:
    """What the stages of a run will keep on their devices.

    What programs need while they run comes on top of it: only compiling tells that.

    Args:
        config: The run; `layers: auto` counts as even.
        device_bytes: What JAX may take of each stage's device; None: that isn't known.

    Returns:
        The stages' needs, by the shapes that they will be compiled for, and the plan.

    Raises:
        UserError: If a stage can't keep its cap, or the model can't be traced.
    """
    cut = config.parallelism
    layers = cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)
    ranks = [stage_settings(config, layers, rank) for rank in range(cut.stages)]
    stages = _needs_of_stages(model, ranks)
    plan = _plan(config, stages, len(model.tied), device_bytes)
    return StepNeeds(parameter_count(model), ranks[0].message_bytes(model), stages, plan)


def _plan(
    config: Config, stages: Sequence[StageNeeds], num_tied: int, device_bytes: int | None
) -> Plan:
    """The step as a run would plan it, had it measured nothing but memory."""
    stashes = [astuple(stage.stash) for stage in stages]
    if device_bytes is not None and heeds_budget(config):
        free = [device_bytes - stage.state_bytes for stage in stages]
        config = with_stash_caps(config, free, [max(stash) for stash in stashes])
    sizes = StashBytes(*zip(*stashes, strict=True))
    return plan_step(config, unmeasured_profile(config, sizes), num_tied)


def _needs_of_stages(
    model: PipelineModel, ranks: Sequence[StageSettings]
) -> tuple[StageNeeds, ...]:
    """Each rank's; virtual stages of a kind, as inner ones most often are, are traced once."""

    @cache
    def traced(num_layers: int, is_first: bool, is_last: bool) -> TracedStage:
        return _traced(model, ranks[0], num_layers, is_first, is_last)

    def needs(rank: int, settings: StageSettings) -> StageNeeds:
        own = settings.own_stages(rank)
        layers = tuple(settings.layers[i] for i in own)
        kinds = ((len(settings.layers[i]), i == 0, settings.is_last(i)) for i in own)
        return _needs(settings, layers, [traced(*kind) for kind in kinds])

    return tuple(needs(rank, settings) for rank, settings in enumerate(ranks))


def _traced(
    model: PipelineModel, settings: StageSettings, num_layers: int, is_first: bool, is_last: bool
) -> TracedStage:
    """A stage of a kind; a model that can't be traced is told in one line, and the rest in logs."""
    try:
        return trace_stage(
            model,
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
            microbatch_size=settings.microbatch_size,
            sequence_length=settings.sequence_length,
            stash=settings.stash,
        )
    except (TypeError, ValueError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"model.factory: its model can't be traced: {type(error).__name__}: {first_line}"
        ) from error


def _needs(
    settings: StageSettings, layers: tuple[range, ...], chunks: Sequence[TracedStage]
) -> StageNeeds:
    params = tuple(chunk.params for chunk in chunks)
    optimizer = settings.optimizer
    if isinstance(optimizer, OptimizerSettings):
        optimizer = adamw(optimizer)
    return StageNeeds(
        layers=layers,
        parameter_bytes=_bytes_of(params),
        gradient_bytes=_bytes_of([chunk.sums for chunk in chunks]),
        optimizer_bytes=_bytes_of(jax.eval_shape(optimizer.init, params)),
        prepared_bytes=_bytes_of([chunk.prepared for chunk in chunks]),
        stashes=tuple(chunk.memory for chunk in chunks),
    )


def _bytes_of(tree: Any) -> int:
    return total_bytes(jax.tree.leaves(tree))
