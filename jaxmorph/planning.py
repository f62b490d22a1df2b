"""How the ranks of a run come to run the same plan: rank 0 plans, all lower its answer."""

from dataclasses import astuple, dataclass
from statistics import median

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.errors import UserError
from jaxmorph.program.check import check
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.lowering import lower
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan, plan
from jaxmorph.schedule.simulator import simulate

_NOISE = 0.05  # a difference between stages that is not worth an order of transfers


@dataclass(frozen=True)
class PlanInForce:
    """A plan with what it becomes on one rank.

    Attributes:
        plan: Schedule, routes and the reason for them.
        program: This rank's instructions.
    """

    plan: Plan
    program: RankProgram


def op_kinds(config: Config) -> frozenset[OpKind]:
    """The kinds of op that the configured schedule runs."""
    if config.schedule.name in ("gpipe", "1f1b"):
        return frozenset({OpKind.F, OpKind.BW})
    return frozenset({OpKind.F, OpKind.B, OpKind.W})


def unmeasured_profile(config: Config) -> Profile:
    """What is assumed before anything has run: all ops alike, links without latency."""
    return Profile(StageCosts.uniform(config.parallelism.stages, 1.0, 1.0, 1.0), {})


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
    planned = simulate(made.schedule, *_for_ordering(made, agreed))
    programs = lower(made.schedule, planned, made.routes, num_tied=num_tied)
    check(programs)
    return PlanInForce(made, programs[rendezvous.rank])


def plan_step(config: Config, profile: Profile) -> Plan:
    """The configured schedule for what ops and links cost.

    Args:
        config: The run.
        profile: What ops and links cost.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    stages, schedule = config.parallelism.stages, config.schedule
    limits = Limits(schedule.max_live_per_stage(stages), schedule.live_until)
    microbatches = config.batch.microbatches
    try:
        return plan(profile.costs, profile.links, limits, microbatches, schedule.name)
    except UserError as error:
        name, _, says = str(error).partition(": ")  # the planner's names have no section
        key = "schedule.max_live" if name.startswith("max_live") else f"schedule: {name}"
        raise UserError(f"{key}: {says}") from error


def _for_ordering(made: Plan, profile: Profile) -> tuple[StageCosts, Links]:
    """What decides the order of direct transfers: costs without noise, and delegated links alone.

    A direct transfer holds both ends' queues, so stages that cost the same run in step, boundary to
    boundary. A difference of a percent between measured costs, or a link's latency of a fraction
    of an op, must not push transfers into the middle of the peer's ops, where both ends would wait.
    """
    costs = StageCosts(*map(_without_noise, astuple(profile.costs)))
    delegated = {
        link: state
        for link, state in profile.links.items()
        if made.routes.get(link, "direct") == "delegated"
    }
    return costs, delegated


def _without_noise(durations_ms: tuple[float, ...]) -> tuple[float, ...]:
    """Stages that cost nearly the median cost exactly that; the others stay as they are."""
    middle_ms = median(durations_ms)
    near_ms = _NOISE * middle_ms
    return tuple(
        middle_ms if abs(duration_ms - middle_ms) <= near_ms else duration_ms
        for duration_ms in durations_ms
    )
