"""Decisions between plans with given predicted steps."""

from dataclasses import replace

import pytest
from verdict_examples import both_ways, healthy, verdict

from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.orchestrator import (
    SCHEDULE,
    Dwell,
    Option,
    Situation,
    decide,
    dwell_after,
    dwelling_links,
)
from jaxmorph.records import Link, Route
from jaxmorph.schedule.fixed import zb_h1, zb_h2
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


def with_slow_link(now_ms=912.0, delegated_ms=700.0, new_ms=420.0, **more):
    return situation(
        SLOW,
        option(FIRST, now_ms),
        option(FIRST, now_ms),
        option(FIRST, delegated_ms, "2-3"),
        option(OTHER, new_ms, "2-3"),
        **more,
    )


def test_a_slow_link_is_delegated_by_the_shortest_plan():
    decision = decide(with_slow_link())
    assert decision.chosen == 2
    assert decision.reason == (
        "link 2-3 takes 31.2 ms each way (healthy: 1.1): 2-3 delegated, schedule zb-h2 -> "
        "adaptive, warm-ups 7 5 3 1 -> 4 3 2 1; predicted step 912 -> 420 ms"
    )


def test_the_order_stays_where_another_gains_little():
    assert decide(with_slow_link(delegated_ms=424.0)).chosen == 1
    assert decide(with_slow_link(delegated_ms=425.0)).chosen == 2


@pytest.mark.parametrize(("now_ms", "chosen"), [(396.0, None), (397.0, 1)])
def test_a_morph_must_gain_what_it_is_worth(now_ms, chosen):
    found = situation(
        SLOW, option(FIRST, now_ms), option(FIRST, now_ms), option(OTHER, 388.5, "2-3")
    )
    assert decide(found).chosen == chosen


def test_with_healthy_links_no_gain_no_morph():
    now, another = option(OTHER, 100.0), replace(OTHER, name="initial")
    found = situation(healthy(4), now, option(FIRST, 104.0), option(another, 100.3))
    assert decide(found).chosen is None


def test_an_absorbed_delay_is_reported_and_changes_nothing():
    decision = decide(with_slow_link(now_ms=395.0, delegated_ms=391.0, new_ms=390.0))
    assert (decision.chosen, decision.wait_steps) == (None, 0)
    assert decision.reason == (
        "link 2-3 takes 31.2 ms each way (healthy: 1.1): the plan in force absorbs it, predicted "
        "step 395 ms, with another plan 391"
    )
    costs = decide(with_slow_link(delegated_ms=902.0, new_ms=900.0))
    assert costs.chosen is None
    assert costs.reason.endswith(
        "the plan in force stays, predicted step 912 ms (390 healthy), with another plan 902"
    )


def test_a_reason_names_each_degraded_direction():
    verdicts = (verdict(2, 3, 31.2), verdict(3, 2, 4.0), verdict(0, 1, 9.0), *healthy(4, [(2, 3)]))
    reason = decide(replace(with_slow_link(), verdicts=verdicts)).reason
    assert reason.startswith(
        "link 0-1 takes 9.0 ms 0>1 (healthy: 1.1), link 2-3 takes 31.2 ms 2>3 (healthy: 1.1) and "
        "4.0 ms 3>2 (healthy: 1.1): "
    )


def test_a_healthy_link_is_delegated_only_if_allowed():
    found = with_slow_link()
    tempting = (*found.candidates, option(OTHER, 300.0, "1-2", "2-3"))
    assert decide(replace(found, candidates=tempting)).chosen == 2
    allowed = replace(found, candidates=tempting, may_delegate_healthy=True)
    assert decide(allowed).chosen == 3


def test_the_first_plan_comes_back_once_links_are_healthy():
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


def test_a_recovering_link_stays_delegated():
    recovering = (*healthy(4, [(2, 3)]), *both_ways(2, 3, 1.0, LinkHealth.RECOVERING))
    in_force = option(OTHER, 391.0, "2-3")
    decision = decide(
        situation(recovering, in_force, option(FIRST, 390.0), option(OTHER, 391.0, "2-3"))
    )
    assert decision.chosen is None


def test_going_back_waits_and_delegating_does_not():
    dwell = Dwell(4, 64).after([Link(2, 3), SCHEDULE], 6)
    back = situation(healthy(4), option(OTHER, 390.0, "2-3"), option(FIRST, 390.0), dwell=dwell)
    decision = decide(back)
    assert (decision.chosen, decision.wait_steps) == (None, 2)
    assert "waits for 2 steps, then predicted step 390 -> 390 ms" in decision.reason
    assert decide(replace(back, step=10)).chosen == 0
    assert decide(with_slow_link(dwell=dwell)).chosen == 2


def test_another_order_waits_for_the_last_morphs_dwell():
    in_force, new = option(FIRST, 700.0, "2-3"), option(OTHER, 420.0, "2-3")
    dwell = dwell_after(Dwell(4, 64), option(FIRST, 912.0), in_force, 7)
    found = situation(SLOW, in_force, option(FIRST, 912.0), in_force, new, dwell=dwell)
    assert decide(found).wait_steps == 3
    assert decide(replace(found, step=11)).chosen == 2


