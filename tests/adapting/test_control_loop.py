"""From measured steps to morphs, with plans that are made without a process."""

import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from jaxmorph.adapting.control_loop import ControlLoop
from jaxmorph.adapting.plan_candidates import CandidatePlanner
from jaxmorph.adapting.planning_client import Chosen, Options, PlanningError
from jaxmorph.config import Config
from jaxmorph.control.compute_watch import ComputeWatch
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_samples import link_samples
from jaxmorph.control.orchestrator import Option
from jaxmorph.control.profiler import Profile
from jaxmorph.planning.plan_in_force import plan_step
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.program_text import parse_program, program_text
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.schedule.costs import Link, StageCosts, chain_links

COSTS = StageCosts.uniform(3, 10.0, 10.0, 10.0)
USUAL: UsualLinks = {"direct": chain_links((0.5, 0.5)), "delegated": chain_links((1.5, 1.5))}
CONFIG = Config.model_validate(
    {
        "parallelism": {"stages": 3},
        "batch": {"microbatches": 8},
        "schedule": {"name": "zb-h2"},
        "adaptation": {"enabled": True},
    }
)
PLANNED_FOR = Profile(COSTS, USUAL["direct"])
FIRST = plan_step(CONFIG, PLANNED_FOR)


class PlansHere:
    """Plans as the planning process does, in this one, when it is let."""

    def __init__(self):
        self._planner = CandidatePlanner(CONFIG, 0, FIRST, PLANNED_FOR, USUAL)
        self.may_answer, self.is_asked = threading.Event(), threading.Event()
        self.may_answer.set()
        self.asked = 0

    def weigh(self, profile, verdicts):
        self.asked += 1
        self.is_asked.set()
        assert self.may_answer.wait(30)
        weighed = self._planner.weigh(profile, verdicts)
        self._candidates = weighed.candidates
        options = tuple(Option(each.plan, each.step_ms) for each in weighed.candidates)
        return Options(weighed.in_force_ms, weighed.undisturbed_ms, options)

    def adopt(self, chosen):
        candidate = self._candidates[chosen]
        slots = self._planner.adopt(candidate)
        return Chosen(tuple(map(program_text, candidate.programs)), slots)


class NoPlans(PlansHere):
    def weigh(self, profile, verdicts):
        self.asked += 1
        raise PlanningError("the planning process has died")


class Run:
    """A run whose steps last what the simulator says, under a loop that may change its plan."""

    def __init__(self, plans, settings=CONFIG.adaptation):
        self.plans = plans
        self.loop = ControlLoop(
            settings, FIRST, PLANNED_FOR, USUAL, Detector(), ComputeWatch(COSTS), plans
        )
        self.programs = lower_step(FIRST.schedule, PLANNED_FOR, FIRST.routes)
        self.routes, self.step, self.events = FIRST.routes, 0, []
        self.probed, self.direct_late_ms = {}, 0.0

    def steps(self, count, slow_ms=0.0, costs=COSTS):
        for _ in range(count):
            usual = USUAL[self.routes[Link(1, 2)]][Link(1, 2)]
            late_ms = usual.forward_latency_ms + slow_ms
            links = {**USUAL["direct"], Link(1, 2): replace(usual, forward_latency_ms=late_ms)}
            timeline = simulate_blocking(self.programs, costs, links)
            samples = link_samples(timeline)
            self._note(self.loop.observe(self.step, timeline, samples, self.probed), self.step)
            self.settle()
            self._swap()
            self.step += 1

    def settle(self):
        """Wait until what was asked for is decided."""
        if self.plans.may_answer.is_set():
            self.loop._thread.submit(lambda: None).result(30)

    def expected_ms(self):
        return self.loop.profile(PLANNED_FOR).links[Link(1, 2)].forward_latency_ms

    def _swap(self):
        took_ms = 0.5 + self.direct_late_ms
        probes = [each for link in self.loop.due_probes() for each in probe_transfers(link)]
        self.probed = {str(transfer): took_ms for transfer in probes}
        morph = self.loop.ready()
        if morph is not None:
            self.programs = tuple(map(parse_program, morph.programs))
            self.routes = morph.plan.routes
            self._note(self.loop.adopted(morph), self.step + 1)

    def _note(self, happened, step):
        self.events += [(step, each["kind"], each.get("link")) for each in happened]

    def of_kind(self, *kinds):
        return [event for event in self.events if event[1] in kinds]


