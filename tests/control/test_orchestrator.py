"""Decisions on plans that are given with their predicted steps."""

from dataclasses import replace

import pytest
from verdict_examples import both_ways, healthy, verdict

from jaxmorph.control.dwell import Dwell
from jaxmorph.control.orchestrator import (
    SCHEDULE,
    Option,
    Situation,
    changed_subjects,
    decide,
)
from jaxmorph.control.verdicts import LinkHealth
from jaxmorph.program.instructions import Route
from jaxmorph.schedule.builders import zb_h1, zb_h2
from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.planner import Plan

LINKS = (Link(0, 1), Link(1, 2), Link(2, 3))


def option(schedule, step_ms, *delegated):
    routes: dict[Link, Route] = dict.fromkeys(LINKS, "direct")
    routes |= {Link.parse(name): "delegated" for name in delegated}
    return Option(Plan(schedule, routes, step_ms / 1e3, 0.0, ""), step_ms)


FIRST, OTHER = zb_h2(4, 12), replace(zb_h1(4, 12), name="adaptive")
SLOW = (*healthy(4, [(2, 3)]), *both_ways(2, 3, 31.2))


def situation(verdicts, in_force, *candidates, **more):
    given = {"step": 8, "undisturbed_ms": 390.0, "dwell": Dwell(4, 64), "worth": 0.02, **more}
    return Situation(verdicts=verdicts, in_force=in_force, candidates=candidates, **given)


def with_slow_link(now_ms=912.0, delegated_ms=700.0, anew_ms=420.0, **more):
    return situation(
        SLOW,
        option(FIRST, now_ms),
        option(FIRST, now_ms),
        option(FIRST, delegated_ms, "2-3"),
        option(OTHER, anew_ms, "2-3"),
        **more,
    )


def test_a_slow_link_is_delegated_with_the_plan_that_is_shortest_and_a_sentence_says_why():
    decision = decide(with_slow_link())
    assert decision.chosen == 2
    assert decision.reason == (
        "link 2-3 takes 31.2 ms each way (healthy: 1.1): 2-3 delegated, schedule zb-h2 -> "
        "adaptive, warm-ups 7 5 3 1 -> 4 3 2 1; predicted step 912 -> 420 ms"
    )


def test_the_order_stays_where_another_one_gains_next_to_nothing():
    assert decide(with_slow_link(delegated_ms=424.0)).chosen == 1
    assert decide(with_slow_link(delegated_ms=425.0)).chosen == 2


@pytest.mark.parametrize(("now_ms", "chosen"), [(396.0, None), (397.0, 1)])
def test_a_morph_must_gain_what_it_is_worth(now_ms, chosen):
    found = situation(
        SLOW, option(FIRST, now_ms), option(FIRST, now_ms), option(OTHER, 388.5, "2-3")
    )
    assert decide(found).chosen == chosen


def test_healthy_links_are_no_reason_for_another_plan_that_gains_nothing():
    now, another = option(OTHER, 100.0), replace(OTHER, name="initial")
    found = situation(healthy(4), now, option(FIRST, 104.0), option(another, 100.3))
    assert decide(found).chosen is None


def test_a_delay_that_the_plan_absorbs_is_reported_and_changes_nothing():
    decision = decide(with_slow_link(now_ms=395.0, delegated_ms=391.0, anew_ms=390.0))
    assert (decision.chosen, decision.wait_steps) == (None, 0)
    assert decision.reason == (
        "link 2-3 takes 31.2 ms each way (healthy: 1.1): the plan in force absorbs it, predicted "
        "step 395 ms, with another plan 391"
    )


def test_what_no_plan_helps_against_is_said_to_cost():
    decision = decide(with_slow_link(delegated_ms=902.0, anew_ms=900.0))
    assert decision.chosen is None
    assert decision.reason.endswith(
        "the plan in force stays, predicted step 912 ms (390 healthy), with another plan 902"
    )


