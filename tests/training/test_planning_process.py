"""The candidates, and the process beside training that plans them."""

import io
import json
from dataclasses import replace

import pytest

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.controller_state import RequestCandidates
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.profiler import Profile
from jaxmorph.control.rank_times import RankTimes, texts_of, timeline_of
from jaxmorph.control.step_programs import lower_step, simulate_step
from jaxmorph.control.verdicts import Evidence, Verdict
from jaxmorph.plain_json import dump, parse_line, tagged
from jaxmorph.program.check import check
from jaxmorph.program.instructions import parse_instructions
from jaxmorph.program.lowering import forward_only
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, StageCosts, StashBytes, chain_links
from jaxmorph.training.plan_in_force import plan_step
from jaxmorph.training.planning_client import (
    Begin,
    PlanningError,
    PlanningProcess,
    RunToPlan,
    Simulated,
)
from jaxmorph.training.planning_process import CandidatePlanner, serve

LINKS = (Link(0, 1), Link(1, 2), Link(2, 3))
COSTS = StageCosts.uniform(4, 10.0, 10.0, 10.0)
USUAL: UsualLinks = {"direct": chain_links((0.0,) * 3), "delegated": chain_links((1.0,) * 3)}


def config(**sections):
    sizes = {"parallelism": {"stages": 4}, "batch": {"microbatches": 12}}
    return Config.model_validate({**sizes, "schedule": {"name": "zb-h2"}, **sections})


def planner(num_tied=0, **sections):
    run = config(**sections)
    profile = Profile(COSTS, USUAL["direct"])
    first = plan_step(run, profile, num_tied)
    return CandidatePlanner(Begin(RunToPlan(run, num_tied, first, profile, USUAL), first)), profile


def verdicts(lower, upper, latency_ms, health=LinkHealth.SLOW, path=PathState.UP):
    evidence = Evidence((latency_ms,), 0.0, 0.0, 5.0)
    directions = ((lower, upper), (upper, lower))
    state = health, latency_ms, 0.0, 6, evidence, "slow", path
    return [Verdict(*direction, *state) for direction in directions]


def delegated(candidate):
    return [str(link) for link, route in candidate.plan.routes.items() if route == "delegated"]


def test_a_slow_link_has_three_plans_that_run():
    plans, profile = planner()
    options = plans.make_candidates(profile, verdicts(2, 3, 30.0))
    assert options.undisturbed_ms == pytest.approx(390.0)
    assert options.in_force_ms == pytest.approx(1110.0)
    first, same_order, new = options.candidates
    assert [delegated(each) for each in options.candidates] == [[], ["2-3"], ["2-3"]]
    assert first.step_ms == options.in_force_ms
    assert same_order.plan.schedule == first.plan.schedule
    assert new.plan.schedule.name == "adaptive"
    assert new.step_ms == pytest.approx(421.0)  # 30 ms, and what delegation costs, once
    assert new.step_ms < same_order.step_ms < first.step_ms
    for candidate in plans.candidates:
        check(candidate.programs)
    (only,) = plans.make_candidates(profile, verdicts(2, 3, 0.0, LinkHealth.HEALTHY)).candidates
    assert only.plan.schedule.name == "zb-h2"


@pytest.mark.parametrize(
    ("sections", "links"),
    [
        ({"routes": {"0-1": "delegated"}}, [["0-1"], ["0-1", "2-3"], ["0-1", "2-3"]]),
        (
            {"adaptation": {"enabled": True, "delegates": "any"}},
            [[], ["2-3"], ["2-3"], ["0-1", "1-2", "2-3"]],
        ),
    ],
)
def test_candidates_delegate_what_the_configuration_lets(sections, links):
    plans, profile = planner(**sections)
    candidates = plans.make_candidates(profile, verdicts(2, 3, 30.0)).candidates
    assert [delegated(each) for each in candidates] == links


def test_after_a_morph_predictions_are_the_new_plans():
    plans, profile = planner()
    plans.make_candidates(profile, verdicts(2, 3, 30.0))
    adapted = plans.candidates[2]
    assert plans.choose(2).slots == slots_needed(adapted.programs)
    # Judged on the delegated route, so the latency includes the usual time there.
    assert plans.make_candidates(profile, verdicts(2, 3, 31.0)).in_force_ms == adapted.step_ms
    first = plans.make_candidates(profile, []).candidates[0].plan
    begun = CandidatePlanner(Begin(RunToPlan(config(), 0, first, profile, USUAL), adapted.plan))
    for each in (plans, begun):  # a new planner predicts the same
        healed = each.make_candidates(profile, verdicts(2, 3, 1.0, LinkHealth.HEALTHY))
        assert healed.in_force_ms == pytest.approx(391.0)
        assert [delegated(candidate) for candidate in healed.candidates] == [[]]
        assert healed.candidates[0].step_ms == pytest.approx(390.0)


