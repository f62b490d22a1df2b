"""A run of three stages whose way 1>2 is slow before its first step, and heals later."""

from dataclasses import replace

import pytest
from adapting_run import CONFIG, COSTS, FIRST, PLANNED_FOR, USUAL, PlansHere, Run

from jaxmorph.adapting.starting_point import starting_point
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.measurements import link_samples
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.verdicts import LinkHealth
from jaxmorph.planning.first_plan import FirstPlan, agree_on_routes
from jaxmorph.planning.plan_in_force import PlanInForce, plan_step
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import Link, LinkState, chain_links

SLOW = Link(1, 2)
MEASURED = {
    "direct": {**USUAL["direct"], SLOW: LinkState(40.5, 0.5)},
    "delegated": {**USUAL["delegated"], SLOW: LinkState(41.5, 1.5)},
}
DIRECT_ALONE = {**MEASURED, "delegated": USUAL["delegated"]}
DELEGATED_ROUTES = {**FIRST.routes, SLOW: "delegated"}


def first_plan(measured, routes):
    """A first plan on some routes, after two steps on either one."""
    timelines = []
    for route in ("delegated", "direct"):
        links = measured[route]
        programs = lower_step(FIRST.schedule, PLANNED_FOR, dict.fromkeys(links, route))
        timelines += [simulate_blocking(programs, COSTS, links)] * 2
    profiler = Profiler(3, None)
    for timeline in timelines[2:]:
        profiler.observe(timeline)
    told = Profile(COSTS, {link: measured[route][link] for link, route in routes.items()})
    plan = replace(FIRST, routes=routes)
    in_force = PlanInForce(plan, lower_step(plan.schedule, told, routes), 0)
    return FirstPlan(in_force, profiler, "", told, measured, tuple(timelines))


def run_from(measured, routes=DELEGATED_ROUTES):
    first = first_plan(measured, routes)
    start = starting_point(CONFIG, first, 0)
    plan = first.in_force.plan
    run = Run(
        PlansHere(start.usual, start.home, plan),
        in_force=plan,
        usual=start.usual,
        detector=start.detector,
    )
    return start, run


ANY = CONFIG.model_copy(
    update={"adaptation": CONFIG.adaptation.model_copy(update={"delegates": "any"})}
)
BETTER_DELEGATED: UsualLinks = {
    "direct": chain_links((9.0, 9.0)),
    "delegated": chain_links((1.5, 1.5)),
}
BETTER_BUT_SLOW = {
    route: {**links, SLOW: replace(links[SLOW], forward_latency_ms=50.0)}
    for route, links in BETTER_DELEGATED.items()
}


def ailing(start):
    verdicts = start.detector.verdicts.items()
    return {way for way, each in verdicts if each.health is not LinkHealth.HEALTHY}


def test_healthy_links_are_what_they_are_and_the_first_plan_is_the_one_to_come_back():
    first = first_plan(USUAL, FIRST.routes)
    start = starting_point(CONFIG, first, 0)
    assert (start.home, start.usual, ailing(start)) == (first.in_force.plan, USUAL, set())


@pytest.mark.parametrize("measured", [MEASURED, DIRECT_ALONE])
def test_a_link_that_is_slow_from_the_start_is_judged_by_the_others(measured):
    start, run = run_from(measured)
    run.loop.close()
    assert ailing(start) == {(1, 2)}
    slow = start.detector.verdicts[1, 2]
    assert (slow.health, slow.latency_ms) == (LinkHealth.SLOW, pytest.approx(40.5))
    assert slow.evidence.baseline_ms == pytest.approx(0.5)
    assert slow.reason.startswith("link 1>2 is slow: 40.5 ms")
    assert start.usual == USUAL
    assert start.home.routes == FIRST.routes
    for is_held, usual_ms in ((True, 0.5), (False, 1.5)):
        usual = start.detector.usual(1, 2, is_held=is_held)
        assert usual is not None
        assert usual.baseline_ms == pytest.approx(usual_ms)


