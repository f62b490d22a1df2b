"""Decides what to run: a schedule that fits the costs, the links and the memory, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxmorph.errors import UserError
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.builders import FIXED_SCHEDULES
from jaxmorph.schedule.costs import Limits, Link, Links, StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.selection import select_ops
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.slackness import adapted_warmup_forwards, reachable_warmup_forwards

Route = Literal["direct", "delegated"]

PLANNED_SCHEDULES = ("paper", "adaptive")
SCHEDULE_NAMES = (*FIXED_SCHEDULES, *PLANNED_SCHEDULES)


@dataclass(frozen=True)
class Plan:
    """What every rank runs next, and what is expected of it.

    Args:
        schedule: The order of every stage's ops.
        routes: How each link's transfers travel.
        predicted_step_s: The simulated step time, seconds.
        lower_bound_s: A step time that no schedule could beat, seconds.
        reason: Why this plan, in one line.
    """

    schedule: Schedule
    routes: Mapping[Link, Route]
    predicted_step_s: float
    lower_bound_s: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object, with links as ``"2-3"``."""
        return {
            "schedule": self.schedule.to_json(),
            "routes": {str(link): route for link, route in self.routes.items()},
            "predicted_step_s": self.predicted_step_s,
            "lower_bound_s": self.lower_bound_s,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that ``to_json`` described.

        Raises:
            ValueError: An op or a link cannot be read.
        """
        return cls(
            Schedule.from_json(data["schedule"]),
            {Link.parse(link): route for link, route in data["routes"].items()},
            data["predicted_step_s"],
            data["lower_bound_s"],
            data["reason"],
        )


def plan(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    name: str = "adaptive",
    warmup_forwards: Sequence[int] | None = None,
) -> Plan:
    """Plans one step: the same arguments give the same plan on every machine.

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.
        limits: Memory caps.
        num_microbatches: Number of microbatches.
        name: One of ``SCHEDULE_NAMES``. ``paper`` is Algorithm 2 and the greedy selection of
            Algorithms 3 and 4; ``adaptive`` is the best planner there is.
        warmup_forwards: Warm-up forwards of each stage in place of Algorithm 2's.

    Returns:
        The plan, with every link of neighbours on the direct route.

    Raises:
        UserError: An unknown name, a cap the schedule cannot keep, or impossible warm-ups.
    """
    schedule, reason = _order(costs, links, limits, num_microbatches, name, warmup_forwards)
    require_room(schedule, limits)
    neighbours = [Link(stage, stage + 1) for stage in range(costs.num_stages - 1)]
    makespan_ms = simulate(schedule, costs, links).makespan_ms
    bound_ms = lower_bound_ms(costs, num_microbatches, links, limits)
    return Plan(
        schedule,
        dict.fromkeys(neighbours, "direct"),
        makespan_ms / 1e3,
        min(bound_ms, makespan_ms) / 1e3,  # they are summed in different orders
        reason,
    )


def require_room(schedule: Schedule, limits: Limits) -> None:
    """Checks that a schedule keeps every stage's memory cap.

    Raises:
        UserError: A stage holds more microbatches than its cap.
    """
    caps = limits.caps(schedule.num_stages, schedule.num_microbatches)
    peaks = schedule.peak_live(limits.live_until)
    for stage, (peak, cap) in enumerate(zip(peaks, caps, strict=True)):
        if peak > cap:
            raise UserError(
                f"max_live[{stage}]: {schedule.name} holds {peak} microbatches until "
                f"{limits.live_until} on stage {stage}, expected at most {cap}; "
                "paper and adaptive fit any cap"
            )


def _order(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    name: str,
    warmup_forwards: Sequence[int] | None,
) -> tuple[Schedule, str]:
    """The schedule called ``name``, and why its order is what it is."""
    if name not in SCHEDULE_NAMES:
        raise UserError(f"schedule: got {name!r}, expected one of {', '.join(SCHEDULE_NAMES)}")
    if num_microbatches < 1:
        raise UserError(f"num_microbatches: got {num_microbatches}, expected at least 1")
    caps = limits.caps(costs.num_stages, num_microbatches)
    if name in FIXED_SCHEDULES:
        if warmup_forwards is not None:
            raise UserError(f"warmup_forwards: {name} has its own, expected paper or adaptive")
        schedule = FIXED_SCHEDULES[name](costs.num_stages, num_microbatches)
        return schedule, f"{name} was asked for; its order depends on no cost"
    if warmup_forwards is None:
        warmup_forwards = adapted_warmup_forwards(costs, links, num_microbatches, caps)
        origin = "by Equation 1, within the caps"
    else:
        _require_possible(warmup_forwards, num_microbatches, caps)
        origin = "as given"
    schedule = select_ops(costs, links, limits, num_microbatches, warmup_forwards, name)
    warmups = " ".join(map(str, warmup_forwards))
    # Before its first B arrives, a stage may have room for more forwards than these.
    return schedule, f"warm-up forwards at least {warmups} {origin}; then B before F before W"


def _require_possible(
    warmup_forwards: Sequence[int], num_microbatches: int, caps: Sequence[int]
) -> None:
    if len(warmup_forwards) != len(caps):
        raise UserError(
            f"warmup_forwards: got {len(warmup_forwards)} values, expected {len(caps)} "
            "(one per stage)"
        )
    reachable = reachable_warmup_forwards(warmup_forwards, num_microbatches, caps)
    for stage, (wanted, most) in enumerate(zip(warmup_forwards, reachable, strict=True)):
        if not 1 <= wanted <= most:
            raise UserError(
                f"warmup_forwards[{stage}]: got {wanted}, expected 1 to {max(most, 1)} (no more "
                "than the stage before, its cap, and the number of microbatches)"
            )