def test_steps_of_the_last_plans_are_simulated():
    plans, profile = planner()
    first = simulate_step(plans.programs, profile, {})
    plans.make_candidates(profile, verdicts(2, 3, 30.0))
    plans.choose(2, number=1)
    second = simulate_step(plans.candidates[2].programs, profile, {})
    for number, timeline in enumerate((first, second)):
        expected = Simulated(timeline.makespan_ms, timeline.bubble_rate)
        assert plans.simulate(number, profile) == expected
        assert plans.simulate(number, profile, with_times=True).times == texts_of(timeline)
    plans.choose(0, number=2)
    plans.choose(0, number=3)
    with pytest.raises(ValueError, match=r"got plan 0, expected one of \[1, 2, 3\]"):
        plans.simulate(0, profile)


def test_slower_ops_get_a_new_plan_noise_does_not():
    plans, profile = planner()
    noisy = replace(profile, costs=replace(COSTS, forward_ms=(10.5, 9.6, 10.0, 10.0)))
    assert len(plans.make_candidates(noisy, []).candidates) == 1
    slower = replace(profile, costs=replace(COSTS, forward_ms=(10.0, 14.0, 10.0, 10.0)))
    _, new = plans.make_candidates(slower, []).candidates
    assert (delegated(new), new.plan.schedule.name) == ([], "adaptive")


def test_a_tied_gradients_link_is_delegated_too():
    slow = verdicts(0, 3, 30.0)
    plans, profile = planner(num_tied=1)
    assert delegated(plans.make_candidates(profile, slow).candidates[1]) == ["0-3"]
    plans, profile = planner()
    assert len(plans.make_candidates(profile, slow).candidates) == 1


def test_evaluation_has_its_slots():
    plans, profile = planner(evaluation={"every_steps": 5}, data={"held_out_fraction": 0.1})
    plans.make_candidates(profile, verdicts(2, 3, 30.0))
    forwards = slots_needed([*map(forward_only, plans.candidates[2].programs)])
    slots = plans.choose(2).slots
    assert all(slots[channel] >= number for channel, number in forwards.items())
    assert any(slots[channel] >= number > 1 for channel, number in forwards.items())


def test_new_plans_keep_caps_that_home_exceeds():
    """A fixed schedule may exceed the memory that devices report, tens of gigabytes."""
    sizes = StashBytes((10**10,) * 4, (5 * 10**9,) * 4)
    profile = Profile(COSTS, USUAL["direct"], stash_bytes=sizes)
    first = plan_step(config(), profile, 0)
    assert held_bytes(first, sizes) > 6 * 10**10
    capped = config(schedule={"name": "zb-h2", "max_stash_bytes": 6 * 10**10})
    for run, keeps in ((config(), False), (capped, True)):
        plans = CandidatePlanner(Begin(RunToPlan(run, 0, first, profile, USUAL), first))
        *same, new = plans.make_candidates(profile, verdicts(2, 3, 60.0)).candidates
        assert all(each.plan.schedule == first.schedule for each in same)
        assert new.plan.schedule.name == "adaptive"
        assert (held_bytes(new.plan, sizes) <= 6 * 10**10) is keeps


def held_bytes(plan, sizes):
    """The most that any stage holds."""
    memories = Limits(max_stash_bytes=(0,) * 4, stash_bytes=sizes).stage_memory(4, 12)
    return max(
        memory.peak(order) for memory, order in zip(memories, plan.schedule.orders, strict=True)
    )


def test_a_newly_slow_link_has_plans_that_keep_others():
    plans, profile = planner()
    adapted = plans.make_candidates(profile, verdicts(0, 1, 30.0)).candidates[2]
    plans.choose(2)
    slow = [*verdicts(0, 1, 1.0, LinkHealth.HEALTHY), *verdicts(2, 3, 30.0)]
    for staying in ((), [Link(0, 1)]):  # it may go back after a probe, or not yet
        options = plans.make_candidates(profile, slow, staying)
        found = [delegated(each) for each in options.candidates]
        alone, both = [["2-3"]] * 2, [["0-1", "2-3"]] * 3
        assert found == [[], *alone, *both]
        first, now = options.candidates[0].plan.schedule, adapted.plan.schedule
        assert [each.plan.schedule for each in options.candidates[3:5]] == [first, now]
        for candidate in plans.candidates[3:]:
            check(candidate.programs)
            assert candidate.step_ms < 0.6 * options.in_force_ms