def test_it_is_told_once_stays_delegated_while_it_ails_and_goes_back_when_it_is_well():
    _, run = run_from(MEASURED)
    run.steps(8, slow_ms=40.0)
    assert run.of_kind("straggler_detected") == [(0, "straggler_detected", "1-2")]
    assert run.of_kind("straggler_recovering", "route_changed") == []
    assert run.delegated() == {"1-2"}
    run.steps(12)
    assert run.of_kind("link_probed", "route_changed")[-1][1:] == ("route_changed", "1-2")
    assert run.routes == FIRST.routes
    events = len(run.events)
    run.steps(12)
    assert run.events[events:] == []
    run.steps(3, slow_ms=40.0)
    assert run.delegated() == {"1-2"}
    run.loop.close()


def test_as_long_as_probes_of_the_direct_link_are_late_it_stays_delegated():
    _, run = run_from(DIRECT_ALONE)
    run.direct_late_ms = 40.0
    run.steps(16)
    assert len(run.of_kind("link_probed")) >= 2
    assert run.delegated() == {"1-2"}
    run.direct_late_ms = 0.0
    run.steps(30)
    assert run.routes == FIRST.routes
    run.loop.close()


def test_what_a_step_is_expected_to_take_is_what_was_measured_until_there_was_one():
    _, run = run_from(DIRECT_ALONE)
    assert run.expected_ms() == pytest.approx(0.5)  # the profile's, which is asked for
    run.steps(1)
    assert run.expected_ms() == pytest.approx(1.5)
    run.loop.close()


def test_few_microbatches_and_two_links_are_enough_to_tell():
    first = first_plan(MEASURED, DELEGATED_ROUTES)
    samples = link_samples(first.timelines[-1])
    assert len([each for each in samples if each.source == 1]) < 24  # no baseline of its own
    assert ailing(starting_point(CONFIG, first, 0)) == {(1, 2)}


def test_where_healthy_links_may_be_delegated_the_plan_to_come_back_is_the_best_of_either():
    all_delegated = dict.fromkeys(FIRST.routes, "delegated")
    start = starting_point(ANY, first_plan(BETTER_BUT_SLOW, all_delegated), 0)
    assert start.usual == BETTER_DELEGATED
    told = Profile(COSTS, BETTER_DELEGATED["direct"])
    had_it_been_healthy, _ = agree_on_routes(
        ANY, SoleRank(), told, BETTER_DELEGATED, FIRST.routes, 0
    )
    assert start.home == had_it_been_healthy.plan
    assert start.home.routes == all_delegated


def test_where_healthy_links_are_not_worth_delegating_they_come_back_direct_though_they_may_be():
    little = ANY.adaptation.model_copy(update={"worth": 0.5})
    config = ANY.model_copy(update={"adaptation": little})
    assert starting_point(config, first_plan(MEASURED, DELEGATED_ROUTES), 0).home == FIRST
    not_allowed = starting_point(CONFIG, first_plan(BETTER_BUT_SLOW, DELEGATED_ROUTES), 0)
    assert not_allowed.home.routes == FIRST.routes


def test_all_links_stay_delegated_and_the_order_for_healthy_ones_comes_once_they_are():
    anew = {"name": "adaptive"}
    slow = Profile(COSTS, BETTER_BUT_SLOW["delegated"])
    config = ANY.model_copy(update={"schedule": ANY.schedule.model_copy(update=anew)})
    all_delegated = dict.fromkeys(FIRST.routes, "delegated")
    first = first_plan(BETTER_BUT_SLOW, all_delegated)
    plan = replace(plan_step(config, slow), routes=all_delegated)
    first = replace(first, in_force=replace(first.in_force, plan=plan))
    start = starting_point(ANY, first, 0)
    run = Run(
        PlansHere(start.usual, start.home, plan, ANY),
        settings=ANY.adaptation,
        in_force=plan,
        usual=start.usual,
        detector=start.detector,
    )
    assert start.home.schedule != plan.schedule
    run.steps(6, slow_ms=48.5)
    assert run.of_kind("plan_changed") == []
    run.steps(20)
    assert (run.morphs[-1].plan.schedule, run.routes) == (start.home.schedule, all_delegated)
    run.loop.close()