@pytest.fixture
def run():
    made = Run(PlansHere())
    yield made
    made.plans.may_answer.set()
    made.loop.close()


def test_a_slow_link_is_delegated_and_comes_back_with_the_first_plan(run):
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


def test_what_is_expected_of_a_step_follows_verdict_and_route(run):
    run.steps(6)
    assert run.expected_ms() == pytest.approx(0.5)
    run.steps(1, slow_ms=40.0)  # judged on the direct route, and delegated from now on
    assert run.expected_ms() == pytest.approx(41.5)
    run.steps(1, slow_ms=40.0)
    assert run.expected_ms() == pytest.approx(41.5)
    assert run.loop.link_states() == {"1-2": "slow, 41.5 ms (healthy: 0.5)"}
    run.steps(12)
    assert run.expected_ms() == pytest.approx(0.5)
    assert run.loop.link_states() == {}


def test_while_one_thing_is_weighed_nothing_else_is_and_then_the_latest_counts(run):
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


def test_a_delay_that_is_absorbed_is_told_with_its_reason_and_changes_nothing():
    run = Run(PlansHere(), CONFIG.adaptation.model_copy(update={"worth": 0.9}))
    run.steps(6)
    run.steps(3, slow_ms=10.0)
    assert run.events == [(6, "straggler_detected", "1-2"), (7, "plan_kept", None)]
    run.loop.close()


def test_without_plans_training_goes_on_and_says_so_once():
    run = Run(NoPlans())
    run.steps(6)
    run.steps(4, slow_ms=40.0)
    run.steps(6)
    assert run.of_kind("planning_failed") == [(7, "planning_failed", None)]
    assert (run.plans.asked, run.routes) == (1, FIRST.routes)
    run.loop.close()


def test_a_link_stays_delegated_while_probes_of_the_direct_one_are_late_and_they_get_rarer(run):
    run.steps(6)
    run.steps(6, slow_ms=40.0)
    run.direct_late_ms = 40.0
    run.steps(40)
    probed = [step for step, _, _ in run.of_kind("link_probed")]
    assert run.routes[Link(1, 2)] == "delegated"
    waits = [later - before for before, later in pairwise(probed)]
    assert len(waits) >= 2
    assert waits == sorted(waits)
    assert waits[-1] >= 8
    run.direct_late_ms = 0.0
    run.steps(40)
    assert run.routes == FIRST.routes


def test_slower_ops_are_told_and_weighed(run):
    run.steps(6)
    run.steps(6, costs=replace(COSTS, forward_ms=(10.0, 20.0, 10.0)))
    assert len(run.of_kind("compute_changed")) == 1
    assert run.plans.asked == 1


class Refreshing(PlansHere):
    """Plans of which the one in force stays, and is told anew whenever it is weighed."""

    told = tuple(map(program_text, lower_step(FIRST.schedule, PLANNED_FOR, FIRST.routes)))

    def weigh(self, profile, verdicts):
        options = super().weigh(profile, verdicts)
        return replace(options, candidates=options.candidates[:1], refreshed=self.told)


def test_a_plan_that_stays_is_told_anew_without_a_word_and_the_loop_goes_on():
    run = Run(Refreshing())
    swaps = []
    run._swap, swap = lambda: (swaps.append(run.loop._morph), swap()), run._swap
    run.steps(6)
    run.steps(6, slow_ms=40.0)
    (told,) = [morph for morph in swaps if morph is not None]
    assert told.keeps_plan
    assert told.programs == Refreshing.told
    assert [kind for _, kind, _ in run.events] == ["straggler_detected", "plan_kept"]
    asked = run.plans.asked
    run.steps(10)
    assert run.plans.asked > asked  # it isn't still busy with what it has told
    run.loop.close()
