"""Gives all ranks of a run the same plan: rank 0 plans, and each rank lowers its answer."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.config.sections import SPLIT_SCHEDULES
from jaxmorph.control.offload_planning import plan_with_offload
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import (
    lower_step,
    shorter_in_slots,
    shorter_on_queues,
    simulate_step,
)
from jaxmorph.errors import UserError
from jaxmorph.program.instructions import Channel, RankInstructions
from jaxmorph.program.lowering import forward_only
from jaxmorph.program.slots_needed import (
    HostRoom,
    handover_slots,
    most_slots,
    scarce_slots,
    slots_needed,
)
from jaxmorph.records import Link, Route
from jaxmorph.runtime.rendezvous import Rendezvous, agree, gather
from jaxmorph.schedule.costs import CopyCosts, Limits, StageCosts, StashBytes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan, plan
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:  # the planning process, which runs beside training, imports no JAX
    from jaxmorph.stage.stage_functions import StashMemory


@dataclass(frozen=True)
class PlanInForce:
    """A plan as ranks run it.

    Attributes:
        slots: The slots of each delegated channel.
        scarce: The slots of channels that have too few, so that a send may wait for one.
    """

    plan: Plan
    programs: tuple[RankInstructions, ...]
    rank: int
    slots: Mapping[Channel, int] = field(default_factory=dict)
    scarce: Mapping[Channel, int] = field(default_factory=dict)

    @property
    def program(self) -> RankInstructions:
        """This rank's instructions."""
        return self.programs[self.rank]

    def simulate(self, profile: Profile) -> Timeline:
        """See `simulate_step`."""
        return simulate_step(self.programs, profile, self.scarce)

    def with_slots_to_evaluate(self) -> "PlanInForce":
        """The plan with the slots that its forwards need when no backward runs between them."""
        needed = slots_needed([*map(forward_only, self.programs)])
        return replace(self, slots=most_slots(self.slots, needed))

    def with_slots_that_fit(self, room: HostRoom | None) -> "PlanInForce":
        """The plan with the slots that fit: those of its steps before any others that it has."""
        if room is None or room.rank_bytes is None:
            return self
        needed = slots_needed(self.programs)
        given = room.slots_that_fit(needed, self.slots)
        return replace(self, slots=given, scarce=scarce_slots(given, needed))


def op_kinds(config: Config) -> frozenset[OpKind]:
    """The kinds of op that the configured schedule runs."""
    if config.schedule.name not in SPLIT_SCHEDULES:
        return frozenset({OpKind.F, OpKind.BW})
    return frozenset({OpKind.F, OpKind.B, OpKind.W})


def unmeasured_profile(config: Config, stash_bytes: StashBytes | None = None) -> Profile:
    """The profile before any measurement: ops and copies of equal cost, links without latency."""
    stages = config.parallelism.stages
    copies = CopyCosts.uniform(stages, 1.0) if config.offload.enabled else None
    return Profile(StageCosts.uniform(stages, 1.0, 1.0, 1.0), {}, stash_bytes, copies=copies)


def agree_on_stash(rendezvous: Rendezvous, memory: "StashMemory") -> StashBytes:
    """What one microbatch keeps on each stage; all ranks call this at the same point."""
    memories = gather(rendezvous, type(memory), memory)
    return StashBytes(*zip(*map(astuple, memories), strict=True))


def agree_on_plan(
    config: Config,
    rendezvous: Rendezvous,
    profile: Profile,
    num_tied: int,
    room: HostRoom | None = None,
) -> PlanInForce:
    """Plan on rank 0, and lower and check the plan on every rank.

    All ranks call this at the same point; `profile` is rank 0's.

    Raises:
        UserError: The schedule can't keep the configured caps.
    """
    own = None
    if rendezvous.rank == 0:
        own = profile, plan_step(config, profile, num_tied, room)
    agreed, made = agree(rendezvous, tuple[Profile, Plan], own)
    programs = lower_step(made.schedule, agreed, made.routes, num_tied, made.offloading)
    in_force = PlanInForce(made, programs, rendezvous.rank, slots_of_plan(config, programs))
    return in_force.with_slots_that_fit(room)


