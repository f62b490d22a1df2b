"""The controller as a function of its state and its observations, without threads or processes."""

import os
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.config.sections import Adaptation
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.controller import advance
from jaxmorph.control.controller_state import (
    AwaitingCandidates,
    CandidateChosen,
    CandidatesReceived,
    ChangePlan,
    Changing,
    ChooseCandidate,
    Idle,
    PlanChanged,
    PlanDropped,
    PlannerStarted,
    PlanningFailed,
    PlanWithdrawn,
    Preparing,
    ProbeLinks,
    Probing,
    RequestCandidates,
    RestorePaths,
    StepObserved,
    WithdrawPlan,
    first_state,
)
from jaxmorph.control.detector import Detector
from jaxmorph.control.handover import SlowLink
from jaxmorph.control.link_state import PathFailure
from jaxmorph.control.measurements import MessageTables, packed
from jaxmorph.control.orchestrator import Option, Options
from jaxmorph.control.path_reports import JoinedPathReport
from jaxmorph.control.profiler import Profile
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.planner import plan

COSTS = StageCosts.uniform(3, 10.0, 10.0, 10.0)
USUAL: UsualLinks = {"direct": chain_links((0.5, 0.5)), "delegated": chain_links((1.5, 1.5))}
LINKS = (Link(0, 1), Link(1, 2))
FIRST = plan(COSTS, dict(USUAL["direct"]), Limits(), 8, "zb-h2")
FIRST = replace(FIRST, routes=dict.fromkeys(LINKS, "direct"))
DIRECTIONS = ((0, 1), (1, 2), (1, 0), (2, 1))
PROBE_WAIT = 8
_WARM_UP = 6


def begun(**settings):
    adaptation = Adaptation(enabled=True, **settings)
    state = first_state(adaptation, FIRST, Profile(COSTS, USUAL["direct"]), USUAL, Detector())
    return advance(state, PlannerStarted()).state


def step_of(state, step, slow_ms=None, probes_ms=None, paths=None, noise=lambda: 0.0, count=8):
    """A step under the plan in force, with messages in each direction and some slow links."""
    slow_ms, messages = slow_ms or {}, []
    failed = state.paths.unrestored
    for source, destination in DIRECTIONS:
        link = Link.of(source, destination)
        route = "delegated" if link in failed else state.plan.routes.get(link, "direct")
        took_ms = USUAL[route][link].forward_latency_ms + slow_ms.get(link, 0.0)
        numbers = np.arange(count)
        began_ms = 30.0 * numbers - [noise() for _ in numbers]
        rows = [numbers, 1e3 * began_ms, 1e3 * (30.0 * numbers + took_ms)]
        direction = (source, destination, route == "direct")
        messages.append(MessageTables((direction,), packed(np.rint(rows))))
    given = {} if paths is None else {"paths": paths}
    return StepObserved(step, {}, probes_ms or {}, messages=tuple(messages), **given)


def offered(state, degraded):
    """The options of a planning process: the first plan, and one that delegates degraded links."""
    now = state.plan
    delegated = {**FIRST.routes, **dict.fromkeys(degraded, "delegated")}

    def option(routes):
        slow = any(routes[link] == "direct" for link in degraded)
        return Option(replace(FIRST, routes=routes), 500.0 if slow else 300.0)

    in_force = option({**FIRST.routes, **now.routes}).step_ms
    return Options(in_force, 300.0, (option(dict(FIRST.routes)), option(delegated)))


def probe_of(link):
    transfer = Transfer(Payload.ACTIVATION, link.lower, link.upper, 0, 0)
    return str(transfer)


