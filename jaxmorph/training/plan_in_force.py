"""How the ranks of a run come to run the same plan: rank 0 plans, all lower its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.config.sections import SPLIT_SCHEDULES
from jaxmorph.control.offload_planning import plan_with_offload
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, shorter_on_queues
from jaxmorph.errors import UserError
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import Channel, RankProgram
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link, Route
from jaxmorph.runtime.rendezvous import Rendezvous, agree, gather
from jaxmorph.schedule.costs import CopyCosts, Limits, StageCosts, StashBytes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan, plan
from jaxmorph.schedule.timeline import Timeline

if TYPE_CHECKING:  # planning itself, in a process beside training, does without JAX
    from jaxmorph.stage.stage_functions import StashMemory


@dataclass(frozen=True)
class PlanInForce:
    """A plan with what it becomes on the ranks.

    Attributes:
        slots: How many slots each delegated channel needs, so that no send waits for one.
    """

    plan: Plan
    programs: tuple[RankProgram, ...]
    rank: int
    slots: Mapping[Channel, int] = field(default_factory=dict)

    @property
    def program(self) -> RankProgram:
        """This rank's instructions."""
        return self.programs[self.rank]

    def simulate(self, profile: Profile) -> Timeline:
        """The step as it would run: direct transfers hold queues, delegated ones don't."""
        return simulate_blocking(self.programs, profile.costs, profile.links, copies=profile.copies)


def op_kinds(config: Config) -> frozenset[OpKind]:
    """The kinds of op that the configured schedule runs."""
    if config.schedule.name not in SPLIT_SCHEDULES:
        return frozenset({OpKind.F, OpKind.BW})
    return frozenset({OpKind.F, OpKind.B, OpKind.W})


def unmeasured_profile(config: Config, stash_bytes: StashBytes | None = None) -> Profile:
    """What is assumed before anything has run: all ops alike, links without latency.

    A copy of a stash is taken to last as long as an op.
    """
    stages = config.parallelism.stages
    copies = CopyCosts.uniform(stages, 1.0) if config.offload.enabled else None
    return Profile(StageCosts.uniform(stages, 1.0, 1.0, 1.0), {}, stash_bytes, copies=copies)


def agree_on_stash(rendezvous: Rendezvous, memory: "StashMemory") -> StashBytes:
    """What one microbatch keeps on each stage, by the compiled programs; all ranks call this."""
    memories = gather(rendezvous, type(memory), memory)
    return StashBytes(
        tuple(each.after_forward_bytes for each in memories),
        tuple(each.after_backward_input_bytes for each in memories),
    )


@dataclass(frozen=True)
class _Planned:
    """A plan, and what it was made for."""

    profile: Profile
    plan: Plan


def agree_on_plan(
    config: Config, rendezvous: Rendezvous, profile: Profile, num_tied: int
) -> PlanInForce:
    """Plan on rank 0 and adopt its answer on every rank.

    All ranks call this at the same point.

    Args:
        profile: What ops and links cost; only rank 0's is read.
        num_tied: How many tied parameters the first and the last stage hold copies of.

    Returns:
        The plan, its programs checked by a replay of all ranks.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    own = None
    if rendezvous.rank == 0:
        own = _Planned(profile, plan_step(config, profile, num_tied))
    answer = agree(rendezvous, _Planned, own)
    made, agreed = answer.plan, answer.profile
    programs = lower_step(made.schedule, agreed, made.routes, num_tied, made.offloading)
    return PlanInForce(made, programs, rendezvous.rank, slots_needed(programs))


def plan_step(config: Config, profile: Profile, num_tied: int = 0) -> Plan:
    """The configured schedule for what ops and links cost, on the configured routes.

    With `offload.enabled` it may hold more than the caps say: the rest goes to host memory.

    Args:
        profile: What ops and links cost; without the stash's sizes a cap in bytes isn't heeded.

    Returns:
        The plan. It names the route of every link that activations and gradients take, and of the
        one for tied gradients alone where that isn't direct.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    limits = limits_of(config, profile)
    plan_within = partial(_plan_within, config, profile, num_tied)
    if not config.offload.enabled:
        return plan_within(limits)
    return plan_with_offload(plan_within, limits, profile, num_tied)


def _plan_within(config: Config, profile: Profile, num_tied: int, limits: Limits) -> Plan:
    """The configured schedule within some caps."""
    schedule = config.schedule
    microbatches, chunks = config.batch.microbatches, config.parallelism.chunks
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
    return made


def _routes(config: Config, made: Plan, num_tied: int) -> dict[Link, Route]:
    routes = config.routes.of_links(made.routes)
    last = config.parallelism.stages - 1
    if num_tied and last > 0:
        tied = config.routes.of_links([Link(0, last)])
        routes |= {link: route for link, route in tied.items() if route != "direct"}
    return routes


def possible_routes(
    config: Config, *, adapts: bool = False
) -> tuple[frozenset[Link], frozenset[Link]]:
    """The links that may be direct while a run lasts, and those that may be delegated.

    Args:
        adapts: Whether routes may change from plan to plan: then every link may be either. Where
            links fail over every one may have to be delegated.
    """
    links = possible_links(config.parallelism.stages)
    if adapts:
        return frozenset(links), frozenset(links)
    routes = config.routes.of_links(links)
    direct = frozenset(link for link, route in routes.items() if route == "direct")
    return direct, frozenset(links) if config.fails_over else frozenset(links) - direct


def limits_of(config: Config, profile: Profile) -> Limits:
    """The caps of a run's stages; without the stash's sizes a cap in bytes isn't heeded."""
    stages, schedule = config.parallelism.stages, config.schedule
    max_bytes = schedule.max_stash_bytes_per_stage(stages)
    if max_bytes is not None and profile.stash_bytes is not None:
        return Limits(max_stash_bytes=max_bytes, stash_bytes=profile.stash_bytes)
    return Limits(schedule.max_live_per_stage(stages), schedule.live_until)


def _key(name: str) -> str:
    """The key of the configuration that is at fault, by what the planner calls it."""
    if name.startswith("max_live"):
        return "schedule.max_live"  # what follows names the stage
    if name.startswith("max_stash_bytes"):
        return f"schedule.{name}"
    # `interleaved` has but one complaint: microbatches that don't go into its rounds.
    return "batch.microbatches" if name == "interleaved" else f"schedule: {name}"