def slots_of_plan(config: Config, programs: tuple[RankInstructions, ...]) -> dict[Channel, int]:
    """The slots with which no send of a plan's steps waits, even if a link is handed over."""
    slots = slots_needed(programs)
    return most_slots(slots, handover_slots(programs)) if config.hands_over else slots


def plan_step(
    config: Config, profile: Profile, num_tied: int = 0, room: HostRoom | None = None
) -> Plan:
    """The configured schedule for the costs of a profile, on the configured routes.

    With `offload.enabled` it may keep more than the caps, and offloads the excess to host memory.
    The plan's routes leave out a direct link that only tied gradients take.

    Raises:
        UserError: The schedule can't keep the configured caps.
    """
    limits = limits_of(config, profile)
    plan_within = partial(_plan_within, config, profile, num_tied, room)
    if not config.offload.enabled:
        return plan_within(limits)
    return plan_with_offload(plan_within, limits, profile, num_tied, room)


def _plan_within(
    config: Config, profile: Profile, num_tied: int, room: HostRoom | None, limits: Limits
) -> Plan:
    schedule = config.schedule
    microbatches, chunks = config.microbatches, config.parallelism.chunks
    try:
        made = plan(
            profile.costs, profile.links, limits, microbatches, schedule.name, num_chunks=chunks
        )
    except UserError as error:
        name, _, says = str(error).partition(": ")  # the planner's names have no section
        raise UserError(f"{_key(name)}: {says}") from error
    made = replace(made, routes=_routes(config, made, num_tied))
    if schedule.name == "adaptive":
        made = shorter_on_queues(made, profile, limits)
    if room is not None:
        made = shorter_in_slots(made, profile, limits, num_tied, room)
    return made


def _routes(config: Config, made: Plan, num_tied: int) -> dict[Link, Route]:
    routes = config.routes.of_links(made.routes)
    ends = config.placement.ends_link
    if num_tied and ends is not None:
        tied = config.routes.of_links([ends])
        routes |= {link: route for link, route in tied.items() if route != "direct"}
    return routes


def possible_routes(
    config: Config, *, adapts: bool = False
) -> tuple[frozenset[Link], frozenset[Link]]:
    """The links that may be direct during a run, and those that may be delegated.

    A run that adapts may change every link; one that fails over may delegate every link.
    """
    links = possible_links(config.parallelism.stages)
    if adapts:
        return frozenset(links), frozenset(links)
    routes = config.routes.of_links(links)
    direct = frozenset(link for link, route in routes.items() if route == "direct")
    return direct, frozenset(links) if config.fails_over else frozenset(links) - direct


def limits_of(config: Config, profile: Profile) -> Limits:
    """The caps of a run's stages; a cap in bytes is ignored while stash sizes are unknown."""
    stages, schedule = config.parallelism.stages, config.schedule
    max_bytes = schedule.max_stash_bytes_per_stage(stages)
    if max_bytes is not None and profile.stash_bytes is not None:
        limits = Limits(max_stash_bytes=max_bytes, stash_bytes=profile.stash_bytes)
    else:
        limits = Limits(schedule.max_live_per_stage(stages), schedule.live_until)
    if OpKind.BW in op_kinds(config):
        return limits.of_whole_backwards()
    return replace(limits, weight_group=schedule.weight_group)


def _key(name: str) -> str:
    """The configuration key of an error, by the planner's name for it."""
    if name.startswith("max_live"):
        return "schedule.max_live"  # the rest of the message names the stage
    if name.startswith("max_stash_bytes"):
        return f"schedule.{name}"
    # These two refuse only a number of microbatches: too few, or not a multiple of the rounds.
    return "batch.microbatches" if name in ("interleaved", "dualpipe-v") else f"schedule: {name}"
