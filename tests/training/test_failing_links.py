"""Direct paths that fail while a run adapts: delegated at once, and restored once they are up.

And links that are late for a step, and in time in the next: no reason to change the plan.
"""

import random

import pytest
from failing_run import LINKS, FailingRun

from jaxmorph.training.planning_client import PlanningError

FIRST_LINK, LINK = LINKS
STEPS_TO_MORPH = 2
SPIKE = {LINK: 250.0}


@pytest.fixture
def begin():
    """Starts runs, and ends them with the test."""
    runs = []

    def begun(**settings):
        runs.append(FailingRun(**settings))
        return runs[-1]

    yield begun
    for run in runs:
        run.close()


@pytest.fixture
def cut(begin):
    """Starts runs whose second link's path is cut after six steps."""

    def cut(**settings):
        run = begin(**settings)
        run.steps(6)
        run.cut(LINK)
        return run

    return cut


def routes_of(run, link=LINK):
    return [record.routes[str(link)] for record in run.records()]


def test_a_failed_link_is_delegated_two_steps_later(cut):
    run = cut(worth=0.9)  # no gain is worth a morph
    run.steps(6)
    assert run.events("link_failed", "plan_changed", "route_changed", "straggler_detected") == [
        (6, "link_failed", "1-2"),
        (8, "plan_changed", None),
        (8, "route_changed", "1-2"),
    ]
    assert run.details("plan_changed")[0].startswith("link 1-2 has no direct path: 1-2 delegated")
    assert run.details("plan_changed")[0].endswith("without a direct path there is no choice")
    assert [routes[LINK] for _, routes, _, _ in run.log] == ["direct"] * 8 + ["delegated"] * 4
    assert routes_of(run) == ["direct"] * 6 + ["delegated"] * 6
    assert run.records()[7].link_states == {"1-2": "direct path failed, delegated"}


def test_a_failed_link_goes_back_after_its_probe_each_time(cut):
    run = cut(failback_steps=5)
    run.steps(6)
    run.heal(LINK)
    run.steps(20)
    reported = run.events(
        "link_failed", "straggler_recovering", "straggler_cleared", "link_probed", "link_restored"
    )
    # Up in steps 12 to 16, in time in 16 to 18, probed after 19, found healthy in 20.
    assert reported == [
        (6, "link_failed", "1-2"),
        *[(16, "straggler_recovering", "1-2")] * 2,
        *[(18, "straggler_cleared", "1-2")] * 2,
        (20, "link_probed", "1-2"),
        (22, "link_restored", "1-2"),
    ]
    assert run.wires.restored == [LINK]
    assert routes_of(run) == ["direct"] * 6 + ["delegated"] * 16 + ["direct"] * 10
    for times in (2, 3):
        run.cut(LINK)
        run.steps(6)
        run.heal(LINK)
        run.steps(60)
        assert run.wires.restored == [LINK] * times
        assert len(run.events("link_failed")) == times
        assert routes_of(run)[-1] == "direct"


def test_a_stall_moves_no_estimate(begin):
    run, undisturbed = begin(), begin()
    for each in (run, undisturbed):
        each.steps(12)
    run.cut(LINK)
    run.steps(12)
    for direction in ((0, 1), (1, 0), (1, 2), (2, 1)):
        usual = undisturbed.loop.state.detector.usual(direction, is_direct=True)
        assert run.loop.state.detector.usual(direction, is_direct=True) == usual
    assert run.events("straggler_detected", "compute_changed") == []
    assert run.profiler.profile().costs == undisturbed.profiler.profile().costs
    other = undisturbed.profiler.profile().links[FIRST_LINK]
    assert run.profiler.profile().links[FIRST_LINK] == other


def test_a_slow_link_is_found_after_a_failure_step(begin):
    run = begin()
    run.steps(8)
    run.cut(LINK)
    run.steps(6, {FIRST_LINK: 40.0})
    assert {step for step, _, _ in run.events("straggler_detected")} == {9}
    assert run.routes == dict.fromkeys(LINKS, "delegated")


def test_a_path_down_again_restarts_its_count(cut):
    run = cut(failback_steps=4, dwell_steps=60)
    run.steps(3)
    run.heal(LINK)
    run.steps(12)
    assert len(run.events("straggler_cleared")) == 2
    run.cut(LINK)
    run.steps(3)
    assert run.events("link_path_down") == [(21, "link_path_down", "1-2")]
    assert run.wires.restored == []
    run.heal(LINK)
    run.steps(70)
    assert run.wires.restored == [LINK]
    assert len(run.events("link_failed")) == 1
    assert len(run.events("link_restored")) == 1


def test_a_link_without_restores_left_stays_delegated(cut):
    run = cut(restores=1, failback_steps=3)
    run.steps(3)
    run.heal(LINK)
    run.steps(40)
    assert run.events("link_given_up") == [(6, "link_given_up", "1-2")]
    assert run.wires.restored == []
    assert set(routes_of(run)[6:]) == {"delegated"}


