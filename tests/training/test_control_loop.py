"""From measured steps to morphs, with plans made in this process."""

import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from adapting_run import COSTS, FIRST, PLANNED_FOR, FailingPlans, PlansHere

from jaxmorph.control import controller, orchestrator
from jaxmorph.control.controller import link_states
from jaxmorph.control.controller_state import PlanningFailed, StepObserved
from jaxmorph.control.handover import SlowLink
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.step_programs import simulate_step
from jaxmorph.records import Link
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.training import control_loop
from jaxmorph.training.control_loop import Expected, Morph
from jaxmorph.training.planning_client import PlanningError, Simulated

SLOWER = replace(COSTS, forward_ms=(10.0, 20.0, 10.0))
DIRECT_IN_TIME = {str(each): 0.5 for each in probe_transfers(Link(1, 2))}


@pytest.fixture
def slow_run(run):
    """A run that has just delegated its slow link."""
    run.steps(6)
    run.steps(6, slow_ms=40.0)
    return run


def test_a_slow_link_is_delegated_and_comes_back(run):
    run.steps(6)
    assert (run.events, run.plans.asked) == ([], 0)
    run.steps(6, slow_ms=40.0)
    assert run.events == [
        (6, "straggler_detected", "1-2"),
        (7, "plan_changed", None),
        (7, "route_changed", "1-2"),
    ]
    assert run.routes == {Link(0, 1): "direct", Link(1, 2): "delegated"}
    run.steps(10)
    kinds = run.events[3:]
    assert [kind for _, kind, _ in kinds] == [
        "straggler_recovering", "straggler_cleared", "link_probed", "plan_changed", "route_changed",
    ]  # fmt: skip
    assert kinds[-1][0] <= 12 + 10
    assert run.routes == FIRST.routes


def test_a_plan_for_two_links_replaces_that_for_one_before_it_is_announced(run):
    run.steps(6)
    plans = []
    for link in ("0>1", "1>2"):
        left = PathFailure(Link.parse(link.replace(">", "-")), "slow", late_ms={link: (40.0,)})
        run.loop.hear(SlowLink(left.link, left.late_ms, left))
        run.loop._hearing.submit(run.settle).result(60)
        assert isinstance(run.loop._due, Morph)
        plans.append(run.loop._due.plan)
    assert plans[0].routes == {Link(0, 1): "delegated", Link(1, 2): "direct"}
    run._swap()
    assert run.delegated() == {"0-1", "1-2"}
    assert run.plans.restarted == [FIRST.routes]  # of the process that had chosen the first plan
    assert [each.plan for each in run.morphs] == plans[1:]
    run.steps(1)
    kinds = [kind for step, kind, _ in run.events if step == 6]
    assert kinds[:4] == ["link_handed_over", "straggler_detected"] * 2


def test_the_expected_profile_follows_verdict_and_route(run):
    run.steps(6)
    assert run.expected_ms() == pytest.approx(0.5)
    run.steps(1, slow_ms=40.0)  # judged on the direct route, and delegated from now on
    assert run.expected_ms() == pytest.approx(41.5)
    run.steps(1, slow_ms=40.0)
    assert run.expected_ms() == pytest.approx(41.5)
    assert link_states(run.loop.state) == {"1-2": "slow, 41.5 ms (healthy: 0.5)"}
    run.steps(12)
    assert run.expected_ms() == pytest.approx(0.5)
    assert link_states(run.loop.state) == {}


def expect(run, profile=PLANNED_FOR):
    run.loop.expect(None, lambda: profile, lambda each: simulate_step(run.programs, each, {}))


def test_predictions_are_of_the_plan_that_ranks_run(slow_run):
    before = slow_run.loop.predicted
    assert before.step_ms == 1e3 * slow_run.morphs[0].plan.predicted_step_s
    expect(slow_run)
    slow_run.settle()
    made = simulate_step(slow_run.programs, PLANNED_FOR, {})
    assert slow_run.loop.predicted == Simulated(made.makespan_ms, made.bubble_rate) != before


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_first_step_is_simulated_beside_training(begin_run, is_large, monkeypatch):
    monkeypatch.setattr(control_loop, "_OPS_A_STEP", 50 if is_large else 100)  # of 72
    run, profile = begin_run(PlansHere()), replace(PLANNED_FOR, costs=SLOWER)
    expect(run, profile)
    run.settle()
    assert run.plans.simulated == is_large
    made = simulate_step(run.programs, profile, {})
    assert run.loop.predicted == Simulated(made.makespan_ms, made.bubble_rate)


