"""What a configuration says of one rank's stage."""

from dataclasses import replace

from jaxmorph.config import Config, per_stage
from jaxmorph.planning.plan_in_force import op_kinds, possible_routes
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.stage_settings import StageSettings


def stage_settings(
    config: Config, layers: tuple[range, ...], rank: int, *, adapts: bool = False
) -> StageSettings:
    """What a rank's stage is built from.

    Args:
        layers: The layers of each virtual stage.
        adapts: Whether routes may change from plan to plan: both of every link are made ready.
    """
    optimizer = config.optimizer
    direct, delegated = possible_routes(config, adapts=adapts)
    return StageSettings(
        layers=layers,
        microbatch_size=config.batch.microbatch_size,
        sequence_length=config.data.sequence_length,
        seed=config.run.seed,
        kinds=op_kinds(config),
        optimizer=OptimizerSettings(
            learning_rate=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.run.steps,
            final_fraction=optimizer.final_learning_rate_fraction,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
        ),
        stash=config.stash,
        pace=stage_pace(config, rank),
        transfer_timeout_s=config.timeouts.step_s,
        num_chunks=config.parallelism.chunks,
        direct=direct,
        delegated=delegated,
        fails_over=config.fails_over,
        direct_timeout_s=config.direct_timeout_s,
        weights=config.model.weights,
        copies=config.transport.copies,
    )


def stage_pace(config: Config, rank: int) -> Pace | None:
    """How long a stage's ops last on the emulated accelerator; None where none is emulated.

    The configured times are those of the whole stage: an op of one chunk lasts its share of them.
    """
    accelerator = config.emulation.accelerator
    if accelerator is None:
        return None
    stages = config.parallelism.stages
    durations = (
        accelerator.forward_ms,
        accelerator.backward_input_ms,
        accelerator.backward_weight_ms,
    )
    own_ms = (per_stage(value, stages)[rank] for value in durations)
    pace = Pace.of_stage(*own_ms, num_chunks=config.parallelism.chunks)
    return replace(pace, host_copy_bytes_per_s=1e9 * config.emulation.host_copy_gbps)
