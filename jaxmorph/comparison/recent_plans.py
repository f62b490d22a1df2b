"""Plans that follow the delays of links as they have been seen lately."""

import math

from jaxmorph.comparison.condition_links import RoundLinks
from jaxmorph.comparison.condition_plans import ConditionPlanner
from jaxmorph.comparison.delay_history import DelayHistory
from jaxmorph.planning.plan_in_force import PlanInForce
from jaxmorph.schedule.costs import MARGIN_OF_JITTER

RECENT_S = 10.0
"""How far back the delays lie that a system that adapts is told of."""

_LEAST_CHANGE_MS, _LEAST_CHANGE = 1.0, 0.1  # of what is planned for; less needs no other plan


class Replanner:
    """Plans anew for delays as they have been lately; it never looks ahead.

    Before a step it sees the delays of the last ``RECENT_S`` seconds of the round, and those by
    step of the step before: their means, and as jitter their standard deviations. It plans for
    these where they have changed by enough to matter.

    Args:
        planner: Makes the plans of a system that adapts.
        links: How links behave in the round.
    """

    def __init__(self, planner: ConditionPlanner, links: RoundLinks) -> None:
        self._planner = planner
        self._steady = links.steady
        self._history = DelayHistory(links.traced)
        self._planned_ms: dict[tuple[int, int], float] = {}

    def __call__(self, step: int, elapsed_s: float) -> PlanInForce | None:
        """A plan for the step to come; None where the one in force will do.

        Args:
            elapsed_s: Seconds since the round began.
        """
        since_s = max(0.0, elapsed_s - RECENT_S)
        recent = self._history.over(range(step - 1, step), since_s, elapsed_s)
        planned_ms = {
            way: each.latency_ms + MARGIN_OF_JITTER * each.jitter_ms
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