def test_one_prediction_waits_for_planning_and_nothing_for_it(run):
    expect(run)
    run.settle()
    first = run.loop.predicted
    run.steps(6)
    run.plans.may_answer.clear()
    run.steps(1, slow_ms=40.0)
    assert run.plans.is_asked.wait(30)
    for factor in range(2, 7):
        expect(run, replace(PLANNED_FOR, costs=StageCosts.uniform(3, *[10.0 * factor] * 3)))
    assert run.loop.predicted == first
    run.plans.may_answer.set()
    run.settle()
    assert run.plans.simulated == 1
    assert run.loop.predicted.step_ms > 5 * first.step_ms


def test_a_process_that_dies_between_decisions_is_replaced(run):
    for step in range(16):
        run.plans.has_died |= step == 3
        run.steps(1)
        expect(run)
        run.settle()
    assert [event[1] for event in run.events] == ["planning_failed", "plan_kept"]
    assert run.details[0].startswith("the planning process has died; the plan in force stays")
    assert run.plans.restarted == [FIRST.routes]
    expect(run)
    run.settle()
    assert run.loop.predicted.bubble_rate is not None


def test_a_process_that_dies_of_simulations_is_replaced_ever_more_rarely(run, monkeypatch):
    def simulate(*_, **__):
        run.plans.has_died = True
        raise PlanningError("the planning process has died")

    monkeypatch.setattr(run.plans, "simulate", simulate)
    for _ in range(160):
        run.steps(1)
        expect(run)
        run.settle()
    failed = [step for step, _, _ in run.of_kind("planning_failed")]
    assert [later - before for before, later in pairwise(failed)] == [4, 8, 16, 32, 64]
    assert len(run.plans.restarted) == len(failed)


def test_a_refused_simulation_is_no_death(run):
    expect(run)
    run.settle()
    predicted = run.loop.predicted
    run.loop._number = 7
    expect(run)
    simulated = run.loop.simulate_times(
        Expected(7, PLANNED_FOR, lambda _: simulate_step([], PLANNED_FOR, {}))
    )
    run.settle()
    assert isinstance(simulated.exception(30), PlanningError)
    run.steps(6)
    assert (run.events, run.plans.restarted, run.loop.predicted) == ([], [], predicted)


def test_findings_during_a_decision_are_planned_for_next(run):
    run.steps(6)
    run.plans.may_answer.clear()
    run.steps(1, slow_ms=40.0)
    run.steps(5)
    assert run.plans.is_asked.wait(30)
    assert run.plans.asked == 1
    assert run.of_kind("plan_changed") == []
    run.plans.may_answer.set()
    run.settle()
    run.steps(12)
    assert run.plans.asked == 2
    assert run.of_kind("plan_changed") == []  # the delay is over by then


def test_failed_planning_is_retried_with_a_new_process(begin_run):
    run = begin_run(FailingPlans(0, 1))
    run.steps(6)
    run.steps(20, costs=SLOWER)
    assert run.of_kind("planning_failed", "plan_kept", "plan_changed") == [
        (11, "planning_failed", None),  # 4 steps after its request
        (15, "planning_failed", None),  # 8 steps after that
        (23, "plan_changed", None),
    ]
    assert run.details[1:3] == [
        "the planning process has died; the plan in force stays, and planning is tried again in "
        + steps
        for steps in ("4 steps", "8 steps, sooner if a link turns slow")
    ]
    assert run.plans.restarted == [FIRST.routes] * 2
    assert len(run.of_kind("compute_changed")) == 1
    assert "stage 1's F takes 20.0 ms, not 10.0" in run.details[-1]  # found before the failures


