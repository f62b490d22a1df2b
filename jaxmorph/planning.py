"""How the ranks of a run come to run the same plan: rank 0 plans, all lower its answer."""

from dataclasses import asdict, dataclass

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.errors import UserError
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import RankProgram
from jaxmorph.queue_aware import shorter_on_queues
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan, plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.stage.stash import StashMemory
from jaxmorph.step_programs import lower_step

_FULL_BACKWARD = ("gpipe", "1f1b", "1f1b-eager", "interleaved")


@dataclass(frozen=True)
class PlanInForce:
    """A plan with what it becomes on the ranks.

    Attributes:
        plan: Schedule, routes and the reason for them.
        programs: Every rank's instructions.
        rank: This rank.
    """

    plan: Plan
    programs: tuple[RankProgram, ...]
    rank: int

    @property
    def program(self) -> RankProgram:
        """This rank's instructions."""
        return self.programs[self.rank]

    def simulate(self, profile: Profile) -> Timeline:
        """The step as it would run, direct transfers holding queues.

        Args:
            profile: What ops and links cost.
        """
        return simulate_blocking(self.programs, profile.costs, profile.links)


def op_kinds(config: Config) -> frozenset[OpKind]:
    """The kinds of op that the configured schedule runs."""
    if config.schedule.name in _FULL_BACKWARD:
        return frozenset({OpKind.F, OpKind.BW})
    return frozenset({OpKind.F, OpKind.B, OpKind.W})


def unmeasured_profile(config: Config, stash_bytes: StashBytes | None = None) -> Profile:
    """What is assumed before anything has run: all ops alike, links without latency."""
    return Profile(StageCosts.uniform(config.parallelism.stages, 1.0, 1.0, 1.0), {}, stash_bytes)


def agree_on_stash(rendezvous: Rendezvous, memory: StashMemory) -> StashBytes:
    """What one microbatch keeps on each stage, by the stages' compiled programs.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        memory: This rank's.
    """
    told = rendezvous.exchange(asdict(memory))
    return StashBytes(
        tuple(rank["after_forward_bytes"] for rank in told),
        tuple(rank["after_backward_input_bytes"] for rank in told),
    )


def agree_on_plan(
    config: Config, rendezvous: Rendezvous, profile: Profile, num_tied: int
) -> PlanInForce:
    """Plan on rank 0 and adopt its answer on every rank.

    Args:
        config: The run.
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        profile: What ops and links cost; only rank 0's is read.
        num_tied: How many tied parameters the first and the last stage hold copies of.

    Returns:
        The plan, its programs checked by a replay of all ranks.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    answer = {}
    if rendezvous.rank == 0:
        made = plan_step(config, profile)
        answer = {"profile": profile.to_json(), "plan": made.to_json()}
    answer = rendezvous.exchange(answer)[0]
    made = Plan.from_json(answer["plan"])
    agreed = Profile.from_json(answer["profile"])
    programs = lower_step(made.schedule, agreed, made.routes, num_tied)
    return PlanInForce(made, programs, rendezvous.rank)


def plan_step(config: Config, profile: Profile) -> Plan:
    """The configured schedule for what ops and links cost.

    Args:
        config: The run.
        profile: What ops and links cost; without the stash's sizes a cap in bytes isn't heeded.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    limits = _limits(config, profile)
    schedule = config.schedule
    microbatches, chunks = config.batch.microbatches, config.parallelism.chunks
    try:
        made = plan(
            profile.costs, profile.links, limits, microbatches, schedule.name, num_chunks=chunks
        )
    except UserError as error:
        name, _, says = str(error).partition(": ")  # the planner's names have no section
        raise UserError(f"{_key(name)}: {says}") from error
    return shorter_on_queues(made, profile, limits) if schedule.name == "adaptive" else made


def _limits(config: Config, profile: Profile) -> Limits:
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
