"""Systems' plans under conditions, on rank 0 of four stages."""

from dataclasses import replace

import pytest

from jaxmorph.compare.condition_links import RoundLinks, declared_states, with_copies
from jaxmorph.compare.condition_plans import (
    HOLDS_QUEUES,
    OVERLAPS,
    RECENT_S,
    ConditionPlanner,
    Replanner,
)
from jaxmorph.compare.systems import SYSTEMS, system_config
from jaxmorph.config import Config
from jaxmorph.config.link_sections import Emulation, Routes
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.profiler import Profile
from jaxmorph.emulation.link_conditions import AffectedRoute, LinkCondition
from jaxmorph.placement import Placement
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.program.slots_needed import HostRoom
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import LinkDelay, StageCosts
from jaxmorph.training.plan_in_force import plan_step

SLOW = (LinkCondition((2, 3), latency_ms=30.0),)
CONFIG = Config.model_validate(
    {
        "parallelism": {"stages": 4},
        "batch": {"microbatches": 12},
        "compare": {"conditions": [{"name": "healthy"}]},
    }
)
STEADY = LinkCondition((2, 3), 5.0)
UNEVEN = StageCosts((8.0, *[9.0] * 3), (10.0, 10.0, 10.0, 9.0), (5.0, *[6.0] * 3))


def planner(
    name: str,
    costs: StageCosts | None = None,
    room: HostRoom | None = None,
    emulation: Emulation | None = None,
) -> ConditionPlanner:
    system = SYSTEMS[name]
    profile = Profile(costs or StageCosts.uniform(4, 10.0, 10.0, 10.0), {})
    emulation = emulation or Emulation()
    config = system_config(CONFIG.model_copy(update={"emulation": emulation}), system)
    size = emulation.message_bytes or 0
    return ConditionPlanner(config, system, SoleRank(), profile, 0, size, room)


@pytest.mark.parametrize(
    ("system", "healthy_ms", "slow_ms"),
    [
        ("gpipe", 450.0, 1170.0),
        ("1f1b", 450.0, 840.0),
        ("zb", 390.0, 1110.0),
        ("zb-delegated", 390.0, 540.0),
        ("adaptive-informed", 390.0, 420.0),
    ],
)
def test_direct_delays_block_and_delegated_ones_overlap(system, healthy_ms, slow_ms):
    plans = planner(system)
    assert plans.make(())[1].predicted_ms == pytest.approx(healthy_ms)
    assert plans.make(SLOW)[1].predicted_ms == pytest.approx(slow_ms)


def test_a_system_keeps_within_limited_host_memory_and_predicts_its_waits():
    ends = [(lower, lower + 1) for lower in range(3)]
    channels = [Channel(Payload.ACTIVATION, *each) for each in ends]
    channels += [Channel(Payload.GRADIENT, *each[::-1]) for each in ends]
    room = HostRoom(dict.fromkeys(channels, 1), (9,) * 4)  # two slots at each of four ends, and one
    in_force, planned = planner("zb-delegated", room=room).make(SLOW)
    assert max(room.taken_bytes(in_force.slots, 4)) <= 9
    assert in_force.scarce
    assert planned.predicted_ms > planner("zb-delegated").make(SLOW)[1].predicted_ms


@pytest.mark.parametrize("system", ["1f1b", "zb", "zb-delegated"])
def test_without_adaptation_programs_stay(system):
    plans = planner(system)
    assert plans.make(())[0].programs == plans.make(SLOW)[0].programs


def test_the_adaptive_step_meets_its_bound():
    in_force, planned = planner("adaptive-informed").make(SLOW)
    assert planned.predicted_ms == pytest.approx(planned.lower_bound_ms)
    assert planned.routes == {"0-1": "direct", "1-2": "direct", "2-3": "delegated"}
    assert planned.regime == OVERLAPS
    links = {Link(2, 3): LinkDelay(30.0, 30.0)}
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    assert simulate_blocking(in_force.programs, costs, links).makespan_ms == pytest.approx(420.0)