def test_a_restarted_planner_knows_the_running_programs(begin_run):
    run = begin_run(FailingPlans(1))
    run.steps(6)
    run.steps(4, slow_ms=40.0)
    (adopted,) = run.morphs
    assert set(adopted.plan.routes.values()) == {"direct", "delegated"}
    never_restarted = run.plans._planner
    run.steps(12, slow_ms=80.0)  # planning for the new delay fails once
    assert len(run.plans.restarted) == 1
    expected = never_restarted.make_candidates(*run.plans.asked_with)
    assert run.plans.options[-1].in_force_ms == expected.in_force_ms
    assert run.morphs == [adopted]


def test_a_success_resets_the_retries(begin_run):
    run = begin_run(FailingPlans(0, 1, 3))
    run.steps(6)
    run.steps(20, slow_ms=40.0)
    run.steps(20)
    assert run.of_kind("planning_failed")[-1][0] + 4 <= run.of_kind("link_probed")[0][0]
    assert run.routes == FIRST.routes
    assert run.plans.restarted[-1][Link(1, 2)] == "delegated"


@pytest.mark.parametrize(("steps_later", "changed_after"), [(2, 27), (6, 30)])
def test_a_newly_slow_link_shortens_the_retry(begin_run, steps_later, changed_after):
    run = begin_run(FailingPlans(0, 1, 2))
    run.steps(6)
    run.steps(18, costs=SLOWER)
    assert [step for step, _, _ in run.of_kind("planning_failed")] == [11, 15, 23]
    run.steps(steps_later - 1, costs=SLOWER)  # the next try would be 16 steps after the failure
    run.steps(4, costs=SLOWER, slow_ms=40.0)
    assert run.of_kind("plan_changed") == [(changed_after, "plan_changed", None)]
    assert run.delegated() == {"1-2"}


@pytest.mark.parametrize(
    ("slow_ms", "waits"), [(0.0, [4, 8, 16, 32, 64, 64]), (40.0, [4, 8, 4, 4, 64, 64])]
)
def test_failing_planning_is_retried_ever_more_rarely(begin_run, slow_ms, waits):
    run = begin_run(FailingPlans(*range(99)))
    run.steps(6)
    run.steps(18, costs=SLOWER)
    run.steps(190, costs=SLOWER, slow_ms=slow_ms)
    reported = [step for step, _, _ in run.of_kind("planning_failed")]
    assert [later - before for before, later in pairwise(reported)][:6] == waits
    assert run.details[-1] == (
        "the planning process has died; the plan in force stays, and planning is tried again in 64 "
        "steps"
    )
    assert run.routes == FIRST.routes


def test_late_probes_keep_a_link_delegated_and_get_rarer(slow_run):
    slow_run.direct_late_ms = 40.0
    slow_run.steps(40)
    probed = [step for step, _, _ in slow_run.of_kind("link_probed")]
    assert slow_run.routes[Link(1, 2)] == "delegated"
    waits = [later - before for before, later in pairwise(probed)]
    assert len(waits) >= 2
    assert waits == sorted(waits)
    assert waits[-1] >= 8
    slow_run.direct_late_ms = 0.0
    slow_run.steps(40)
    assert slow_run.routes == FIRST.routes


def test_slower_ops_cancel_a_pending_probe(slow_run):
    slow_run.sends_probes = False
    slow_run.steps(5)
    asked = slow_run.plans.asked
    slow_run.steps(5, costs=SLOWER)
    assert (slow_run.plans.asked, slow_run.delegated()) == (asked, {"1-2"})  # it still waits
    slow_run.probed = DIRECT_IN_TIME
    slow_run.steps(1, costs=SLOWER)
    assert slow_run.plans.asked == asked + 1
    slow_run.sends_probes = True
    slow_run.steps(3, costs=SLOWER)
    assert "stage 1's F takes 20.0 ms, not 10.0" in slow_run.morphs[1].change.reason
    assert slow_run.delegated() == set()


