"""Plans a system's step under a condition, and predicts it.

An informed system plans for the condition's delays, or for the recent past of a trace.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from jaxmorph.compare.condition_links import (
    DelayHistory,
    RoundLinks,
    copy_ms_of,
    declared_states,
    delayed,
    on_routes,
    wire_ms_of,
    with_copies,
)
from jaxmorph.compare.systems import System, route_choices
from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.config.link_sections import Emulation
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.link_state import delegated_links
from jaxmorph.control.profiler import Profile
from jaxmorph.emulation.link_conditions import LinkCondition, of_route
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import Move, RankInstructions, Receive
from jaxmorph.program.slots_needed import HostRoom
from jaxmorph.records import Link, Route
from jaxmorph.report.run_matrix import PlannedRun
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.schedule.bound import certified_ms, lower_bound_ms
from jaxmorph.schedule.costs import JITTER_MARGIN, NO_LATENCY, Limits, LinkDelay, Links
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.plan_in_force import PlanInForce, agree_on_plan

HOLDS_QUEUES = "holds queues"
OVERLAPS = "overlaps"

_WORTH = 0.01  # the least gain of delegating more links
RECENT_S = 10.0
"""An informed system plans for the delays of the last so many seconds."""
_LEAST_CHANGE_MS, _LEAST_CHANGE = 1.0, 0.1  # a smaller change of delays needs no new plan


@dataclass(frozen=True)
class ConditionPlanner:
    """Plans a system's step for one condition after another.

    Attributes:
        profile: The costs of ops and healthy links; only rank 0's is read.
        num_tied: The number of tied parameters.
        message_bytes: What an activation or a gradient counts as.
        room: The ranks' host memory for slots and stashes; None: no limit.
        measured_on: The routes of the links in the profile; a missing link was direct.
        usual: The delays of healthy links on each measured route, on rank 0. Where a link has none
            on a route, those in the profile count.
        around_ops_ms: What a step takes besides its ops and messages (`PlannedRun`).
    """

    config: Config
    system: System
    rendezvous: Rendezvous
    profile: Profile
    num_tied: int
    message_bytes: int
    room: HostRoom | None = None
    measured_on: Mapping[Link, Route] = field(default_factory=dict)
    usual: UsualLinks = field(default_factory=dict)
    around_ops_ms: float = 0.0

    def make(self, conditions: Sequence[LinkCondition]) -> tuple[PlanInForce, PlannedRun]:
        """The system's plan under conditions and, on rank 0, its prediction."""
        slow = [Link(*each.between) for each in on_routes(conditions, {})]
        plans: list[PlanInForce] = []
        for choice in route_choices(self.config, self.system, slow):
            believed = self.profile
            if self.system.is_informed:
                routes = choice.routes.of_links(possible_links(choice.parallelism.stages))
                believed = self._profile_under(conditions, routes, JITTER_MARGIN)
            plans.append(agree_on_plan(choice, self.rendezvous, believed, self.num_tied, self.room))
        planned = [self.expect(plan, conditions) for plan in plans]
        steps_ms = [each.predicted_ms for each in planned]
        chosen = agree(self.rendezvous, int, _worthwhile(steps_ms))
        return plans[chosen], planned[chosen]

    def begin(
        self, first: PlanInForce, conditions: Sequence[LinkCondition]
    ) -> tuple[PlanInForce, PlannedRun]:
        """The plan with which a round begins and, on rank 0, its prediction.

        Args:
            first: The plan for healthy links, with which a system that detects begins.
        """
        if self.system.detects:
            return first, self.expect(first, conditions)
        return self.make(conditions)

    def expect(self, in_force: PlanInForce, conditions: Sequence[LinkCondition]) -> PlannedRun:
        """Predict a plan's step under conditions, whatever it was made for."""
        actual = self._profile_under(conditions, in_force.plan.routes, margin_of_jitter=0.0)
        conditions = on_routes(conditions, in_force.plan.routes)
        send_takes = self._on_links(conditions) if self.system.sends_take_compute else NO_LATENCY
        predicted = simulate_blocking(
            in_force.programs,
            actual.costs,
            actual.links,
            copies=actual.copies,
            slots=in_force.scarce,
            send_takes=send_takes,
        )
        slow = [Link(*each.between) for each in conditions]
        parts_ms = message_parts_ms(in_force.programs, self.config.emulation)
        return self._planned(in_force.plan, predicted.makespan_ms, actual, slow, parts_ms)

    def _profile_under(
        self,
        conditions: Sequence[LinkCondition],
        routes: Mapping[Link, Route],
        margin_of_jitter: float,
    ) -> Profile:
        """The profile under conditions, and on routes other than the measured ones."""
        then, now = delegated_links(self.measured_on), delegated_links(routes)
        copy_ms = copy_ms_of(self.config.emulation)
        # Measured delays of delegated links include emulated copies, but not as a separate number.
        measured = {
            **_known(self.usual.get("direct", {}), then - now),
            **_known({} if copy_ms else self.usual.get("delegated", {}), now - then),
        }
        added = self.added(on_routes(conditions, routes), margin_of_jitter)
        links = delayed({**self.profile.links, **measured}, added)
        copied = {link: with_copies(links.get(link, LinkDelay()), copy_ms) for link in now - then}
        return replace(self.profile, links={**links, **copied})

    def added(
        self, conditions: Sequence[LinkCondition], margin_of_jitter: float = 0.0
    ) -> dict[Link, LinkDelay]:
        """What conditions add to their links; see `declared_states`."""
        wire_mbps = self.config.emulation.wire_mbps
        return declared_states(conditions, self.message_bytes, margin_of_jitter, wire_mbps)

    def _on_links(self, conditions: Sequence[LinkCondition]) -> Links:
        """How long messages are on the links, without copies."""
        wire_ms = wire_ms_of(self.config.emulation)
        every = possible_links(self.config.parallelism.stages)
        healthy = dict.fromkeys(every, LinkDelay(0.0, 0.0, wire_ms, wire_ms))
        return delayed(healthy, self.added(conditions))

    def _planned(
        self,
        plan: Plan,
        predicted_ms: float,
        actual: Profile,
        slow: Sequence[Link],
        parts_ms: Mapping[str, float],
    ) -> PlannedRun:
        count, placement = self.config.microbatches, plan.schedule.placement
        bound_ms = lower_bound_ms(actual.costs, count, actual.links, Limits(), placement)
        return PlannedRun(
            predicted_ms=predicted_ms + self.around_ops_ms,
            lower_bound_ms=certified_ms(bound_ms, predicted_ms) + self.around_ops_ms,
            around_ops_ms=self.around_ops_ms,
            schedule=plan.schedule.name,
            warmup_forwards=plan.schedule.warmup_forwards,
            routes={str(link): route for link, route in plan.routes.items()},
            regime=_regime(plan, slow),
            message_parts_ms=parts_ms,
        )