def test_direct_adaptation_is_never_worse():
    in_force, planned = planner("adaptive-direct").make(SLOW)
    assert set(planned.routes.values()) == {"direct"}
    assert planned.regime == HOLDS_QUEUES
    assert planned.predicted_ms <= 1110.0
    assert in_force.programs != planner("adaptive-direct").make(())[0].programs


@pytest.mark.parametrize(
    ("route", "steps_ms", "chosen"),
    [("direct", (1110.0, 390.0), "delegated"), ("delegated", (390.0, 540.0), "direct")],
)
def test_a_condition_of_one_route_leaves_the_other_alone(route: AffectedRoute, steps_ms, chosen):
    conditions = (LinkCondition((2, 3), latency_ms=30.0, route=route),)
    made = [planner(name).make(conditions)[1] for name in ("zb", "zb-delegated")]
    assert [each.predicted_ms for each in made] == pytest.approx(steps_ms)
    assert [each.lower_bound_ms == 390.0 for each in made] == [each == 390.0 for each in steps_ms]
    informed = planner("adaptive-informed").make(conditions)[1]
    assert informed.predicted_ms == pytest.approx(390.0)
    assert informed.routes["2-3"] == chosen


def test_a_plan_expects_the_step_it_was_made_for():
    plans = planner("adaptive-informed")
    in_force, planned = plans.make(SLOW)
    assert plans.expect(in_force, SLOW) == planned
    assert plans.expect(in_force, ()).predicted_ms < planned.predicted_ms
    assert plans.expect(plans.make(())[0], SLOW).predicted_ms == pytest.approx(1110.0)


def test_healthy_links_are_delegated_only_for_a_gain():
    _, planned = planner("adaptive-informed").make(())
    assert set(planned.routes.values()) == {"direct"}
    assert planned.regime == HOLDS_QUEUES
    _, planned = planner("adaptive-informed", UNEVEN).make(())
    assert set(planned.routes.values()) == {"delegated"}


def test_copies_weigh_against_delegating_healthy_links():
    for copy_ms, route in ((0.2, "delegated"), (5.0, "direct")):
        emulation = Emulation(message_bytes=10**7, host_copy_gbps=10.0 / copy_ms)
        _, planned = planner("adaptive-informed", UNEVEN, emulation=emulation).make(())
        assert set(planned.routes.values()) == {route}


def test_messages_wait_for_the_slowest_part_of_a_delegated_link():
    assert with_copies(LinkDelay(30.0, 0.0, 20.0, 2.0), 5.0) == LinkDelay(40.0, 7.0, 20.0, 5.0)


def test_parts_of_messages_are_those_of_the_busiest_rank():
    emulation = Emulation(message_bytes=10**6, host_copy_gbps=1.0, wire_mbps=4000.0)
    parts_ms = planner("zb-delegated", emulation=emulation).make(())[1].message_parts_ms
    assert parts_ms == pytest.approx({"copies out": 24.0, "wire": 48.0, "copies in": 24.0})
    parts_ms = planner("zb", emulation=emulation).make(())[1].message_parts_ms
    assert parts_ms == pytest.approx({"copies out": 0.0, "wire": 48.0, "copies in": 0.0})
    assert planner("zb").make(())[1].message_parts_ms == {}


def test_messages_that_take_compute_make_the_step_longer():
    emulation = Emulation(message_bytes=10**6, host_copy_gbps=1e3, wire_mbps=8000.0)  # 1 ms
    plans = planner("zb-opportunistic", emulation=emulation)
    healthy_ms, slow_ms = (plans.make(each)[1].predicted_ms for each in ((), SLOW))
    others = planner("zb-delegated", emulation=emulation)
    assert healthy_ms > others.make(())[1].predicted_ms
    # The last stage sends twelve gradients, each of which takes 31 ms of its 360 ms of compute.
    assert slow_ms >= 12 * 30 + 11 * 31 > others.make(SLOW)[1].predicted_ms


