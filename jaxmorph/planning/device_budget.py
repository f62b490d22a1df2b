"""What stashes may take of the devices' memory, where the configuration names no cap."""

from dataclasses import astuple
from typing import Any

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.host_copies import HOST_MEMORY
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.planner import PLANNED_SCHEDULES


def with_device_budget(config: Config, rendezvous: Rendezvous, trainer: StageTrainer) -> Config:
    """The configuration with a cap on each stage's stash, by what its device has free.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks; they all call this at the same point, before
            any step and with their parameters and optimizer state in place.
        trainer: This rank's stage.

    Returns:
        The same configuration, the same on all ranks; with `schedule.max_stash_bytes` where no cap
        is named, every device tells its memory, and planning can heed it: by its own order of ops,
        or as stashes may be offloaded. Without offload it is never less than one microbatch needs:
        whether that fits is for the device to say.

    Raises:
        UserError: If stashes may be offloaded, but this rank's device has nowhere to.
    """
    schedule, offloads = config.schedule, config.offload.enabled
    (device,) = trainer.executor.placement.device_set
    if offloads:
        _require_host_memory(device, rendezvous.rank)
    is_capped = schedule.max_live is not None or schedule.max_stash_bytes is not None
    if is_capped or not (offloads or schedule.name in PLANNED_SCHEDULES):
        return config
    least = 1 if offloads else max(astuple(trainer.stash_memory))
    told = rendezvous.exchange({"free_bytes": free_bytes(device), "least_bytes": least})
    if any(rank["free_bytes"] is None for rank in told):
        return config
    fraction = config.offload.device_memory_fraction
    caps = tuple(max(rank["least_bytes"], int(fraction * rank["free_bytes"])) for rank in told)
    return config.model_copy(
        update={"schedule": schedule.model_copy(update={"max_stash_bytes": caps})}
    )


def free_bytes(device: Any) -> int | None:
    """What is free of a device's memory, or None where it doesn't tell."""
    statistics = device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def _require_host_memory(device: Any, rank: int) -> None:
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise UserError(
            f"offload.enabled: got true, expected false: the device of rank {rank} has the "
            f"memories {', '.join(kinds)}, and no {HOST_MEMORY}"
        )
