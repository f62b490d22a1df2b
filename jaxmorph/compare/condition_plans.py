"""What a system of a comparison runs under a condition: its plan, and what that should take.

A system that is told of links plans for them as they are, or as they have been lately.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxmorph.compare.condition_links import DelayHistory, RoundLinks, declared_states, delayed
from jaxmorph.compare.systems import System, route_choices
from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.records import Link
from jaxmorph.report.run_matrix import PlannedRun
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.schedule.bound import certified_ms, lower_bound_ms
from jaxmorph.schedule.costs import JITTER_MARGIN, Limits
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.plan_in_force import PlanInForce, agree_on_plan

HOLDS_QUEUES = "holds queues"
OVERLAPS = "overlaps"

_WORTH = 0.01  # what delegating more links must gain
RECENT_S = 10.0
"""How far back the delays lie that a system that adapts is told of."""
_LEAST_CHANGE_MS, _LEAST_CHANGE = 1.0, 0.1  # of what is planned for; less needs no other plan


@dataclass(frozen=True)
class ConditionPlanner:
    """Plans a system's step for one condition after another.

    Attributes:
        profile: What ops and healthy links cost; only rank 0's is read.
        num_tied: How many tied parameters the first and the last stage hold copies of.
    """

    config: Config
    system: System
    rendezvous: Rendezvous
    profile: Profile
    num_tied: int
    message_bytes: int

    def make(self, conditions: Sequence[LinkCondition]) -> tuple[PlanInForce, PlannedRun]:
        """The system's plan and, on rank 0, what to expect of it.

        Args:
            conditions: How links behave; a system that adapts is told of them.
        """
        actual = self._profile_under(conditions, margin_of_jitter=0.0)
        believed = self.profile
        if self.system.adapts:
            believed = self._profile_under(conditions, JITTER_MARGIN)
        slow = [Link(*condition.between) for condition in conditions]
        plans = [
            agree_on_plan(choice, self.rendezvous, believed, self.num_tied)
            for choice in route_choices(self.config, self.system, slow)
        ]
        steps_ms = [plan.simulate(actual).makespan_ms for plan in plans]
        chosen = agree(self.rendezvous, int, _worthwhile(steps_ms))
        return plans[chosen], self._planned(plans[chosen].plan, steps_ms[chosen], actual, slow)

    def begin(
        self, first: PlanInForce, conditions: Sequence[LinkCondition]
    ) -> tuple[PlanInForce, PlannedRun]:
        """What a round of a condition begins with and, on rank 0, what to expect of it.

        Args:
            first: The system's own first plan, with which one that detects begins: it is told
                nothing of the condition.
        """
        if self.system.detects:
            return first, self.expect(first, conditions)
        return self.make(conditions)

    def expect(self, in_force: PlanInForce, conditions: Sequence[LinkCondition]) -> PlannedRun:
        """What to expect of a plan, whatever it was made for."""
        actual = self._profile_under(conditions, margin_of_jitter=0.0)
        predicted_ms = in_force.simulate(actual).makespan_ms
        slow = [Link(*condition.between) for condition in conditions]
        return self._planned(in_force.plan, predicted_ms, actual, slow)

    def _profile_under(
        self, conditions: Sequence[LinkCondition], margin_of_jitter: float
    ) -> Profile:
        added = declared_states(conditions, self.message_bytes, margin_of_jitter)
        return replace(self.profile, links=delayed(self.profile.links, added))

    def _planned(
        self, plan: Plan, predicted_ms: float, actual: Profile, slow: Sequence[Link]
    ) -> PlannedRun:
        sizes = self.config.batch.microbatches, self.config.parallelism.chunks
        bound_ms = lower_bound_ms(actual.costs, sizes[0], actual.links, Limits(), sizes[1])
        return PlannedRun(
            predicted_ms=predicted_ms,
            lower_bound_ms=certified_ms(bound_ms, predicted_ms),
            schedule=plan.schedule.name,
            warmup_forwards=plan.schedule.warmup_forwards,
            routes={str(link): route for link, route in plan.routes.items()},
            regime=_regime(plan, slow),
        )


def _worthwhile(steps_ms: Sequence[float]) -> int:
    """The first of several steps, unless a later one is clearly shorter."""
    best = 0
    for index, step_ms in enumerate(steps_ms):
        if step_ms < steps_ms[best] * (1 - _WORTH):
            best = index
    return best


def _regime(plan: Plan, slow: Sequence[Link]) -> str:
    """How the delays of slow links are spent; with none, how those of any link would be."""
    routes = {plan.routes.get(link, "direct") for link in slow or plan.routes}
    words = {"direct": HOLDS_QUEUES, "delegated": OVERLAPS}
    return " and ".join(words[route] for route in sorted(routes, reverse=True))


class Replanner:
    """Plans anew for delays as they have been lately; it never looks ahead.

    Before a step it sees the delays of the last ``RECENT_S`` seconds of the round, and those by
    step of the step before: their means, and as jitter their standard deviations. It plans for
    these where they have changed by enough to matter.
    """

    def __init__(self, planner: ConditionPlanner, links: RoundLinks) -> None:
        self._planner = planner
        self._steady = links.steady
        self._history = DelayHistory(links.traced)
        self._planned_ms: dict[tuple[int, int], float] = {}

    def __call__(self, step: int, elapsed_s: float) -> PlanInForce | None:
        """A plan for the step to come; None where the one in force will do."""
        since_s = max(0.0, elapsed_s - RECENT_S)
        recent = self._history.over(range(step - 1, step), since_s, elapsed_s)
        planned_ms = {
            way: each.latency_ms + JITTER_MARGIN * each.jitter_ms
            for each in recent
            for way in each.directions()
        }
        if not self._differ(planned_ms):
            return None
        self._planned_ms = planned_ms
        return self._planner.make((*self._steady, *recent))[0]

    def _differ(self, planned_ms: dict[tuple[int, int], float]) -> bool:
        return any(
            not math.isclose(
                planned_ms.get(way, 0.0),
                self._planned_ms.get(way, 0.0),
                rel_tol=_LEAST_CHANGE,
                abs_tol=_LEAST_CHANGE_MS,
            )
            for way in planned_ms.keys() | self._planned_ms.keys()
        )