def _known(delays: Links, links: Collection[Link]) -> Links:
    """The delays of some links, where they are known."""
    return {link: delays[link] for link in links if link in delays}


def message_parts_ms(
    programs: Sequence[RankInstructions], emulation: Emulation
) -> Mapping[str, float]:
    """How long a step's emulated messages keep the busiest rank busy: see `PlannedRun`."""
    if emulation.message_bytes is None:
        return {}
    copy_ms = copy_ms_of(emulation)
    wire_ms = wire_ms_of(emulation)
    parts_ms = {"copies out": 0.0, "wire": 0.0, "copies in": 0.0}
    for program in programs:
        moves = [step for step in program.instructions if isinstance(step, Move)]
        sent = [move.route for move in moves if not isinstance(move, Receive)]
        received = [move.route for move in moves if isinstance(move, Receive)]
        own_ms = {
            "copies out": copy_ms * sent.count("delegated"),
            "wire": wire_ms * len(sent),
            "copies in": copy_ms * received.count("delegated"),
        }
        parts_ms = {name: max(parts_ms[name], own_ms[name]) for name in parts_ms}
    return parts_ms


def _worthwhile(steps_ms: Sequence[float]) -> int:
    """The index of the first step, unless a later one is clearly shorter."""
    best = 0
    for index, step_ms in enumerate(steps_ms):
        if step_ms < steps_ms[best] * (1 - _WORTH):
            best = index
    return best


def _regime(plan: Plan, slow: Sequence[Link]) -> str:
    """How delays of the slow links act or, without any, how delays of any link would act."""
    routes = {plan.routes.get(link, "direct") for link in slow or plan.routes}
    words = {"direct": HOLDS_QUEUES, "delegated": OVERLAPS}
    return " and ".join(words[route] for route in sorted(routes, reverse=True))


_Delays = dict[tuple[Route, Link], LinkDelay]


class Replanner:
    """Plans again when the recent delays of a trace have changed enough; it never looks ahead.

    The recent delays are those of the last ``RECENT_S`` seconds, or of the last step for a trace by
    step: their mean as latency, and their standard deviation as jitter.
    """

    def __init__(self, planner: ConditionPlanner, links: RoundLinks) -> None:
        self._planner = planner
        self._steady = links.steady
        self._history = DelayHistory(links.traced)
        self._planned: _Delays = {}

    def __call__(self, step: int, elapsed_s: float) -> PlanInForce | None:
        """A plan for the next step; None: keep the current one."""
        since_s = max(0.0, elapsed_s - RECENT_S)
        recent = self._history.over(range(step - 1, step), since_s, elapsed_s)
        now: _Delays = {
            (route, link): at
            for route in ("direct", "delegated")
            for link, at in self._planner.added(of_route(recent, route), JITTER_MARGIN).items()
        }
        if not self._differ(now):
            return None
        self._planned = now
        return self._planner.make((*self._steady, *recent))[0]

    def _differ(self, now: _Delays) -> bool:
        return any(
            not math.isclose(ms, before_ms, rel_tol=_LEAST_CHANGE, abs_tol=_LEAST_CHANGE_MS)
            for place in now.keys() | self._planned.keys()
            for ms, before_ms in zip(
                *(astuple(delays.get(place, LinkDelay())) for delays in (now, self._planned)),
                strict=True,
            )
        )
