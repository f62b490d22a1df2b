"""What stashes may take of the devices' memory, where the configuration names no cap."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.report.text import in_bytes
from jaxmorph.runtime.host_copies import HOST_MEMORY
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.planner import PLANNED_SCHEDULES


@dataclass(frozen=True)
class WithinDevices:
    """A run as it is planned within its devices' memory.

    Attributes:
        first: For its first plan. A fixed schedule runs as it is: whether that fits is for the
            devices to say.
        new: For the plans that replace it while the run lasts.
    """

    first: Config
    new: Config


@dataclass(frozen=True)
class _Memory:
    """What a rank's device has free, if it reports that, and what no cap may go below."""

    free_bytes: int | None
    least_bytes: int


def with_device_budget(
    config: Config, rendezvous: Rendezvous, trainer: StageTrainer
) -> WithinDevices:
    """The configuration with a cap on each stage's stash, by what its device has free.

    All ranks call this at the same point, before any step and with their parameters and optimizer
    state in place.

    Returns:
        The same configuration for the first plan and for those that replace it, the same on all
        ranks. Where no cap is named and every device tells its memory, both have
        `schedule.max_stash_bytes` if planning can heed it: by its own order of ops, or as stashes
        may be offloaded. If only the plans that replace a fixed schedule can, theirs has it.
        Without offload it is never less than one microbatch needs: whether that fits is for the
        device to say.

    Raises:
        UserError: If stashes may be offloaded, but this rank's device has nowhere to.
    """
    offloads = config.offload.enabled
    device = trainer.device
    if offloads:
        _require_host_memory(device, rendezvous.rank)
    if config.schedule.is_capped or not (heeds_budget(config) or config.adapts):
        return WithinDevices(config, config)
    least = 1 if offloads else max(astuple(trainer.stash_memory))
    memories = gather(rendezvous, _Memory, _Memory(free_bytes(device), least))
    free = [each.free_bytes for each in memories if each.free_bytes is not None]
    if len(free) < len(memories):
        return WithinDevices(config, config)
    capped = with_stash_caps(config, free, [each.least_bytes for each in memories])
    return WithinDevices(capped if heeds_budget(config) else config, capped)


def heeds_budget(config: Config) -> bool:
    """Whether the first plan can keep within what devices have free, and no other cap is named."""
    can_keep = config.offload.enabled or config.schedule.name in PLANNED_SCHEDULES
    return can_keep and not config.schedule.is_capped


def with_stash_caps(config: Config, free: Sequence[int], least: Sequence[int]) -> Config:
    """The configuration with caps by what is free on each stage's device.

    Args:
        free: Of which stashes may take `offload.device_memory_fraction`, bytes.
        least: What no cap goes below, bytes.
    """
    fraction = config.offload.device_memory_fraction
    pairs = zip(free, least, strict=True)
    caps = tuple(max(least_bytes, int(fraction * free_bytes)) for free_bytes, least_bytes in pairs)
    schedule = config.schedule.model_copy(update={"max_stash_bytes": caps})
    return config.model_copy(update={"schedule": schedule})


def budget_in_words(asked: Config, within: WithinDevices) -> str:
    """What stashes may take, where the devices and not the configuration have said so; else ""."""
    caps = within.new.schedule.max_stash_bytes_per_stage(asked.parallelism.stages)
    if caps is None or within.new.schedule == asked.schedule:
        return ""
    whose = "" if within.first == within.new else " of new plans"
    return f"stashes{whose} may take {', '.join(map(in_bytes, caps))} of what the devices have free"


def free_bytes(device: Any) -> int | None:
    """What is free of the memory that JAX may take on a device, or None where it doesn't say."""
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
