"""What ranks take of their hosts' memory: slots, offloaded stashes, and a checkpoint's copy.

All of it is pinned. `limits.host_gib` caps what a rank takes; plans keep within what the
checkpoint's copy leaves. JAX's own pool of pinned memory, for stashes and the copy, has a limit on
GPUs.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from mmap import PAGESIZE

import jax

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.control.offload_planning import offloaded_bytes
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, step_in_slots_ms
from jaxmorph.copies.backends import PayloadShape
from jaxmorph.errors import UserError
from jaxmorph.program.instructions import Channel
from jaxmorph.program.slots_needed import HostRoom, scarce_slots, slots_needed
from jaxmorph.records import Link, in_bytes
from jaxmorph.runtime.payloads import slot_use
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.training.first_plan import with_delegated
from jaxmorph.training.plan_in_force import PlanInForce, plan_step

_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_POOL_GIB = 64  # where the environment doesn't set it (XLA, 2026)


@dataclass(frozen=True)
class RankMemory:
    """The host memory that one rank takes at most under a plan, in bytes."""

    slots: int
    stashes: int
    checkpoint: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.stashes + self.checkpoint


def host_room(
    config: Config,
    payloads: Mapping[Channel, PayloadShape],
    delegated: Collection[Link],
    copies: Sequence[int],
    pools: Sequence[int | None] = (),
) -> HostRoom:
    """The host memory of each rank for slots and stashes.

    Args:
        payloads: Of all channels of the pipeline.
        delegated: The links that may be delegated during the run.
        copies: Bytes of each rank's copy for a checkpoint (`copy_bytes`).
        pools: The size of each rank's own pool of pinned memory; None: without a limit.

    Raises:
        UserError: Some rank has too little even for the fewest slots, or for the checkpoint's copy.
    """
    slot_bytes = {
        channel: -(-slot_use(channel, payload).slot_bytes // PAGESIZE) * PAGESIZE
        for channel, payload in payloads.items()
        if channel.link in delegated
    }
    _require_pools(copies, pools)
    known = [pool for pool in pools if pool is not None]
    devices = config.parallelism.tensor  # stashes are counted per device
    left = tuple((pool - copy) // devices for pool, copy in zip(known, copies, strict=False))
    stash_bytes = left if len(left) == len(copies) else None
    limit = config.limits.host_bytes
    if limit is None:
        return HostRoom(slot_bytes, stash_bytes=stash_bytes)
    room = HostRoom(slot_bytes, tuple(limit - copy for copy in copies), stash_bytes)
    short = room.short_bytes()
    rank = max(range(len(short)), key=short.__getitem__)
    if short[rank] > 0:
        raise UserError(_too_little(config, rank, limit + short[rank], copies[rank]))
    if not config.offload.enabled:
        return room
    halves = tuple(-each // 2 for each in short)  # of what is left beside the fewest slots
    stashes = tuple(half // devices for half in halves)
    stashes = stashes if stash_bytes is None else tuple(map(min, stashes, stash_bytes))
    slots = (limit - copy - half for copy, half in zip(copies, halves, strict=True))
    return HostRoom(slot_bytes, tuple(slots), stashes)


@dataclass(frozen=True)
class HostForecast:
    """The host memory that ranks take, as forecast before anything is measured.

    If the run adapts, all links count as delegated at once, as in its measured steps.

    Attributes:
        ranks: Within the limit, if there is one.
        unlimited: Without a limit.
        step_ratio: How much longer the limit makes the planned step; 1.0: not at all.
    """

    ranks: tuple[RankMemory, ...]
    unlimited: tuple[RankMemory, ...]
    step_ratio: float


def forecast(
    config: Config, profile: Profile, num_tied: int, room: HostRoom, copies: Sequence[int]
) -> HostForecast:
    """The host memory of a run's plans for equally long ops and links without delay.

    Raises:
        UserError: No plan can run within the limit.
    """
    if config.adapts:
        config = with_delegated(config, possible_links(config.parallelism.stages))

    def planned(room: HostRoom) -> tuple[tuple[RankMemory, ...], float]:
        made = plan_step(config, profile, num_tied, room)
        programs = lower_step(made.schedule, profile, made.routes, num_tied, made.offloading)
        needed = slots_needed(programs)
        given = room.slots_that_fit(needed)
        step_ms = step_in_slots_ms(programs, profile, scarce_slots(given, needed))
        taken = room.taken_bytes(given, len(programs))
        away = (config.parallelism.tensor * each for each in offloaded_bytes(programs, profile))
        return tuple(map(RankMemory, taken, away, copies)), step_ms

    unlimited, free_ms = planned(replace(room, rank_bytes=None, stash_bytes=None))
    ranks, step_ms = (unlimited, free_ms) if room.rank_bytes is None else planned(room)
    return HostForecast(ranks, unlimited, step_ms / free_ms)


def room_in_words(in_force: PlanInForce, room: HostRoom | None) -> str:
    """How `limits.host_gib` limits a plan's slots, in words; "" if the plan has enough."""
    if room is None or not in_force.scarce:
        return ""
    num_ranks = len(in_force.programs)
    enough = room.slots_wanted(slots_needed(in_force.programs))
    # Some slots may be there for evaluations alone.
    used = {channel: min(number, enough[channel]) for channel, number in in_force.slots.items()}
    most = [max(room.taken_bytes(slots, num_ranks)) for slots in (used, enough)]
    return (
        f"within limits.host_gib a rank has at most {in_bytes(most[0])} of slots, where its plan "
        f"would use {in_bytes(most[1])}: sends may wait, as the predicted step says"
    )


