"""Simulates a planned step by any link model: those of schedules, and that of lowered programs."""

from jaxmorph.control.profiler import Profile
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.schedule.answer import simulate_links
from jaxmorph.schedule.problem import Problem
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline


def simulate_step(schedule: Schedule, problem: Problem) -> Timeline:
    """Simulates a schedule over a problem's links.

    Args:
        schedule: What every stage runs, in which order.
        problem: Costs, links and link model. ``blocking`` is what direct transfers do: the
            schedule is lowered as training does it, and every transfer holds both ends' queues.

    Returns:
        When every op would run.
    """
    if problem.link_model != "blocking":
        return simulate_links(schedule, problem)
    programs = lower_step(schedule, Profile(problem.costs, problem.links))
    return simulate_blocking(programs, problem.costs, problem.links)