def test_a_plan_that_has_only_just_begun_stays_unless_a_path_is_dead():
    found = with_slow_link(dwell=Dwell(4, 64, morphed_step=6))
    assert (decide(found).chosen, decide(found).wait_steps) == (None, 2)
    assert decide(replace(found, step=10)).chosen == 2
    assert decide(replace(found, verdicts=TestDeadLinks.DEAD)).chosen == 2


def test_a_reason_includes_other_changes():
    found = situation(
        healthy(4), option(FIRST, 500.0), option(FIRST, 500.0), option(OTHER, 450.0),
        other_changes=("stage 1's F takes 20.0 ms, not 10.0",),
    )  # fmt: skip
    decision = decide(found)
    assert decision.chosen == 1
    assert decision.reason.startswith(
        "all links are healthy; stage 1's F takes 20.0 ms, not 10.0: "
    )


class TestDeadLinks:
    """Link 2-3 has no direct path."""

    DEAD = (*healthy(4, [(2, 3)]), *both_ways(2, 3, 1.1, path=PathState.FAILED))

    def situation(self, in_force, *candidates, **more):
        return situation(self.DEAD, in_force, *candidates, **more)

    @pytest.mark.parametrize("may_delegate_healthy", [False, True])
    @pytest.mark.parametrize("delegated_ms", [300.0, 391.0, 5000.0])
    def test_they_are_delegated_whatever_that_gains(self, delegated_ms, may_delegate_healthy):
        now, then = option(FIRST, 390.0), option(FIRST, delegated_ms, "2-3")
        decision = decide(
            self.situation(now, now, then, may_delegate_healthy=may_delegate_healthy, worth=0.9)
        )
        assert (decision.chosen, decision.wait_steps) == (1, 0)
        assert decision.reason == (
            "link 2-3 has no direct path: 2-3 delegated, the same order; predicted step 390 -> "
            f"{delegated_ms:.0f} ms; without a direct path there is no choice"
        )

    @pytest.mark.parametrize("may_delegate_healthy", [False, True])
    def test_a_plan_that_leaves_them_direct_is_refused(self, may_delegate_healthy):
        more = {"may_delegate_healthy": may_delegate_healthy}
        now, found = option(OTHER, 900.0, "2-3"), option(FIRST, 800.0, "2-3")
        direct = option(FIRST, 100.0), option(OTHER, 90.0, "0-1")
        assert decide(self.situation(now, *direct, found, **more)).chosen == 2
        assert decide(self.situation(now, *direct, **more)).chosen is None

    def test_no_dwell_delays_them(self):
        dwell = Dwell(22, 64).after([Link(0, 1), Link(2, 3), SCHEDULE], 7)
        now, home = option(FIRST, 391.0, "0-1"), option(FIRST, 390.0)
        alone, both = option(FIRST, 392.0, "2-3"), option(FIRST, 470.0, "0-1", "2-3")
        decision = decide(self.situation(now, home, alone, both, dwell=dwell))
        assert decision.chosen == 2
        assert "2-3 delegated, the same order" in decision.reason
        # Not even where no plan leaves the other one delegated.
        assert decide(self.situation(now, home, alone, dwell=dwell)).chosen == 1

    def test_once_delegated_they_force_nothing(self):
        now = option(FIRST, 391.0, "2-3")
        decision = decide(self.situation(now, option(FIRST, 390.0), now))
        assert (decision.chosen, decision.wait_steps) == (None, 0)
        assert "no choice" not in decision.reason


class TestLinksThatDwell:
    """Link 0-1 is healthy again and delegated until step 30; now link 2-3 is slow."""

    DWELL = Dwell(22, 64).after([Link(0, 1)], 8)
    HOME, SLOW_ALONE = option(FIRST, 912.0), option(FIRST, 420.0, "2-3")
    NOW, BOTH = option(FIRST, 913.0, "0-1"), option(FIRST, 421.0, "0-1", "2-3")

    def situation(self, *candidates, **more):
        given = {"dwell": self.DWELL, **more}
        return situation(SLOW, self.NOW, self.HOME, self.SLOW_ALONE, *candidates, **given)

    def test_a_newly_slow_link_ignores_the_others_dwell(self):
        decision = decide(self.situation(self.BOTH))
        assert (decision.chosen, decision.wait_steps) == (2, 22)
        assert "2-3 delegated, the same order; predicted step 913 -> 421 ms" in decision.reason
        # Nor does it wait for the other's probe. Without a plan for both, the other goes back.
        probed = {"dwell": Dwell(4, 64)}
        waits = decide(self.situation(self.BOTH, **probed))
        assert (waits.chosen, waits.wait_steps) == (2, 1)
        assert decide(self.situation(**probed)).chosen == 1
        assert decide(self.situation()).wait_steps == 22
        for step, dwelling in ((29, {Link(0, 1)}), (30, set())):
            assert dwelling_links(self.DWELL, self.BOTH.routes, step) == dwelling
        assert dwelling_links(self.DWELL, self.SLOW_ALONE.routes, 8) == set()

    def test_a_healthy_link_goes_back_though_steps_get_longer(self):
        in_force = option(FIRST, 421.0, "0-1", "2-3")
        tempting = replace(self.situation(option(OTHER, 300.0, "0-1", "2-3")), in_force=in_force)
        assert decide(replace(tempting, step=30)).chosen == 1

    def test_one_link_goes_back_while_another_dwells(self):
        both = option(FIRST, 391.0, "0-1", "1-2")
        kept = option(FIRST, 390.5, "0-1")
        found = situation(healthy(4), both, option(FIRST, 390.0), kept, dwell=self.DWELL)
        decision = decide(found)
        assert (decision.chosen, decision.wait_steps) == (1, 22)
        assert "1-2 direct again" in decision.reason
        other_dwells = self.DWELL.after([Link(1, 2)], 0)
        assert decide(replace(found, dwell=other_dwells)).wait_steps == 14  # the sooner of the two


