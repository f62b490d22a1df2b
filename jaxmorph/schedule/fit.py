"""Whether a step fits into the stages' memory, and if not, by how much and what would help."""

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.schedule import Schedule


def require_feasible(limits: Limits, num_stages: int, num_microbatches: int) -> None:
    """Checks that every stage has room for one microbatch: then some schedule fits.

    Args:
        num_microbatches: Number of microbatches in the step.

    Raises:
        UserError: The first stage that one microbatch doesn't fit, and how many bytes are short.
    """
    for stage, memory in enumerate(limits.stage_memory(num_stages, num_microbatches)):
        if memory.needed > memory.room:
            raise UserError(
                f"max_stash_bytes[{stage}]: got {memory.room:,} bytes, expected at least "
                f"{memory.needed:,}, which one microbatch keeps on stage {stage}: "
                f"{memory.needed - memory.room:,} short; smaller microbatches, recomputing the "
                "stash or offloading it would help"
            )


def fits(schedule: Schedule, limits: Limits) -> bool:
    """Whether a schedule keeps every stage's memory cap."""
    try:
        require_room(schedule, limits)
    except UserError:
        return False
    return True


def require_room(schedule: Schedule, limits: Limits) -> None:
    """Checks that a schedule keeps every stage's memory cap.

    Args:
        schedule: The schedule; of V chunks each holds 1/V of a microbatch.

    Raises:
        UserError: The first stage that holds more, and how much.
    """
    memory = limits.stage_memory(schedule.num_stages, schedule.num_microbatches)
    in_bytes = limits.max_stash_bytes is not None
    if not in_bytes and limits.max_live is None:
        return
    for stage, (order, room) in enumerate(zip(schedule.orders, memory, strict=True)):
        peak = -(-room.peak(order) // schedule.num_chunks)
        if peak > room.room:
            raise UserError(
                _too_many_bytes(schedule, stage, peak, room.room)
                if in_bytes
                else _too_many_live(schedule, stage, peak, room.room, limits)
            )


def _too_many_live(schedule: Schedule, stage: int, peak: int, cap: int, limits: Limits) -> str:
    return (
        f"max_live[{stage}]: {schedule.name} holds {peak} microbatches until "
        f"{limits.live_until} on stage {stage}, expected at most {cap}; "
        "paper and adaptive fit any cap"
    )


def _too_many_bytes(schedule: Schedule, stage: int, peak: int, cap: int) -> str:
    return (
        f"max_stash_bytes[{stage}]: {schedule.name} holds {peak:,} bytes on stage {stage}, "
        f"{peak - cap:,} more than {cap:,}; fewer microbatches in flight (as paper and adaptive "
        "plan them), recomputing the stash or offloading it would help"
    )