def copy_bytes(config: Config, state_bytes: int) -> int:
    """The bytes of a rank's copy for a checkpoint; 0 if the run saves none."""
    return state_bytes if config.checkpoint.saves else 0


def agree_on_host_room(
    config: Config,
    rendezvous: Rendezvous,
    stage: StageTrainer,
    payloads: Mapping[Channel, PayloadShape],
    delegated: Collection[Link],
) -> HostRoom:
    """`host_room` of a run whose stages are built; all ranks call this at the same point."""
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stage.state))
    own = copy_bytes(config, state_bytes), _pool_bytes(stage.device.platform)
    ranks = gather(rendezvous, tuple[int, int | None], own)
    copies, pools = [copy for copy, _ in ranks], [pool for _, pool in ranks]
    return host_room(config, payloads, delegated, copies, pools)


def _pool_bytes(platform: str) -> int | None:
    """The most pinned memory that JAX takes in a process; None: JAX sets no limit."""
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    configured = os.environ.get(_POOL, "")
    return (int(configured) if configured.isdecimal() else _POOL_GIB) << 30


def _require_pools(copies: Sequence[int], pools: Sequence[int | None]) -> None:
    for rank, (copy, pool) in enumerate(zip(copies, pools, strict=False)):
        if pool is not None and copy > pool:
            raise UserError(
                f"checkpoint.every_steps: a save copies {in_bytes(copy)} of rank {rank}'s state to "
                f"pinned host memory, expected at most {in_bytes(pool)}, of which XLA makes use: "
                f"set {_POOL}={-(-copy >> 30) + 1} or more, or every_steps=0 to save nothing"
            )


def _too_little(config: Config, rank: int, needed: int, copy: int) -> str:
    expected = -(-needed * 1000 // 2**30) / 1000
    parts = [f"{in_bytes(needed - copy)} for the fewest slots of its links"]
    if copy:
        parts.append(f"{in_bytes(copy)} for a checkpoint's copy")
    return (
        f"limits.host_gib: got {config.limits.host_gib:g}, expected at least {expected:g}: rank "
        f"{rank} takes {' and '.join(parts)}"
    )