def test_a_slow_link_is_delegated_with_its_copies_in_the_prediction():
    emulation = Emulation(message_bytes=10**7, host_copy_gbps=5.0)  # 2 ms a copy
    in_force, planned = planner("adaptive-informed", emulation=emulation).make(SLOW)
    assert planned.routes == {"0-1": "direct", "1-2": "direct", "2-3": "delegated"}
    links = {Link(2, 3): LinkDelay(32.0, 32.0, 2.0, 2.0)}
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    step_ms = simulate_blocking(in_force.programs, costs, links).makespan_ms
    assert planned.predicted_ms == pytest.approx(step_ms)


def test_copies_are_not_counted_twice_where_delegated_links_were_measured():
    emulation = Emulation(message_bytes=10**7, host_copy_gbps=5.0)
    plans = planner("zb-delegated", emulation=emulation)
    measured_on = dict.fromkeys(Placement(4).links, "delegated")
    counted = replace(plans, measured_on=measured_on)
    assert counted.make(())[1].predicted_ms == planner("zb-delegated").make(())[1].predicted_ms
    assert plans.make(())[1].predicted_ms > counted.make(())[1].predicted_ms


def test_what_was_measured_of_delegated_links_counts_where_they_are_delegated():
    plans = planner("adaptive-informed")
    usual: UsualLinks = {"delegated": dict.fromkeys(Placement(4).links, LinkDelay(2.0, 3.0))}
    measured = replace(plans, usual=usual)
    assert measured.make(())[1].predicted_ms == plans.make(())[1].predicted_ms  # all are direct
    in_force, planned = measured.make(SLOW)
    costs, links = StageCosts.uniform(4, 10.0, 10.0, 10.0), {Link(2, 3): LinkDelay(32.0, 33.0)}
    step_ms = simulate_blocking(in_force.programs, costs, links).makespan_ms
    assert planned.predicted_ms == pytest.approx(step_ms)


def test_what_was_measured_of_direct_links_counts_where_they_no_longer_are_delegated():
    plans, links = planner("zb"), Placement(4).links
    began_delegated = replace(
        plans,
        profile=replace(plans.profile, links=dict.fromkeys(links, LinkDelay(4.0, 4.0))),
        measured_on=dict.fromkeys(links, "delegated"),
    )
    known = replace(began_delegated, usual={"direct": dict.fromkeys(links, LinkDelay())})
    assert known.make(())[1].predicted_ms == plans.make(())[1].predicted_ms
    assert began_delegated.make(())[1].predicted_ms > known.make(())[1].predicted_ms


def test_a_predicted_step_has_what_lies_around_its_ops():
    ops_alone = planner("zb").make(())[1]
    whole = replace(planner("zb"), around_ops_ms=8.0).make(())[1]
    assert whole.predicted_ms == ops_alone.predicted_ms + 8.0
    assert whole.lower_bound_ms == ops_alone.lower_bound_ms + 8.0
    assert whole.around_ops_ms == 8.0


def test_jitter_adds_a_margin_to_plans_alone():
    steady = planner("adaptive-informed").make(SLOW)[1]
    unsteady = (LinkCondition((2, 3), latency_ms=30.0, jitter_ms=20.0),)
    wary = planner("adaptive-informed").make(unsteady)[1]
    assert wary.lower_bound_ms == steady.lower_bound_ms  # of the link as it is
    assert wary.predicted_ms >= steady.predicted_ms


def test_a_mixed_plan_has_the_regime_of_its_slow_links():
    both = (*SLOW, LinkCondition((0, 1), latency_ms=30.0))
    assert planner("adaptive-informed").make(both)[1].regime == OVERLAPS
    assert planner("zb").make(both)[1].regime == HOLDS_QUEUES


