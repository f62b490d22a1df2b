"""What stashes may take of the devices' memory, where the configuration names no cap."""

from typing import Any

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.host_copies import HOST_MEMORY
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_trainer import StageTrainer


def with_device_budget(config: Config, rendezvous: Rendezvous, trainer: StageTrainer) -> Config:
    """The configuration with a cap on each stage's stash, by what its device has free.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks; they all call this at the same point, before
            any step and with their parameters and optimizer state in place.
        trainer: This rank's stage.

    Returns:
        The same configuration, the same on all ranks; with `schedule.max_stash_bytes` where stashes
        may be offloaded, no cap is named, and every device tells its memory.

    Raises:
        UserError: If stashes may be offloaded, but this rank's device has nowhere to.
    """
    if not config.offload.enabled:
        return config
    (device,) = trainer.executor.placement.device_set
    _require_host_memory(device, rendezvous.rank)
    schedule = config.schedule
    if schedule.max_live is not None or schedule.max_stash_bytes is not None:
        return config
    told = rendezvous.exchange({"free_bytes": free_bytes(device)})
    free = [rank["free_bytes"] for rank in told]
    if None in free:
        return config
    fraction = config.offload.device_memory_fraction
    caps = tuple(max(1, int(fraction * of_stage)) for of_stage in free)
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
