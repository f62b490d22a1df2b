"""A run of three stages that goes on with what it knew of its links."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from adapting_run import CONFIG, COSTS, FIRST, USUAL, PlansHere, Run

from jaxmorph.adapting.starting_point import starting_point
from jaxmorph.control.profiler import Profiler
from jaxmorph.control.verdicts import Evidence, KnownWay, LinkHealth, Verdict
from jaxmorph.planning import first_plan
from jaxmorph.planning.first_plan import plan_by_timings
from jaxmorph.planning.plan_in_force import agree_on_plan, unmeasured_profile
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import Link, LinkState

LINK, OTHER = Link(1, 2), Link(0, 1)
ADDED_MS = 40.0
EVIDENCE = Evidence((41.5,) * 5, 1.5, 0, 6.5)


def known(*ways, health=LinkHealth.SLOW):
    return [
        KnownWay(
            Verdict(source, destination, health, ADDED_MS + 1.5, 0.0, 20, EVIDENCE, ""),
            "delegated",
            {"direct": 0.5, "delegated": 1.5},
        )
        for source, destination in ways
    ]


DEAD = known(LINK, LINK[::-1], health=LinkHealth.DEAD)


def links_now(slow):
    """What links do before the first step: some of them are still slow, one way."""

    def state(usual, link):
        added_ms = ADDED_MS if link in slow else 0.0
        return replace(usual, forward_latency_ms=usual.forward_latency_ms + added_ms)

    return {
        route: {link: state(usual, link) for link, usual in of_route.items()}
        for route, of_route in USUAL.items()
    }


def milliseconds(usual):
    """What links do on either route and either way, by one key each."""
    return {
        (route, str(link), way): latency_ms
        for route, links in usual.items()
        for link, state in links.items()
        for way, latency_ms in asdict(state).items()
    }


@pytest.fixture
def begin(monkeypatch):
    """Begins runs whose first steps last what the simulator says; notes the routes of these."""
    measured_on = []

    def warm_up(config, rendezvous, trainer, inputs, num_tied, stash_bytes, **how):
        del trainer, inputs, stash_bytes
        plan = agree_on_plan(config, rendezvous, unmeasured_profile(config), num_tied)
        routes = plan.plan.routes
        measured_on.append(routes)
        links: dict[Link, LinkState] = {link: now[routes[link]][link] for link in routes}
        timeline, profiler = simulate_blocking(plan.programs, COSTS, links), Profiler(3)
        for _ in range(2):
            profiler.observe(timeline)
            how["note"](timeline)
        return profiler

    now: dict = {}
    monkeypatch.setattr(first_plan, "agree_on_stash", lambda *_: None)
    monkeypatch.setattr(first_plan, "adopt_plan", lambda *_: "")
    monkeypatch.setattr(first_plan, "warm_up", warm_up)
    runs = []

    def begun(ways, slow=()):
        now.update(links_now(slow))
        trainer: Any = SimpleNamespace(stash_memory=None)
        inputs: Any = None
        first = plan_by_timings(CONFIG, SoleRank(), trainer, inputs, 0, lambda plan: plan, ways)
        start = starting_point(CONFIG, first, 0)
        plan = first.in_force.plan
        plans = PlansHere(start.usual, start.home, plan)
        run = Run(plans, in_force=plan, usual=start.usual, detector=start.detector)
        runs.append(run)
        return run, start, measured_on

    yield begun
    for run in runs:
        run.loop.close()


def test_without_anything_known_the_first_plan_is_the_usual_one(begin):
    run, start, _ = begin(())
    assert run.delegated() == set()
    assert start.home.routes == FIRST.routes
    run.steps(1)
    assert run.events == []


@pytest.mark.parametrize("slow", [(), (LINK,)])
def test_a_link_that_was_slow_is_delegated_from_the_first_step_on_and_told_with_it(begin, slow):
    run, start, _ = begin(known((1, 2)), slow)
    assert run.delegated() == {"1-2"}
    assert milliseconds(start.usual) == pytest.approx(milliseconds(USUAL))
    assert start.home.routes == FIRST.routes
    run.steps(1, slow_ms=ADDED_MS if slow else 0.0)
    assert run.events[0] == (0, "straggler_detected", "1-2")
    assert run.details[0].startswith("link 1>2 is taken for slow, as when the run was last at wo")


def test_while_it_is_slow_it_is_not_found_again_and_stays(begin):
    run, _, _ = begin(known((1, 2)), [LINK])
    run.steps(12, slow_ms=ADDED_MS)
    assert run.of_kind("straggler_detected") == [(0, "straggler_detected", "1-2")]
    assert run.of_kind("straggler_recovering", "route_changed") == []
    assert run.delegated() == {"1-2"}


def test_one_that_is_well_by_now_goes_back_by_the_ordinary_way(begin):
    run, _, _ = begin(known((1, 2)))
    run.steps(20)
    told = run.of_kind("straggler_recovering", "straggler_cleared", "link_probed", "route_changed")
    assert [kind for _, kind, _ in told] == [
        "straggler_recovering", "straggler_cleared", "link_probed", "route_changed",
    ]  # fmt: skip
    assert run.routes == FIRST.routes
    assert run.expected_ms() == pytest.approx(0.5)


def test_links_that_are_all_slow_are_told_by_what_was_known_alone(begin):
    run, start, _ = begin((), [OTHER, LINK])
    assert run.delegated() == set()  # none is slower than most
    run, start, _ = begin(known((0, 1), (1, 2)), [OTHER, LINK])
    assert run.delegated() == {"0-1", "1-2"}
    assert milliseconds(start.usual) == pytest.approx(milliseconds(USUAL))
    run.steps(4, slow_ms=ADDED_MS, other_ms=ADDED_MS)
    run.steps(30)
    assert run.routes == FIRST.routes


def test_a_link_that_was_dead_is_on_its_direct_path_in_no_step(begin):
    run, start, measured_on = begin(DEAD)
    assert {routes[LINK] for routes in measured_on} == {"delegated"}
    assert run.delegated() == {"1-2"}
    verdicts = start.detector.verdicts
    assert {way for way in verdicts if verdicts[way].health is LinkHealth.DEAD} == {(1, 2), (2, 1)}
    assert milliseconds(start.usual) == pytest.approx(milliseconds(USUAL))
    assert start.home.routes == FIRST.routes
    run.steps(12)
    assert run.of_kind("straggler_detected") == [(0, "straggler_detected", "1-2")] * 2
    assert run.of_kind("route_changed", "link_probed", "straggler_cleared") == []
    assert run.loop.without_path([LINK]) == {LINK}
    assert {each.way for each in run.loop.known_ways()} == {(1, 2), (2, 1)}