def test_a_detecting_system_begins_with_its_first_plan():
    first = planner("zb-delegated").make(())[0]  # any plan that differs from the configured one
    begins = planner("adaptive")
    for conditions in ((), SLOW):
        in_force, planned = begins.begin(first, conditions)
        assert in_force is first
        assert set(planned.routes.values()) == {"delegated"}
    assert planned.predicted_ms == pytest.approx(540.0)
    assert planner("adaptive-informed").begin(first, SLOW)[1].predicted_ms == pytest.approx(420.0)


def test_a_detecting_system_may_begin_delegated():
    informed = planner("adaptive-informed", UNEVEN).make(())[0].plan
    system = SYSTEMS["adaptive"]
    routes = Routes.model_validate({"default": "delegated"})
    config = system_config(CONFIG, system).model_copy(update={"routes": routes})
    own = plan_step(config, Profile(UNEVEN, {}))
    assert (own.schedule, own.routes) == (informed.schedule, informed.routes)


class RecordingPlanner:
    def __init__(self):
        self.conditions = []

    def added(self, conditions, margin_of_jitter):
        return declared_states(conditions, 10**6, margin_of_jitter)

    def make(self, conditions):
        self.conditions.append(conditions)
        return f"plan {len(self.conditions)}", None


def replanner(*traced: LinkCondition) -> tuple[Replanner, list]:
    planner = RecordingPlanner()
    links = RoundLinks((STEADY,), traced)
    return Replanner(planner, links), planner.conditions  # pyright: ignore[reportArgumentType]


def test_a_traced_event_is_planned_for_one_step_later():
    replan, planned = replanner(LinkCondition((0, 1), 30.0, from_step=10, to_step=13))
    plans = [replan(step, 0.5 * step) for step in range(8, 16)]
    assert plans == [None, None, None, "plan 1", None, None, "plan 2", None]
    slow = (LinkCondition((0, 1), 30.0, source=0), LinkCondition((0, 1), 30.0, source=1))
    assert planned == [(STEADY, *slow), (STEADY,)]


def test_another_bandwidth_is_planned_for():
    changes: tuple[tuple[int, float, AffectedRoute], ...]
    changes = ((10, 800.0, "both"), (12, 810.0, "both"), (14, 200.0, "both"), (16, 200.0, "direct"))
    replan, _ = replanner(
        *(
            LinkCondition(
                (0, 1), bandwidth_mbps=mbps, from_step=step, to_step=step + 2, route=route
            )
            for step, mbps, route in changes
        )
    )
    plans = [replan(step, 0.5 * step) for step in range(10, 20)]
    assert plans == [None, "plan 1", *[None] * 3, "plan 2", None, "plan 3", None, "plan 4"]


def test_planning_sees_recent_delays_only():
    first = LinkCondition((0, 1), 100.0, from_s=0.0, to_s=1.0, source=0)
    second = LinkCondition((0, 1), 20.0, from_s=1.0, to_s=30.0, source=0)
    third = LinkCondition((0, 1), 900.0, from_s=30.0, source=0)
    replan, planned = replanner(first, second, third)
    assert replan(0, 0.0) is None
    assert replan(1, 1.0) == "plan 1"
    assert replan(2, 1.0 + RECENT_S) == "plan 2"
    assert replan(9, 30.0) is None
    assert [each[1:] for each in planned] == [
        (LinkCondition((0, 1), 100.0, source=0),),
        (LinkCondition((0, 1), 20.0, source=0),),
    ]


def test_small_changes_of_delays_keep_the_plan():
    delays_ms = (40.0, 43.9, 50.0, 50.5)
    replan, _ = replanner(
        *(
            LinkCondition((0, 1), delay_ms, from_step=step, to_step=step + 1)
            for step, delay_ms in enumerate(delays_ms)
        )
    )
    assert [replan(step, 0.0) for step in range(1, 5)] == ["plan 1", None, "plan 2", None]
