"""Solves planning problems, one or a batch: plans, simulates and bounds them."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.errors import UserError
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.schedule.bound import certified_ms, lower_bound_ms
from jaxmorph.schedule.costs import Limits, StageMemory
from jaxmorph.schedule.planner import alternatives, plan, require_room
from jaxmorph.schedule.problem import Problem, SimulatedLinkModel, parse_problem
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import jittered_makespans_ms, simulate
from jaxmorph.schedule.timeline import Timeline

_JITTER_SAMPLES = 1000
_JITTER_SEED = 0
_ROUNDING = 1e-9
"""Relative: bound and makespan sum the same times in different orders."""


class JitteredMakespan(NamedTuple):
    """The step time over many steps with jittering latencies."""

    mean_ms: float
    p90_ms: float


@dataclass(frozen=True)
class Answer:
    """A problem's planned or given schedule and its simulation over the problem's links.

    Args:
        lower_bound_ms: A step time that no schedule can beat.
        planning_ms: 0 for given orders.
        jittered: None unless the problem has jitter.
    """

    name: str
    schedule: Schedule
    timeline: Timeline
    lower_bound_ms: float
    planning_ms: float
    limits: Limits
    link_model: SimulatedLinkModel = "latency"
    jittered: JitteredMakespan | None = None

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound: 0.01 for one percent."""
        bound_ms = self.lower_bound_ms
        gap = self.timeline.makespan_ms / bound_ms - 1 if bound_ms else 0.0
        return gap if gap > _ROUNDING else 0.0

    @property
    def peak_stash_bytes(self) -> tuple[int, ...] | None:
        """Most bytes of each stage's stash, counted until W; None without stash sizes."""
        sizes = self.limits.stash_bytes
        if sizes is None:
            return None
        rows = zip(
            self.schedule.orders, sizes.after_forward, sizes.after_backward_input, strict=True
        )
        peaks = (StageMemory(forward, backward, 0).peak(order) for order, forward, backward in rows)
        return tuple(-(-peak // self.schedule.num_chunks) for peak in peaks)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that ``jaxmorph plan --batch`` prints."""
        answer = {
            "name": self.name,
            "schedule": self.schedule.name,
            "makespan_ms": self.timeline.makespan_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "bubble_rate": self.timeline.bubble_rate,
            "warmup_forwards": list(self.schedule.warmup_forwards),
            "peak_live": list(self.schedule.peak_live(self.limits.live_until)),
            "planning_ms": self.planning_ms,
            "orders": self.schedule.to_json()["orders"],
        }
        if self.schedule.placement_kind != "wrap":
            answer["placement"] = self.schedule.placement_kind
        if self.jittered is not None:
            answer["expected_makespan_ms"] = self.jittered.mean_ms
            answer["p90_makespan_ms"] = self.jittered.p90_ms
        if self.peak_stash_bytes is not None:
            answer["peak_stash_bytes"] = list(self.peak_stash_bytes)
        return answer


def solve(problem: Problem) -> Answer:
    """Plans for the planned links (unless orders are given) and simulates the actual ones.

    Raises:
        UserError: An unknown schedule, impossible warm-ups, or a cap that cannot be kept.
    """
    started = time.perf_counter()
    schedule = problem.orders or _planned(problem)
    planning_ms = 0.0 if problem.orders else (time.perf_counter() - started) * 1e3
    limits = problem.limits if schedule.splits_backward else problem.limits.of_whole_backwards()
    require_room(schedule, limits)
    timeline = _simulate(schedule, problem)
    bound_ms = lower_bound_ms(
        problem.costs,
        problem.num_microbatches,
        problem.links,
        limits,
        schedule.placement,
    )
    return Answer(
        problem.name,
        schedule,
        timeline,
        certified_ms(bound_ms, timeline.makespan_ms),
        planning_ms,
        limits,
        problem.link_model,
        _jittered(schedule, problem),
    )


def _simulate(schedule: Schedule, problem: Problem) -> Timeline:
    """A schedule over a problem's links, by the problem's link model."""
    if problem.link_model == "blocking":
        # Direct transfers hold the queues of both ends. Their order matters, so lower the schedule
        # as training does.
        programs = lower_step(schedule, Profile(problem.costs, problem.links))
        return simulate_blocking(programs, problem.costs, problem.links)
    return simulate(
        schedule,
        problem.costs,
        problem.links,
        problem.link_model,
        time_step_ms=problem.time_step_ms,
    )


def _planned(problem: Problem) -> Schedule:
    inputs = problem.costs, problem.planned_links, problem.limits, problem.num_microbatches
    own = plan(*inputs, problem.schedule, problem.warmup_forwards, problem.num_chunks).schedule
    is_plain = problem.link_model == "latency" and problem.time_step_ms is None
    if is_plain or problem.schedule != "adaptive" or problem.warmup_forwards is not None:
        return own
    # The planner knows latencies only. Under another link model an alternative may be shorter.
    planned = replace(problem, links=problem.planned_links)
    return min(
        [own, *alternatives(*inputs)],
        key=lambda schedule: _simulate(schedule, planned).makespan_ms,
    )


def _jittered(schedule: Schedule, problem: Problem) -> JitteredMakespan | None:
    if problem.jitter_ms is None:
        return None
    makespans_ms = jittered_makespans_ms(
        schedule,
        problem.costs,
        problem.links,
        problem.jitter_ms,
        _JITTER_SAMPLES,
        _JITTER_SEED,
    )
    return JitteredMakespan(float(makespans_ms.mean()), float(np.quantile(makespans_ms, 0.9)))


def answer_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Answers a batch of problems in order; a bad one gets ``{"name", "error"}``.

    Args:
        lines: UTF-8, one JSON problem a line; empty lines are skipped.
    """
    for line in lines:
        if line.strip():
            yield _answer_line(line)


def _answer_line(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"name": None, "error": f"not JSON: {error}"}
    try:
        return solve(parse_problem(data)).to_json()
    except UserError as error:
        name = data.get("name") if isinstance(data, dict) else None
        return {"name": name if isinstance(name, str) else None, "error": str(error)}