class Harness:
    """Carries commands out at random, and checks invariants at each observation."""

    def __init__(self, state, *, checks_purity=True):
        self.state, self.step, self.changes = state, -1, []
        self.checks_purity = checks_purity
        self.asked = None  # the pending request to the planning process
        self.due = None
        self.probing_since = None

    def advance(self, observation):
        before, result = self.state, advance(self.state, observation)
        assert not self.checks_purity or advance(before, observation) == result  # the same again
        self.state = result.state
        for command in result.commands:
            self._take(command)
        self._check()
        return result.events

    def _take(self, command):
        match command:
            case RequestCandidates() | ChooseCandidate():
                assert self.asked is None, "one question at a time"
                self.asked = command
            case ChangePlan(change, restore):
                assert not isinstance(self.due, ChangePlan), "one change of plan at a time"
                self.due = command
                self.changes.append(self.step)
                for link in self.state.paths.unrestored:
                    is_direct = change.plan.routes.get(link, "direct") == "direct"
                    assert not is_direct or link in restore, "a failed path is never direct"
            case ProbeLinks() | RestorePaths():
                self.due = command
            case _:
                self.due = None if isinstance(self.due, ProbeLinks) else self.due

    def _check(self):
        phase = self.state.phase
        expected = {AwaitingCandidates: RequestCandidates, Preparing: ChooseCandidate}.get(
            type(phase)
        )
        assert (type(self.asked) if self.asked else None) == expected
        assert isinstance(phase, Changing) == isinstance(self.due, ChangePlan)
        if isinstance(phase, Probing):
            assert self.step - phase.since_step < PROBE_WAIT

    def answer(self, random_):
        """The planning process answers, or fails."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        if random_.random() < 0.1:
            self.advance(PlanningFailed("the planning process has died"))
        elif isinstance(asked, RequestCandidates):
            degraded = {each.link for each in asked.verdicts if each.health != "healthy"}
            self.advance(CandidatesReceived(offered(self.state, degraded | set(asked.staying))))
        else:
            self.advance(CandidateChosen())

    def exchange(self, random_):
        """Carry out the due command after an exchange; a probe may be lost."""
        due, probes_ms = self.due, {}
        if isinstance(due, ChangePlan):
            self.due = None
            is_dropped = bool(due.late) and random_.random() < 0.5
            self.advance(PlanDropped() if is_dropped else PlanChanged())
            return {}, due.restore
        if isinstance(due, ProbeLinks):
            self.due = None
            if random_.random() < 0.8:
                took_ms = random_.choice([0.5, 40.0])
                probes_ms = {probe_of(link): took_ms for link in due.links}
            return probes_ms, due.restore
        if isinstance(due, RestorePaths):
            self.due = None
            return {}, due.restore
        return {}, frozenset()


@cache
def warmed_up(**settings):
    """The state of a run whose links have been healthy for some steps."""
    state = begun(dwell_steps=4, failback_steps=2, **settings)
    for step in range(_WARM_UP):
        state = advance(state, step_of(state, step)).state
    return state


def left_path(link, *, is_slow):
    late_ms = {"{}>{}".format(*link): (40.0,) * 5} if is_slow else {}
    return PathFailure(link, "no answer", reported_by=link, late_ms=late_ms)


def run_at_random(seed, num_steps, **options):
    """A run in which links turn slow, fail and recover, and planning is slow or fails."""
    random_, count = random.Random(seed), options.pop("count", 8)
    harness = Harness(warmed_up(), **options)
    slow_ms, down = {}, set()
    for step in range(_WARM_UP, _WARM_UP + num_steps):
        harness.step = step
        link = random_.choice(LINKS)
        match random_.randrange(8):
            case 0:
                slow_ms[link] = random_.choice([0.0, 20.0, 60.0])
            case 1:
                down.add(link)
            case 2:
                down.discard(link)
        probes_ms, restore = harness.exchange(random_)
        failed = harness.state.paths.unrestored
        routes = harness.state.plan.routes
        slow = {each for each in slow_ms if slow_ms[each] > 0.0 and random_.random() < 0.5}
        failing = [
            each
            for each in sorted(down | slow)
            if each not in failed and routes.get(each, "direct") == "direct"
        ]
        paths = JoinedPathReport(
            failures=tuple(
                left_path(each, is_slow=slow_ms.get(each, 0.0) > 0.0) for each in failing
            ),
            up={each: each not in down for each in failed},
            restored=tuple(each for each in sorted(restore) if each not in down),
        )
        noise = (lambda: random_.expovariate(4.0)) if seed % 2 else (lambda: 0.0)
        observed = step_of(harness.state, step, slow_ms, probes_ms, paths, noise, count)
        harness.advance(observed)
        for _ in range(random_.randrange(4)):
            harness.answer(random_)
    return harness


@given(seed=st.integers(0, 2**32))
def test_invariants_hold_under_any_observations(seed):
    harness = run_at_random(seed, 40, count=5)
    assert len(harness.changes) <= 1 + 40 // 2  # one change takes at least two steps


def until_change(state, slow_steps):
    """A run up to its first `ChangePlan`: the state, the command and the observed step."""
    harness, planning_works = Harness(state), SimpleNamespace(random=lambda: 1.0)
    for harness.step in range(20):
        slow_ms = {LINKS[1]: 250.0} if harness.step in slow_steps else {}
        harness.advance(step_of(harness.state, harness.step, slow_ms))
        while harness.asked is not None:
            harness.answer(planning_works)
        if isinstance(harness.due, ChangePlan):
            return harness.state, harness.due, harness.step
    raise AssertionError("no change of plan")


def test_a_change_for_a_link_that_is_in_time_again_may_be_dropped():
    state, change, step = until_change(begun(), slow_steps=[6])
    assert step == 6
    assert {*change.late} == {(1, 2), (2, 1)}
    assert all(0.5 < calm_ms < 6.0 for calm_ms in change.late.values())
    assert isinstance(state.phase, Changing)
    dwell = state.phase.dwell_before
    dropped = advance(state, PlanDropped())
    assert [event.kind for event in dropped.events] == ["plan_kept"]
    assert "in time again" in dropped.events[0].detail
    state = dropped.state
    assert (state.plan, state.phase, state.dwell) == (FIRST, Idle(), dwell)
    again = advance(state, step_of(state, step + 1))
    (request,) = again.commands  # with the verdicts of that step
    assert isinstance(request, RequestCandidates)
    assert request.restart_planner
    assert {each.health for each in request.verdicts} == {"healthy", "recovering"}


def test_a_link_that_stays_slow_is_planned_for_again_after_a_drop():
    state, _, step = until_change(begun(), slow_steps=[6, 7, 8])
    state = advance(state, PlanDropped()).state  # although it is late in step 7 as well
    result = advance(state, step_of(state, step + 1, {LINKS[1]: 250.0}))
    answer = CandidatesReceived(offered(result.state, {LINKS[1]}))
    state = advance(result.state, answer).state
    (change,) = advance(state, CandidateChosen()).commands
    assert isinstance(change, ChangePlan)
    assert {*change.late} == {
        (1, 2),
        (2, 1),
    }  # so this one may be dropped too


def test_a_change_that_delegates_a_healthy_link_for_a_late_one_may_be_dropped():
    state = warmed_up(delegates="any")
    late, healthy = LINKS[1], LINKS[0]
    state = replace(state, plan=replace(FIRST, routes={**FIRST.routes, late: "delegated"}))
    for step in range(_WARM_UP, 2 * _WARM_UP):
        state = advance(state, step_of(state, step)).state
    state = advance(state, step_of(state, 2 * _WARM_UP, {late: 250.0})).state
    both = replace(FIRST, routes=dict.fromkeys(LINKS, "delegated"))
    options = Options(500.0, 300.0, (Option(FIRST, 600.0), Option(both, 300.0)))
    state = advance(state, CandidatesReceived(options)).state
    (change,) = advance(state, CandidateChosen()).commands
    assert isinstance(change, ChangePlan)
    assert change.change.routes == {healthy: "delegated"}
    assert {*change.late} == {(1, 2), (2, 1)}


def test_a_change_that_a_failed_path_calls_for_is_not_dropped():
    failure = PathFailure(LINKS[1], "no answer", reported_by=LINKS[1])
    paths = JoinedPathReport(failures=(failure,))
    state = warmed_up()
    result = advance(state, step_of(state, _WARM_UP, paths=paths))
    answer = CandidatesReceived(offered(result.state, {LINKS[1]}))
    state = advance(result.state, answer).state
    (change,) = advance(state, CandidateChosen()).commands
    assert isinstance(change, ChangePlan)
    assert change.late == {}


def handed_over(state, link):
    failure = left_path(link, is_slow=True)
    paths = JoinedPathReport(failures=(failure,))
    return advance(state, step_of(state, _WARM_UP, paths=paths))


def test_a_link_that_is_handed_over_is_slow_and_planned_for():
    result = handed_over(warmed_up(), LINKS[1])
    kinds = [(event.kind, event.link) for event in result.events]
    assert kinds == [("link_handed_over", "1-2"), ("straggler_detected", "1-2")]
    assert result.state.paths.handed_over == {LINKS[1]}
    assert result.state.detector.verdicts[1, 2].latency_ms == 40.0
    assert result.state.detector.verdicts[2, 1].health == "healthy"
    (request,) = result.commands
    assert isinstance(request, RequestCandidates)
    answer = CandidatesReceived(offered(result.state, {LINKS[1]}))
    state = advance(result.state, answer).state
    (change,) = advance(state, CandidateChosen()).commands
    assert isinstance(change, ChangePlan)
    assert change.change.routes == {LINKS[1]: "delegated"}
    assert change.restore == frozenset()


def test_a_handover_in_mid_step_is_planned_for_before_the_step_ends():
    failure, before = left_path(LINKS[1], is_slow=True), warmed_up()
    result = advance(before, SlowLink(LINKS[1], failure.late_ms, failure))
    assert [event.kind for event in result.events] == ["link_handed_over", "straggler_detected"]
    (request,) = result.commands
    assert isinstance(request, RequestCandidates)
    assert (
        advance(result.state, SlowLink(LINKS[1], failure.late_ms, failure)).events == ()
    )  # from another end
    answer = CandidatesReceived(offered(result.state, {LINKS[1]}))
    state = advance(advance(result.state, answer).state, CandidateChosen()).state
    assert isinstance(state.phase, Changing)
    paths = JoinedPathReport(failures=(failure,))
    result = advance(state, step_of(state, _WARM_UP, paths=paths))
    assert (result.events, result.commands) == ((), ())
    state = advance(result.state, PlanChanged()).state
    assert state.plan.routes[LINKS[1]] == "delegated"


def test_a_delegated_link_that_turns_slow_in_mid_step_is_planned_for_too():
    state = warmed_up()
    state = replace(state, plan=replace(state.plan, routes=dict.fromkeys(LINKS, "delegated")))
    state = advance(state, step_of(state, _WARM_UP)).state
    result = advance(state, SlowLink(LINKS[1], {"1>2": (40.0,) * 5}))
    assert [event.kind for event in result.events] == ["straggler_detected"]
    assert result.state.paths.unrestored == frozenset()
    assert result.state.detector.verdicts[1, 2].latency_ms == 40.0
    (request,) = result.commands
    assert isinstance(request, RequestCandidates)
    again = advance(result.state, SlowLink(LINKS[1], {"1>2": (40.0,) * 5}))
    assert (again.events, again.commands) == ((), ())


def test_delays_of_other_routes_than_the_plans_are_not_planned_with():
    state = warmed_up()
    state = replace(state, plan=replace(state.plan, routes=dict.fromkeys(LINKS, "delegated")))
    late = SlowLink(LINKS[1], {"1>2": (40.0,) * 5})
    result = advance(state, late)  # before any step of that plan has been observed
    assert [event.kind for event in result.events] == ["straggler_detected"]
    assert result.commands == ()
    result = advance(result.state, step_of(result.state, _WARM_UP, {LINKS[1]: 40.0}))
    (request,) = result.commands
    assert isinstance(request, RequestCandidates)
    latencies_ms = {each.direction: each.latency_ms for each in request.verdicts}
    assert latencies_ms[0, 1] == 1.5


def test_a_plan_that_does_not_know_a_link_to_be_slow_is_withdrawn():
    first, other = (left_path(link, is_slow=True) for link in LINKS)
    state = advance(warmed_up(), SlowLink(LINKS[0], first.late_ms, first)).state
    state = advance(state, CandidatesReceived(offered(state, {LINKS[0]}))).state
    late = advance(
        state, SlowLink(LINKS[1], other.late_ms, other)
    ).state  # before the plan is there
    (request,) = advance(late, CandidateChosen()).commands
    assert isinstance(request, RequestCandidates)
    assert request.restart_planner
    state = advance(state, CandidateChosen()).state
    result = advance(state, SlowLink(LINKS[1], other.late_ms, other))
    assert result.commands == (WithdrawPlan(),)
    withdrawn = advance(result.state, PlanWithdrawn())
    (request,) = withdrawn.commands
    assert isinstance(request, RequestCandidates)
    assert {each.link for each in request.verdicts if each.is_slow} == {*LINKS}
    announced = advance(result.state, PlanChanged()).state  # it was too late to withdraw it
    (request,) = advance(announced, step_of(announced, _WARM_UP)).commands
    assert isinstance(request, RequestCandidates)


def test_a_link_that_is_handed_over_right_after_a_morph_stays_so_until_the_next():
    first, other = (left_path(link, is_slow=True) for link in LINKS)
    state = advance(warmed_up(), SlowLink(LINKS[0], first.late_ms, first)).state
    state = advance(state, CandidatesReceived(offered(state, {LINKS[0]}))).state
    state = advance(state, CandidateChosen()).state
    paths = JoinedPathReport(failures=(first,))
    state = advance(state, step_of(state, _WARM_UP, paths=paths)).state
    state = advance(state, PlanChanged()).state
    state = advance(state, SlowLink(LINKS[1], other.late_ms, other)).state
    commands, paths = [], JoinedPathReport(failures=(other,))
    for step in range(_WARM_UP + 1, _WARM_UP + 5):
        for answer in (CandidatesReceived(offered(state, {*LINKS})), CandidateChosen()):
            result = advance(state, answer)
            commands, state = [*commands, *result.commands], result.state
        seen = step_of(state, step, dict.fromkeys(LINKS, 40.0), paths=paths)
        result, paths = advance(state, seen), None
        commands, state = [*commands, *result.commands], result.state
    assert {type(each) for each in commands} == {RequestCandidates, ChooseCandidate, ChangePlan}
    (change,) = (each.change for each in commands if isinstance(each, ChangePlan))
    assert change.routes == {LINKS[1]: "delegated"}


def test_a_link_that_is_handed_over_returns_if_the_plan_stays():
    state = handed_over(warmed_up(), LINKS[1]).state
    stays = Options(300.0, 300.0, (Option(FIRST, 300.0),))
    result = advance(state, CandidatesReceived(stays))
    assert [event.kind for event in result.events] == ["plan_kept"]
    for step in (1, 2):  # again where the command was lost
        result = advance(result.state, step_of(result.state, _WARM_UP + step))
        assert result.commands == (RestorePaths(frozenset({LINKS[1]})),)
    paths = JoinedPathReport(up={LINKS[1]: True}, restored=(LINKS[1],))
    state = advance(result.state, step_of(result.state, _WARM_UP + 3, paths=paths)).state
    assert state.paths.unrestored == frozenset()
    result = advance(state, step_of(state, _WARM_UP + 4))
    assert [event.kind for event in result.events][:1] == ["link_restored"]


@pytest.mark.parametrize(
    "answer",
    [CandidatesReceived(Options(1.0, 1.0, ())), CandidateChosen(), PlanChanged(), PlanDropped()],
)
def test_an_unexpected_answer_changes_nothing(answer):
    state = begun()
    assert advance(state, answer).state == state
    assert isinstance(state.phase, Idle)


@pytest.mark.long
def test_invariants_hold_in_many_short_random_runs():
    """100,000 take four minutes: CONTROLLER_RUNS=100000."""
    for seed in range(int(os.environ.get("CONTROLLER_RUNS", "1_000"))):
        run_at_random(seed, 8, count=5, checks_purity=False)