def test_one_link_goes_back_while_another_stays():
    plans, profile = planner()
    slow = [*verdicts(0, 1, 30.0), *verdicts(2, 3, 30.0)]
    adapted = plans.make_candidates(profile, slow).candidates[2]
    plans.choose(2)
    healed = [each for at in (0, 2) for each in verdicts(at, at + 1, 1.0, LinkHealth.HEALTHY)]
    _, first_order, same_order = plans.make_candidates(profile, healed, [Link(2, 3)]).candidates
    assert delegated(first_order) == delegated(same_order) == ["2-3"]
    assert same_order.plan.schedule == adapted.plan.schedule != first_order.plan.schedule


@pytest.mark.parametrize("delegates", ["slow", "any"])
def test_a_dead_link_has_plans_that_change_no_other(delegates):
    plans, profile = planner(adaptation={"enabled": True, "delegates": delegates})
    plans.make_candidates(profile, verdicts(0, 1, 30.0))
    plans.choose(2)
    dead = [*verdicts(0, 1, 1.0, LinkHealth.HEALTHY), *verdicts(2, 3, 0.0, path=PathState.FAILED)]
    candidates = plans.make_candidates(profile, dead, [Link(0, 1)]).candidates
    assert any(delegated(each) == ["0-1", "2-3"] for each in candidates)
    assert any("2-3" in delegated(each) for each in candidates)
    for candidate in plans.candidates:
        check(candidate.programs)


RUN, SLOW = config(), verdicts(1, 2, 30.0)
PROFILE = Profile(COSTS, USUAL["direct"])
FIRST = plan_step(RUN, PROFILE)


@pytest.mark.multiprocess
@pytest.mark.timeout(60)
def test_the_process_plans_and_ends_with_its_input():
    process = PlanningProcess()
    try:
        with pytest.raises(PlanningError, match="got another request first, expected Begin"):
            process.make_candidates(PROFILE, SLOW)
        process.begin(RunToPlan(RUN, 1, FIRST, PROFILE, USUAL), FIRST)
        options = process.make_candidates(PROFILE, SLOW)
        assert options.in_force_ms > 1.5 * options.undisturbed_ms
        with pytest.raises(PlanningError, match="got plan 7"):
            process.simulate(7, PROFILE)
        assert not process.has_died
        simulated = process.simulate(0, PROFILE, with_times=True)
        timeline = timeline_of([parse_line(RankTimes, text, "") for text in simulated.times])
        assert timeline.makespan_ms == pytest.approx(simulated.step_ms, abs=1e-3)
        chosen = options.candidates[1]
        assert chosen.plan.schedule == FIRST.schedule
        assert chosen.plan.routes == {
            link: "delegated" if link == LINKS[1] else "direct" for link in LINKS
        }
        chosen_plan = process.choose(1, number=1)
        programs = tuple(map(parse_instructions, chosen_plan.programs))
        expected = Profile(COSTS, chain_links((0.0, 31.0, 0.0)))
        assert programs == lower_step(FIRST.schedule, expected, chosen.plan.routes, num_tied=1)
        directions = {(channel.source, channel.destination) for channel in chosen_plan.slots}
        assert directions == {(1, 2), (2, 1)}
        requests = process._process.stdin
        assert requests is not None
        requests.close()  # as at the end of rank 0
        assert process._process.wait(30) == 0
        with pytest.raises(PlanningError, match="the planning process is gone"):
            process.make_candidates(PROFILE, SLOW)
    finally:
        process.close()


@pytest.mark.timeout(60)
def test_a_process_that_died_is_reported_and_replaced():
    process = PlanningProcess()
    try:
        process._process.kill()
        process._process.wait(30)
        with pytest.raises(PlanningError, match="the planning process is gone"):
            process.begin(RunToPlan(RUN, 1, FIRST, PROFILE, USUAL), FIRST)
        process.restart(FIRST)  # with a new process
        assert process.make_candidates(PROFILE, SLOW).in_force_ms > 0
        slow = process.make_candidates(PROFILE, SLOW).candidates[1]
        chosen_plan = process.choose(1, number=1)
        morphed = process.make_candidates(PROFILE, SLOW)
        process.restart(slow.plan, chosen_plan.programs)
        again = process.make_candidates(PROFILE, SLOW)
        assert again.in_force_ms == morphed.in_force_ms
    finally:
        process.close()
    with pytest.raises(PlanningError, match="has been closed"):
        process.restart(FIRST)


def test_a_server_survives_wrong_requests():
    request = tagged(RequestCandidates(PROFILE, (), ()))
    requests = [{"kind": "sing"}, request, {}]
    answers = io.StringIO()
    serve(iter(map(dump, requests)), answers)
    errors = [json.loads(line)["error"] for line in answers.getvalue().splitlines()]
    kinds = "expected one of the kinds Begin, RequestCandidates, Choose, Simulate"
    assert errors == [
        f"ParseError: a request: got {requests[0]}, {kinds}",
        "ValueError: got another request first, expected Begin",
        f"ParseError: a request: got {requests[2]}, {kinds}",
    ]
