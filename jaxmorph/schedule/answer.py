"""Solves planning problems: plans, simulates, measures, and answers in JSON."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxmorph.errors import UserError
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.ops import LiveUntil
from jaxmorph.schedule.planner import plan, require_room
from jaxmorph.schedule.problem import Problem, parse_problem
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.timeline import Timeline


@dataclass(frozen=True)
class Answer:
    """A problem's schedule and how it would run.

    Args:
        name: The problem's name.
        schedule: The planned or given schedule.
        timeline: Its simulation over the problem's links.
        lower_bound_ms: A step time that no schedule could beat.
        planning_ms: How long planning took.
        live_until: How live microbatches are counted.
    """

    name: str
    schedule: Schedule
    timeline: Timeline
    lower_bound_ms: float
    planning_ms: float
    live_until: LiveUntil

    def to_json(self) -> dict[str, Any]:
        """The answer as one line of ``jaxmorph plan --batch`` prints it."""
        return {
            "name": self.name,
            "schedule": self.schedule.name,
            "makespan_ms": self.timeline.makespan_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "bubble_rate": self.timeline.bubble_rate,
            "warmup_forwards": list(self.schedule.warmup_forwards),
            "peak_live": list(self.schedule.peak_live(self.live_until)),
            "planning_ms": self.planning_ms,
            "orders": self.schedule.to_json()["orders"],
        }


def solve(problem: Problem) -> Answer:
    """Plans (unless orders are given) for the believed links, and simulates the real ones.

    Args:
        problem: What to plan and to simulate.

    Returns:
        The schedule, its timeline and its bound.

    Raises:
        UserError: An unknown schedule, impossible warm-ups, or a cap that cannot be kept.
    """
    started = time.perf_counter()
    schedule = problem.orders or _planned(problem)
    planning_ms = (time.perf_counter() - started) * 1e3
    require_room(schedule, problem.limits)
    timeline = simulate(schedule, problem.costs, problem.links)
    bound_ms = lower_bound_ms(
        problem.costs, problem.num_microbatches, problem.links, problem.limits
    )
    # Bound and makespan are summed in different orders: equal ones may differ in the last bit.
    bound_ms = min(bound_ms, timeline.makespan_ms)
    live_until = problem.limits.live_until
    return Answer(problem.name, schedule, timeline, bound_ms, planning_ms, live_until)


def answer_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Answers a batch of problems, one JSON object a line, in order.

    Args:
        lines: UTF-8 JSON, one problem a line; empty lines are passed over.

    Yields:
        Each problem's answer, or ``{"name", "error"}`` for a problem with a mistake in it.
    """
    for line in lines:
        if line.strip():
            yield _answer_line(line)


def _answer_line(line: bytes) -> dict[str, Any]:
    data: object = None
    try:
        data = _decoded(line)
        return solve(parse_problem(data)).to_json()
    except UserError as error:
        name = data.get("name") if isinstance(data, dict) else None
        return {"name": name if isinstance(name, str) else None, "error": str(error)}


def _decoded(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from error


def _planned(problem: Problem) -> Schedule:
    return plan(
        problem.costs,
        problem.planned_links,
        problem.limits,
        problem.num_microbatches,
        problem.schedule,
        problem.warmup_forwards,
    ).schedule