def test_directions_and_links_are_told_apart():
    verdicts = (verdict(2, 3, 31.2), verdict(3, 2, 4.0), verdict(0, 1, 9.0), *healthy(4, [(2, 3)]))
    reason = decide(replace(with_slow_link(), verdicts=verdicts)).reason
    assert reason.startswith(
        "link 0-1 takes 9.0 ms 0>1 (healthy: 1.1), link 2-3 takes 31.2 ms 2>3 (healthy: 1.1) and "
        "4.0 ms 3>2 (healthy: 1.1): "
    )


def test_a_healthy_link_is_never_delegated_unless_that_is_allowed():
    found = with_slow_link()
    tempting = (*found.candidates, option(OTHER, 300.0, "1-2", "2-3"))
    assert decide(replace(found, candidates=tempting)).chosen == 2
    allowed = replace(found, candidates=tempting, may_delegate_healthy=True)
    assert decide(allowed).chosen == 3


def test_once_all_links_are_healthy_the_first_plan_comes_back_though_it_gains_nothing():
    in_force = option(OTHER, 385.0, "2-3")
    decision = decide(situation(healthy(4), in_force, option(FIRST, 390.0)))
    assert decision.chosen == 0
    assert decision.reason.startswith("all links are healthy: 2-3 direct again, schedule adaptive")
    even_if_longer = situation(healthy(4), in_force, option(FIRST, 500.0))
    assert decide(even_if_longer).chosen == 0
    assert decide(replace(even_if_longer, may_delegate_healthy=True)).chosen is None


def test_one_link_goes_back_while_another_stays():
    verdicts = (*healthy(4, [(2, 3)]), *both_ways(2, 3, 31.2))
    in_force = option(OTHER, 420.0, "0-1", "2-3")
    decision = decide(
        situation(verdicts, in_force, option(FIRST, 912.0), option(OTHER, 421.0, "2-3"))
    )
    assert decision.chosen == 1
    assert "0-1 direct again, the same order; predicted step 420 -> 421 ms" in decision.reason


def test_a_link_that_only_begins_to_recover_stays_delegated():
    recovering = (*healthy(4, [(2, 3)]), *both_ways(2, 3, 1.0, LinkHealth.RECOVERING))
    in_force = option(OTHER, 391.0, "2-3")
    decision = decide(
        situation(recovering, in_force, option(FIRST, 390.0), option(OTHER, 391.0, "2-3"))
    )
    assert decision.chosen is None


def test_going_back_waits_for_its_dwell_and_leaving_a_slow_link_does_not():
    dwell = Dwell(4, 64).after([Link(2, 3), SCHEDULE], 6)
    back = situation(healthy(4), option(OTHER, 390.0, "2-3"), option(FIRST, 390.0), dwell=dwell)
    decision = decide(back)
    assert (decision.chosen, decision.wait_steps) == (None, 2)
    assert "waits for 2 steps, then predicted step 390 -> 390 ms" in decision.reason
    assert decide(replace(back, step=10)).chosen == 0
    assert decide(with_slow_link(dwell=dwell)).chosen == 2


def test_another_order_on_the_same_routes_waits_for_the_dwell_of_the_last_morph():
    in_force, anew = option(FIRST, 700.0, "2-3"), option(OTHER, 420.0, "2-3")
    dwell = Dwell(4, 64).after(changed_subjects(option(FIRST, 912.0), in_force), 7)
    found = situation(SLOW, in_force, option(FIRST, 912.0), in_force, anew, dwell=dwell)
    assert decide(found).wait_steps == 3
    assert decide(replace(found, step=11)).chosen == 2


def test_what_else_has_changed_is_in_the_reason():
    found = situation(
        healthy(4), option(FIRST, 500.0), option(FIRST, 500.0), option(OTHER, 450.0),
        news=("stage 1's F takes 20.0 ms, not 10.0",),
    )  # fmt: skip
    decision = decide(found)
    assert decision.chosen == 1
    assert decision.reason.startswith(
        "all links are healthy; stage 1's F takes 20.0 ms, not 10.0: "
    )