def test_a_lost_probe_is_sent_again(slow_run):
    slow_run.sends_probes = False
    slow_run.steps(9)
    asked = slow_run.plans.asked
    slow_run.steps(10)
    assert slow_run.plans.asked == asked + 1
    slow_run.sends_probes = True
    slow_run.steps(12)
    assert slow_run.routes == FIRST.routes


def test_a_newly_slow_link_waits_for_no_probe(slow_run):
    slow_run.sends_probes = False
    slow_run.steps(9)
    began = slow_run.step
    slow_run.steps(3, other_ms=40.0)
    assert slow_run.of_kind("route_changed")[-1] == (began + 1, "route_changed", "0-1")
    assert slow_run.delegated() == {"0-1", "1-2"}
    slow_run.sends_probes = True
    slow_run.steps(3, other_ms=40.0)
    assert slow_run.delegated() == {"0-1"}
    slow_run.steps(20)
    assert slow_run.routes == FIRST.routes


class Start:
    """A slow start of the planning process, which then succeeds or fails."""

    def __init__(self, error=None):
        self._may_end, self._error = threading.Event(), error

    def __call__(self):
        assert self._may_end.wait(30)
        if self._error is not None:
            raise self._error

    def end(self, run):
        self._may_end.set()
        run.plans.may_answer.set()
        run.settle()


def test_findings_before_the_planners_start_are_planned_for(begin_run):
    start = Start()
    run = begin_run(PlansHere(may_answer=False), start=start)
    run.steps(6)
    run.steps(2, slow_ms=40.0)
    assert run.plans.asked == 0
    start.end(run)
    run.settle()
    assert run.plans.asked == 1
    run.steps(2, slow_ms=40.0)
    assert run.delegated() == {"1-2"}
    assert run.plans.asked == 1


def test_findings_survive_a_failed_start(begin_run):
    start = Start(PlanningError("the planning process has died"))
    run = begin_run(PlansHere(may_answer=False), start=start)
    run.steps(6)
    run.steps(2, slow_ms=40.0)
    start.end(run)
    failed_after = run.step - 1
    run.steps(3, slow_ms=40.0)
    assert (run.plans.asked, len(run.of_kind("planning_failed"))) == (0, 1)
    run.steps(3, slow_ms=40.0)
    assert (run.plans.asked, run.plans.restarted) == (1, [FIRST.routes])
    assert run.of_kind("plan_changed") == [(failed_after + 5, "plan_changed", None)]


def test_a_recently_probed_link_needs_no_probe(slow_run):
    slow_run.sends_probes = False
    slow_run.steps(9)
    assert slow_run.delegated() == {"1-2"}  # it waits for a probe
    slow_run.probed = DIRECT_IN_TIME  # of an earlier probe
    slow_run.steps(1)
    assert slow_run.routes == FIRST.routes
    assert slow_run.loop.take_due() is None


def test_a_decision_that_raises_is_retried(begin_run, monkeypatch):
    raises = iter([True])

    def decide(situation):
        if next(raises, False):
            raise ZeroDivisionError("no step at all")
        return orchestrator.decide(situation)

    monkeypatch.setattr(controller, "decide", decide)
    run = begin_run(PlansHere())
    run.steps(6)
    run.steps(8, slow_ms=40.0)
    kinds = [kind for _, kind, _ in run.events]
    assert kinds[:3] == ["straggler_detected", "planning_failed", "plan_changed"]
    assert run.details[1].startswith("ZeroDivisionError: no step at all; ")


def test_an_end_while_planning_is_no_failure(begin_run):
    kept = []
    run = begin_run(PlansHere(may_answer=False), keep=lambda *kept_: kept.append(kept_[1]))
    run.steps(6)
    run.steps(1, slow_ms=40.0)
    assert run.plans.is_asked.wait(30)
    run.loop.close(run.plans.may_answer.set)
    assert not any(isinstance(each, PlanningFailed) for each in kept)
    assert isinstance(kept[-1], StepObserved)


def test_an_error_of_keeping_ends_the_run(begin_run):
    def fail(*_):
        raise OSError("no space")

    run = begin_run(PlansHere(), keep=fail)
    with pytest.raises(OSError, match="no space"):
        run.steps(1)