def test_a_failed_link_stays_delegated_while_planning_fails(begin):
    run = begin(failback_steps=3)
    make_candidates, run.plans.make_candidates = run.plans.make_candidates, failing
    run.steps(6)
    run.cut(LINK)
    run.steps(2)
    run.heal(LINK)
    run.steps(10)
    assert run.wires.restored == []
    assert set(routes_of(run)[6:]) == {"delegated"}
    run.plans.make_candidates = make_candidates
    run.steps(30)
    assert run.wires.restored == [LINK]
    assert len(run.events("link_restored")) == 1
    assert run.routes[LINK] == "direct"


def failing(*_):
    raise PlanningError("the planning process has died")


def test_a_probe_of_a_cut_path_is_a_failure(begin):
    run = begin(failback_steps=3)
    run.steps(6)
    run.steps(6, {LINK: 40.0})
    assert run.routes[LINK] == "delegated"
    run.cut(LINK)
    run.steps(20)
    assert len(run.events("link_failed")) == 1
    assert run.events("link_restored", "link_given_up") == []
    assert run.routes[LINK] == "delegated"
    run.heal(LINK)
    run.steps(30)
    assert len(run.events("link_restored")) == 1
    assert run.routes[LINK] == "direct"


def test_a_known_dead_link_goes_back(begin):
    run = begin(dead=[LINK], failback_steps=5)
    run.cut(LINK)
    run.steps(6)
    assert [stage.failed_before for stage in run.stages] == [[], [LINK], [LINK]]
    assert run.events("straggler_detected") == [(0, "straggler_detected", "1-2")] * 2
    assert run.records()[5].link_states == {"1-2": "direct path failed, delegated"}
    run.heal(LINK)
    run.steps(20)
    # Up in steps 6 to 10, then as any dead link.
    assert run.events("link_failed", "straggler_recovering", "link_probed", "link_restored") == [
        *[(10, "straggler_recovering", "1-2")] * 2,
        (14, "link_probed", "1-2"),
        (16, "link_restored", "1-2"),
    ]
    assert routes_of(run) == ["delegated"] * 16 + ["direct"] * 10


class Watched(FailingRun):
    """A run that fails if a path is restored too early."""

    def on_restored(self, link, found_up):
        least = self.loop.state.paths.steps_after(self.wires.failures[link])
        assert found_up >= least


@pytest.mark.parametrize("delegates", ["slow", "any"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_no_link_uses_a_failed_path(seed, delegates):
    drawn = random.Random(seed)
    run = Watched(failback_steps=6, longest_dwell_steps=12, delegates=delegates)
    slow_ms = {}
    run.steps(6)
    for _ in range(14):
        link = drawn.choice(LINKS)
        match drawn.choice(["cut", "cut", "heal", "slow", "recover"]):
            case "cut":
                run.cut(link)
            case "heal":
                run.heal(link)
            case "slow":
                slow_ms[link] = drawn.choice([20.0, 40.0])
            case "recover":
                slow_ms.pop(link, None)
        run.steps(drawn.randint(1, 9), slow_ms)
    for link in LINKS:
        run.heal(link)
    run.steps(80)
    expect_sound(run)
    assert {run.routes[link] for link in run.wires.by_hosts} <= {"delegated"}
    if delegates == "slow":  # with "any", delegation may be worth it
        assert set(run.routes.values()) == {"direct"}
    run.close()


def expect_sound(run):
    """Each failure and each route is reported once, and no plan uses a failed path."""
    reported = run.events("link_failed")
    for link in LINKS:
        assert len([each for each in reported if each[2] == str(link)]) == run.wires.failures[link]
    for record, (_, routes, _, after) in zip(run.records(), run.log, strict=True):
        actual = {**routes, **dict.fromkeys(after, "delegated")}
        assert record.routes == {str(link): route for link, route in actual.items()}
    for link in LINKS:
        waited = 0
        for _, routes, before, _ in run.log:
            waited = waited + 1 if link in before and routes[link] == "direct" else 0
            assert waited <= STEPS_TO_MORPH


def test_spikes_of_single_steps_change_no_plan(begin):
    run = begin(dwell_steps=2)
    run.steps(8)
    for _ in range(6):
        run.steps(1, SPIKE)
        run.steps(5)
    assert run.events("plan_changed", "route_changed") == []
    assert len(run.events("straggler_detected")) == 12  # each way
    dropped = [each for each in run.details("plan_kept") if "in time again" in each]
    assert len(dropped) == 6
    assert "link 1-2 takes 250" in dropped[0]


@pytest.mark.parametrize("slow_steps", [2, 6])
def test_a_link_that_stays_slow_changes_the_plan_as_soon_as_ever(begin, slow_steps):
    run = begin(dwell_steps=2)
    run.steps(8)
    run.steps(slow_steps, SPIKE)
    run.steps(1)
    assert run.events("straggler_detected", "plan_changed", "route_changed") == [
        (8, "straggler_detected", "1-2"),
        (8, "straggler_detected", "1-2"),
        (10, "plan_changed", None),
        (10, "route_changed", "1-2"),
    ]
