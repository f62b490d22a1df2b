"""What a run is given so that its ranks may change their order inside a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.chosen_order import order_chosen_by_ranks
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.leeway import with_leeway
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.online import Leeway
from jaxmorph.schedule.planner import Plan

MOST_LONGER = 0.005
"""How much longer than the shortest a step may be if everything comes as planned, as a share."""


QUICKEST_MESSAGES = 2.0
"""How many standard deviations of a link's jitter below its latency its quickest messages are."""


def reorders(config: Config, schedule_name: str | None = None) -> bool:
    """Whether ranks may change their order inside a step.

    Args:
        config: The run. With `auto` they may where the order is the adaptive planner's own, as it
            also is where such a one has come in place of one that the configuration names.
        schedule_name: What the order in force is called; None: the configured one.
    """
    wanted = config.adaptation.intra_step
    one_chunk = config.parallelism.chunks == 1
    name = config.schedule.name if schedule_name is None else schedule_name
    return one_chunk and (wanted == "on" or (wanted == "auto" and name == "adaptive"))


def expected_by_ranks(with_margin: Callable[[float], Profile]) -> Profile:
    """What ranks expect of a step: ops as they are, and of links the quickest messages of late.

    What takes longer is late. So a link that is slow and steady leaves the order as it is, and one
    that comes and goes doesn't.

    Args:
        with_margin: What a step is made of, with so many standard deviations of each link's jitter
            added to its latency.
    """
    return with_margin(-QUICKEST_MESSAGES)


def kept_in_order(config: Config) -> Config:
    """The same run, in which no rank changes its order."""
    adaptation = config.adaptation.model_copy(update={"intra_step": "off"})
    return config.model_copy(update={"adaptation": adaptation})


def easily_reordered(config: Config, made: Plan, profile: Profile, limits: Limits) -> Plan:
    """The plan, in the order that ranks would choose, where that costs next to nothing.

    Args:
        profile: What it was planned for.

    Returns:
        For an `adaptive` schedule on delegated routes alone, the order that ranks would choose
        themselves if everything came as planned: then a late message changes little. Else the same.
    """
    all_delegated = set(made.routes.values()) == {"delegated"}
    name = made.schedule.name
    if not (reorders(config, name) and name == "adaptive" and all_delegated):
        return made
    found = order_chosen_by_ranks(made.schedule, profile.costs, profile.links, limits)
    if found.longer > MOST_LONGER:
        return made
    return replace(made, schedule=found.schedule, predicted_step_s=found.makespan_ms / 1e3)


def leeway_of(
    config: Config, made: Plan, programs: Sequence[RankProgram], expected: Profile, limits: Limits
) -> tuple[RankProgram, ...]:
    """The programs, with leeway where ranks may change their order.

    Args:
        programs: Every rank's instructions for it.

    Returns:
        The same ones where ranks keep their order, as they do where stashes go to host memory: when
        these come back, and whose place they take, depends on it.
    """
    if not reorders(config, made.schedule.name) or any(program.offloads for program in programs):
        return tuple(programs)
    memory = limits.stage_memory(len(programs), programs[0].num_microbatches)
    timeline = simulate_blocking(programs, expected.costs, expected.links)
    return with_leeway(programs, timeline, memory)


def without_effect(config: Config, programs: Sequence[RankProgram]) -> Iterator[str]:
    """What is asked of adapting that changes nothing in the run, a line each, with the reason.

    Args:
        programs: Every rank's, of its first plan.
    """
    if config.adaptation.enabled and not config.adapts:
        yield "adaptation.enabled: true: a pipeline of one stage has no links to adapt to"
    if config.adaptation.intra_step == "on" and (reason := _why_kept(config, programs)):
        yield f"adaptation.intra_step: on: {reason}"


def _why_kept(config: Config, programs: Sequence[RankProgram]) -> str | None:
    """Why no rank changes its order; None: some do, or may come to."""
    if config.parallelism.stages == 1:
        return "a pipeline of one stage waits for no message"
    if config.parallelism.chunks > 1:
        return f"with parallelism.chunks {config.parallelism.chunks} ranks keep their order"
    if any(program.offloads for program in programs):
        return "while a plan moves stashes to host memory ranks keep its order"
    if config.adapts or any(program.leeway is not None for program in programs):
        return None
    return "all links are direct, and ranks change their order where one is delegated"


def others_are_late(before: Sequence[RankProgram], now: Sequence[RankProgram]) -> bool:
    """Whether other ops are late by one leeway than by another, of the same programs.

    Args:
        now: The same, with leeway for other costs and links.

    Returns:
        Whether a wait before an op differs by more than its rank tolerates.
    """
    return any(_differ(old.leeway, new.leeway) for old, new in zip(before, now, strict=True))


def _differ(old: Leeway | None, new: Leeway | None) -> bool:
    if old is None or new is None:
        return old is not new
    pairs = zip(_waits_ms(old), _waits_ms(new), strict=True)
    return any(abs(then - now) > new.tolerance_ms for then, now in pairs)


def _waits_ms(leeway: Leeway) -> Iterator[float]:
    """The wait before each op: a start of its own would have all delays before it in it."""
    ended_ms = (0.0, *leeway.end_ms)
    return (start - ended for start, ended in zip(leeway.start_ms, ended_ms, strict=False))