class TestTheSchedulesOwnDwell:
    DIRECT, REPLANNED = option(FIRST, 390.0), option(OTHER, 390.0)

    def after_links(self, dwell, *steps):
        """Different links turn slow, each with another order, and go back."""
        for number, step in enumerate(steps):
            delegated = option(OTHER, 420.0, str(Link(number, number + 1)))
            dwell = dwell_after(dwell, self.DIRECT, delegated, step)
            dwell = dwell_after(dwell, delegated, self.DIRECT, step + 6)
        return dwell

    def test_links_in_turn_make_the_schedule_wait_no_longer(self):
        dwell = self.after_links(Dwell(4, 64), 0, 10, 20, 30)
        found = situation(healthy(4), self.REPLANNED, self.DIRECT, dwell=dwell, step=36)
        assert decide(found).wait_steps == 4
        assert decide(replace(found, step=40)).chosen == 0

    def test_a_flapping_schedule_dwells_longer(self):
        dwell = dwell_after(Dwell(4, 64), self.DIRECT, self.REPLANNED, 0)
        dwell = self.after_links(dwell, 4)
        dwell = dwell_after(dwell, self.REPLANNED, self.DIRECT, 14)
        assert dwell.waits([SCHEDULE], 14) == 8

    def test_a_schedule_that_flaps_does_not_wait_long_for_a_slow_link(self):
        flapping = Dwell(4, 64).after([SCHEDULE], 0).after([SCHEDULE], 10).after([SCHEDULE], 20)
        assert flapping.waits([SCHEDULE], 21) == 15
        for slow_since, waits in (([], 15), ([19], 15), ([19, 22], 3)):
            assert flapping.for_slow(slow_since).waits([SCHEDULE], 21) == waits


DWELL = Dwell(least_steps=4, most_steps=20)


@pytest.mark.parametrize(
    ("steps", "stand"),
    [
        ([0, 16, 48, 60, 90], [4, 8, 16, 20, 20]),  # flapping: twice as long each time
        ([0, 17, 49], [4, 4, 4]),  # neither flapping nor calm
        ([0, 16, 48, 177, 242, 1000, 2000], [4, 8, 16, 8, 4, 4, 4]),  # calm: half as long
    ],
)
def test_a_stay_depends_on_the_earlier_ones(steps, stand):
    dwell, found = DWELL, []
    for step in steps:
        dwell = dwell.after([Link(2, 3)], step)
        found.append(dwell.waits([Link(2, 3)], step))
    assert found == stand


def test_each_subject_has_its_own_stay():
    assert DWELL.waits([Link(2, 3)], 0) == 0
    changed = DWELL.after([Link(2, 3)], 10)
    assert [changed.waits([Link(2, 3)], step) for step in (10, 13, 14, 50)] == [4, 1, 0, 0]
    assert changed.waits([Link(0, 1)], 10) == 0
    assert changed.waits([Link(0, 1), Link(2, 3)], 11) == 3
    changed = changed.after([Link(2, 3), Link(0, 1)], 15)
    assert (changed.waits([Link(2, 3)], 15), changed.waits([Link(0, 1)], 15)) == (8, 4)


def test_a_change_for_another_subject_is_no_flapping():
    dwell = DWELL.after([SCHEDULE], 0)
    for step in (4, 8, 12):
        dwell = dwell.extended(SCHEDULE, step)
        assert dwell.waits([SCHEDULE], step) == 4
    assert dwell.after([SCHEDULE], 17).waits([SCHEDULE], 17) == 4  # 17 after the last of its own
    assert dwell.after([SCHEDULE], 16).extended(SCHEDULE, 17).waits([SCHEDULE], 17) == 7
    assert DWELL.extended(SCHEDULE, 5).after([SCHEDULE], 9).waits([SCHEDULE], 9) == 4
