"""What a run is given so that its ranks may change their order inside a step."""

from collections.abc import Sequence
from dataclasses import replace

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.chosen_order import order_chosen_by_ranks
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.leeway import with_leeway
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.planner import Plan

MOST_LONGER = 0.005
"""How much longer than the shortest a step may be if everything comes as planned, as a share."""


def reorders(config: Config) -> bool:
    """Whether ranks may change their order inside a step.

    Args:
        config: The run. With `auto` they may where the order is the adaptive planner's own: one
            that is named in the configuration is kept.
    """
    wanted = config.adaptation.intra_step
    one_chunk = config.parallelism.chunks == 1
    return one_chunk and (
        wanted == "on" or (wanted == "auto" and config.schedule.name == "adaptive")
    )


def kept_in_order(config: Config) -> Config:
    """The same run, in which no rank changes its order."""
    adaptation = config.adaptation.model_copy(update={"intra_step": "off"})
    return config.model_copy(update={"adaptation": adaptation})


def easily_reordered(config: Config, made: Plan, profile: Profile, limits: Limits) -> Plan:
    """The plan, in the order that ranks would choose, where that costs next to nothing.

    Args:
        config: The run.
        made: What was planned.
        profile: What it was planned for.
        limits: Memory caps.

    Returns:
        For an `adaptive` schedule on delegated routes alone, the order that ranks would choose
        themselves if everything came as planned: then a late message changes little. Else the same.
    """
    all_delegated = set(made.routes.values()) == {"delegated"}
    if not (reorders(config) and config.schedule.name == "adaptive" and all_delegated):
        return made
    found = order_chosen_by_ranks(made.schedule, profile.costs, profile.links, limits)
    if found.longer > MOST_LONGER:
        return made
    return replace(made, schedule=found.schedule, predicted_step_s=found.makespan_ms / 1e3)


def leeway_of(
    config: Config, programs: Sequence[RankProgram], expected: Profile, limits: Limits
) -> tuple[RankProgram, ...]:
    """The programs, with leeway where ranks may change their order.

    Args:
        config: The run.
        programs: Every rank's instructions.
        expected: What ops cost, and the quickest messages of late: what takes longer is late, so
            that ranks keep to a plan for delays that come and go only while they don't.
        limits: Memory caps.

    Returns:
        The same ones where ranks keep their order, as they do where stashes go to host memory: when
        these come back, and whose place they take, depends on it.
    """
    if not reorders(config) or any(program.offloads for program in programs):
        return tuple(programs)
    memory = limits.stage_memory(len(programs), programs[0].num_microbatches)
    timeline = simulate_blocking(programs, expected.costs, expected.links)
    return with_leeway(programs, timeline, memory)
