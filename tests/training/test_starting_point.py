"""A run whose links are slow before its first step, or were slow at an earlier start."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from adapting_run import CONFIG, COSTS, FIRST, PLANNED_FOR, USUAL, PlansHere

from jaxmorph.config.link_sections import Routes
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.rank_times import rank_times
from jaxmorph.control.step_programs import lower_step
from jaxmorph.control.verdicts import Evidence, KnownDirection, Verdict
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import LinkDelay, chain_links
from jaxmorph.training import first_plan
from jaxmorph.training.first_plan import FirstPlan, agree_on_routes, plan_by_timings
from jaxmorph.training.plan_in_force import (
    PlanInForce,
    agree_on_plan,
    plan_step,
    unmeasured_profile,
)
from jaxmorph.training.starting_point import starting_point

SLOW = Link(1, 2)
MEASURED = {
    "direct": {**USUAL["direct"], SLOW: LinkDelay(40.5, 0.5)},
    "delegated": {**USUAL["delegated"], SLOW: LinkDelay(41.5, 1.5)},
}
DIRECT_ALONE = {**MEASURED, "delegated": USUAL["delegated"]}
DELEGATED_ROUTES = {**FIRST.routes, SLOW: "delegated"}


def first_plan_of(measured, routes):
    """A first plan on some routes, after two steps on each route."""
    steps = []
    for route in ("delegated", "direct"):
        links = measured[route]
        programs = lower_step(FIRST.schedule, PLANNED_FOR, dict.fromkeys(links, route))
        steps += [rank_times(simulate_blocking(programs, COSTS, links))] * 2
    profiler = Profiler(3, None)
    for ranks in steps[2:]:
        profiler.observe(ranks)
    profile = Profile(COSTS, {link: measured[route][link] for link, route in routes.items()})
    plan = replace(FIRST, routes=routes)
    in_force = PlanInForce(plan, lower_step(plan.schedule, profile, routes), 0)
    return FirstPlan(in_force, profiler, "", profile, measured, tuple(steps))


@pytest.fixture
def run_on(begin_run):
    """Begins a run at a starting point, with a plan in force."""

    def begin(start, plan, config=CONFIG):
        plans = PlansHere(start.usual, start.home, plan, config)
        known = {"usual": start.usual, "detector": start.detector}
        return begin_run(plans, config.adaptation, plan, **known)

    return begin


@pytest.fixture
def run_by(run_on):
    """Begins a run from measured delays, with its slow link delegated."""

    def begin(measured):
        first = first_plan_of(measured, DELEGATED_ROUTES)
        return run_on(starting_point(CONFIG, first, 0), first.in_force.plan)

    return begin


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


def degraded(start):
    verdicts = start.detector.verdicts.items()
    return {direction for direction, each in verdicts if each.health is not LinkHealth.HEALTHY}


def test_healthy_links_leave_the_first_plan_as_home():
    first = first_plan_of(USUAL, FIRST.routes)
    start = starting_point(CONFIG, first, 0)
    assert (start.home, start.usual, degraded(start)) == (first.in_force.plan, USUAL, set())


@pytest.mark.parametrize("measured", [MEASURED, DIRECT_ALONE])
def test_a_link_slow_from_the_start_is_found(measured):
    start = starting_point(CONFIG, first_plan_of(measured, DELEGATED_ROUTES), 0)
    assert degraded(start) == {(1, 2)}
    slow = start.detector.verdicts[1, 2]
    assert (slow.health, slow.latency_ms) == (LinkHealth.SLOW, pytest.approx(40.5))
    assert slow.evidence.baseline_ms == pytest.approx(0.5)
    assert slow.reason.startswith("link 1>2 is slow: 40.5 ms")
    assert start.usual == USUAL
    assert start.home.routes == FIRST.routes
    for is_direct, usual_ms in ((True, 0.5), (False, 1.5)):
        usual = start.detector.usual((1, 2), is_direct=is_direct)
        assert usual is not None
        assert usual.baseline_ms == pytest.approx(usual_ms)


def test_a_link_slow_from_the_start_goes_back(run_by):
    run = run_by(MEASURED)
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


def test_the_first_step_expects_measured_times(run_by):
    run = run_by(DIRECT_ALONE)
    assert run.expected_ms() == pytest.approx(0.5)  # of the profile
    run.steps(1)
    assert run.expected_ms() == pytest.approx(1.5)


def test_home_is_best_of_direct_and_delegated_where_allowed():
    all_delegated = dict.fromkeys(FIRST.routes, "delegated")
    start = starting_point(ANY, first_plan_of(BETTER_BUT_SLOW, all_delegated), 0)
    assert start.usual == BETTER_DELEGATED
    profile = Profile(COSTS, BETTER_DELEGATED["direct"])
    had_it_been_healthy, _ = agree_on_routes(
        ANY, SoleRank(), profile, BETTER_DELEGATED, FIRST.routes, 0
    )
    assert start.home == had_it_been_healthy.plan
    assert start.home.routes == all_delegated


def test_home_is_direct_where_delegating_gains_too_little():
    little = ANY.adaptation.model_copy(update={"worth": 0.5})
    config = ANY.model_copy(update={"adaptation": little})
    assert starting_point(config, first_plan_of(MEASURED, DELEGATED_ROUTES), 0).home == FIRST
    not_allowed = starting_point(CONFIG, first_plan_of(BETTER_BUT_SLOW, DELEGATED_ROUTES), 0)
    assert not_allowed.home.routes == FIRST.routes


def test_the_home_order_returns_on_delegated_links(run_on):
    adaptive = {"name": "adaptive"}
    slow = Profile(COSTS, BETTER_BUT_SLOW["delegated"])
    delegated = Routes.model_validate({"default": "delegated"})
    config = ANY.model_copy(
        update={"schedule": ANY.schedule.model_copy(update=adaptive), "routes": delegated}
    )
    all_delegated = dict.fromkeys(FIRST.routes, "delegated")
    first = first_plan_of(BETTER_BUT_SLOW, all_delegated)
    plan = replace(plan_step(config, slow), routes=all_delegated)
    first = replace(first, in_force=replace(first.in_force, plan=plan))
    start = starting_point(ANY, first, 0)
    run = run_on(start, plan, ANY)
    assert start.home.schedule != plan.schedule
    run.steps(6, slow_ms=48.5)
    assert run.of_kind("plan_changed") == []
    run.steps(20)
    assert (run.morphs[-1].plan.schedule, run.routes) == (start.home.schedule, all_delegated)


LINK, OTHER = Link(1, 2), Link(0, 1)
ADDED_MS = 40.0
EVIDENCE = Evidence((41.5,) * 5, 1.5, 0, 6.5)


def known(*directions, path=PathState.UP):
    state = LinkHealth.SLOW, ADDED_MS + 1.5, 0.0, 20, EVIDENCE, "", path
    return [
        KnownDirection(Verdict(low, high, *state), "delegated", {"direct": 0.5, "delegated": 1.5})
        for low, high in directions
    ]


DEAD = known(LINK, LINK[::-1], path=PathState.FAILED)


def links_now(slow):
    """The delays of links before the first step; some are still slow in one direction."""

    def state(usual, link):
        added_ms = ADDED_MS if link in slow else 0.0
        return replace(usual, forward_latency_ms=usual.forward_latency_ms + added_ms)

    return {
        route: {link: state(usual, link) for link, usual in of_route.items()}
        for route, of_route in USUAL.items()
    }


def milliseconds(usual):
    """Delays by route, link and direction."""
    return {
        (route, str(link), direction): latency_ms
        for route, links in usual.items()
        for link, state in links.items()
        for direction, latency_ms in asdict(state).items()
    }


@pytest.fixture
def begin(monkeypatch, run_on):
    """Begins runs whose first steps are simulated, and records the routes of these."""
    measured_on = []

    def measure_steps(config, rendezvous, trainer, inputs, num_tied, stash_bytes, **how):
        del trainer, inputs, stash_bytes
        plan = agree_on_plan(config, rendezvous, unmeasured_profile(config), num_tied)
        routes = plan.plan.routes
        measured_on.append(routes)
        links: dict[Link, LinkDelay] = {link: now[routes[link]][link] for link in routes}
        ranks, profiler = rank_times(simulate_blocking(plan.programs, COSTS, links)), Profiler(3)
        for _ in range(2):
            profiler.observe(ranks)
            how["on_step"](ranks)
        return profiler

    now: dict = {}
    monkeypatch.setattr(first_plan, "agree_on_stash", lambda *_: None)
    monkeypatch.setattr(first_plan, "resize_slots", lambda *_: "")
    monkeypatch.setattr(first_plan, "agree_on_sidecars", lambda *_: "")
    monkeypatch.setattr(first_plan, "_measure_steps", measure_steps)

    def begun(directions, slow=()):
        now.update(links_now(slow))
        trainer: Any = SimpleNamespace(stash_memory=None)
        inputs: Any = None
        first = plan_by_timings(CONFIG, SoleRank(), trainer, inputs, 0, directions)
        start = starting_point(CONFIG, first, 0)
        return run_on(start, first.in_force.plan), start, measured_on

    return begun


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_known_slow_link_begins_delegated(begin, is_slow):
    run, start, _ = begin(known((1, 2)), [LINK] if is_slow else [])
    assert run.delegated() == {"1-2"}
    assert milliseconds(start.usual) == pytest.approx(milliseconds(USUAL))
    assert start.home.routes == FIRST.routes
    run.steps(20, slow_ms=ADDED_MS if is_slow else 0.0)
    assert run.events[0] == (0, "straggler_detected", "1-2")
    assert run.details[0].startswith("link 1>2 was slow before the restart: ")
    kinds = ("straggler_detected", "straggler_recovering", "straggler_cleared", "link_probed")
    kinds_seen = [kind for _, kind, _ in run.of_kind(*kinds, "route_changed")]
    if is_slow:  # it stays delegated
        assert kinds_seen == ["straggler_detected"]
        assert run.delegated() == {"1-2"}
    else:  # it goes back as any link
        assert kinds_seen == [*kinds, "route_changed"]
        assert run.routes == FIRST.routes
        assert run.expected_ms() == pytest.approx(0.5)


def test_all_links_slow_are_found_by_known_times(begin):
    run, start, _ = begin((), [OTHER, LINK])
    assert run.delegated() == set()  # none is slower than most
    run, start, _ = begin(known((0, 1), (1, 2)), [OTHER, LINK])
    assert run.delegated() == {"0-1", "1-2"}
    assert milliseconds(start.usual) == pytest.approx(milliseconds(USUAL))
    run.steps(4, slow_ms=ADDED_MS, other_ms=ADDED_MS)
    run.steps(30)
    assert run.routes == FIRST.routes


def test_a_dead_link_never_uses_its_direct_path(begin):
    run, start, measured_on = begin(DEAD)
    assert {routes[LINK] for routes in measured_on} == {"delegated"}
    assert run.delegated() == {"1-2"}
    verdicts = start.detector.verdicts
    assert {direction for direction in verdicts if verdicts[direction].is_dead} == {(1, 2), (2, 1)}
    assert milliseconds(start.usual) == pytest.approx(milliseconds(USUAL))
    assert start.home.routes == FIRST.routes
    run.steps(12)
    assert run.of_kind("straggler_detected") == [(0, "straggler_detected", "1-2")] * 2
    assert run.of_kind("route_changed", "link_probed", "straggler_cleared") == []
    assert run.loop.state.paths.unrestored == {LINK}
    known_now = run.loop.state.detector.known_directions()
    assert {each.direction for each in known_now} == {(1, 2), (2, 1)}


def test_few_measured_messages_say_how_long_delegated_ones_take():
    """Else a link that turns slow would be judged, once delegated, by its direct times."""
    measured = {"direct": USUAL["direct"], "delegated": chain_links((15.0, 15.0))}
    start = starting_point(CONFIG, first_plan_of(measured, FIRST.routes), 0)
    for direction in ((0, 1), (1, 0), (1, 2), (2, 1)):
        usual = start.detector.usual(direction, is_direct=False)
        assert usual is not None
        assert usual.baseline_ms == pytest.approx(15.0)
