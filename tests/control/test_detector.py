"""Verdicts on one direction: messages in, changes out."""

import json
import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import TRANSITIONS, LinkHealth, PathState, word
from jaxmorph.control.measurements import MessageTables, by_direction, packed
from jaxmorph.control.route_record import SETTLED_RUN, HealthyMessages

HEALTHY, SLOW, RECOVERING = LinkHealth
DEAD = "dead"
DIRECT, DELEGATED = True, False
EVERY_MS = 30.0


def state(verdict):
    return word(verdict.health, verdict.path)


def messages(durations_ms, route=DELEGATED, direction=(2, 3), every_ms=EVERY_MS):
    """Messages with some durations, sent at regular times."""
    sent_ms = every_ms * np.arange(len(durations_ms))
    rows = [np.arange(len(durations_ms)), 1e3 * sent_ms, 1e3 * (sent_ms + durations_ms)]
    (samples,) = by_direction(
        [MessageTables(((*direction, route),), packed(np.rint(rows)))]
    ).values()
    return samples


def grouped(*directions):
    """The messages of some directions."""
    return {each.direction: each for each in directions}


class Steps:
    """Feeds a detector step by step, and keeps the verdicts that change."""

    def __init__(self, healthy=6, route=DELEGATED, usual_ms=1.0):
        self.detector, self.step, self.changes = Detector(), 0, []
        self.run(*[[usual_ms] * 12] * healthy, route=route)

    def run(self, *steps, route=DELEGATED, direction=(2, 3)):
        for durations_ms in steps:
            self.observe(grouped(messages(durations_ms, route, direction)))
        return self

    def observe(self, samples):
        self.detector, changes = self.detector.observe(self.step, samples)
        self.changes += changes
        self.step += 1

    def begin_slow(self, samples, usual_ms, known=None, step=-1):
        return self._changes(self.detector.begin_slow(step, samples, usual_ms, known))

    def fail(self, step, detail="", direction=(2, 3)):
        return self._changes(self.detector.observe_failure(step, direction, detail))

    def _changes(self, detector):
        before, self.detector = self.detector.verdicts, detector
        return [each for at, each in detector.verdicts.items() if each != before.get(at)]

    def return_path(self, step, direction=(2, 3)):
        self.detector, changes = self.detector.observe_return(step, direction, 20)
        return changes

    @property
    def now(self):
        return self.detector.verdicts[2, 3]

    def baseline_ms(self, route):
        usual = self.detector.usual((2, 3), is_direct=route)
        return None if usual is None else usual.baseline_ms

    def path(self):
        return [(state(verdict), verdict.step) for verdict in self.changes]


def test_a_jump_and_its_end_are_found_at_once():
    steps = Steps().run([1.0] * 4 + [31.0] * 8, [31.0] * 12, [31.0] * 4 + [1.0] * 8)
    steps.run(*[[1.0] * 12] * 5)
    assert steps.path() == [(SLOW, 6), (RECOVERING, 8), (HEALTHY, 11)]
    slow, recovering, healthy = steps.changes
    assert (slow.latency_ms, slow.jitter_ms) == (31.0, 0.0)
    assert recovering.latency_ms == healthy.latency_ms == 1.0
    assert slow.reason == (
        "link 2>3 is slow: 31.0 ms (31.0 to 31.0) for 6 messages in a row, above 6.0 ms is late"
    )
    assert recovering.reason == (
        "link 2>3 is recovering: 1.0 ms (1.0 to 1.0) for 5 messages in a row, was 31.0"
    )
    assert (
        healthy.reason
        == "link 2>3 is healthy again: 1.0 ms (1.0 to 1.0) in the last of 3 good steps"
    )


def test_a_verdict_keeps_its_evidence():
    (slow,) = Steps().run([31.0, 32.0, 33.0, 34.0, 35.0, 36.0, 31.0, 31.0]).changes
    assert slow.evidence.samples_ms == (31.0, 32.0, 33.0, 34.0, 35.0, 36.0)
    numbers = slow.evidence.baseline_ms, slow.evidence.spread_ms, slow.evidence.threshold_ms
    assert numbers == (1.0, 0.0, 6.0)
    assert slow.latency_ms == 32.5  # of all messages since, not of those alone
    assert json.loads(json.dumps(slow.to_json()))["health"] == "slow"


@given(st.data())
def test_spikes_that_stand_alone_change_nothing(data):
    steps = Steps()
    for _ in range(6):
        spikes = data.draw(
            st.lists(st.sampled_from([1.0, 8.0, 40.0, 900.0]), min_size=6, max_size=6)
        )
        steps.run(list(chain(*((spike, 1.0) for spike in spikes))))
    assert steps.changes == []


IN_TIME, LATE = [1.0] * 12, [31.0] * 12
STALL = [1.0] * 2 + [300.0 - 30.0 * k for k in range(10)]  # all end together


@pytest.mark.parametrize(
    ("steps", "path"),
    [
        ([[1.0, 900.0, 900.0] * 4] * 10, []),  # two late in a row, however late
        ([[1.0] * 9 + [80.0, 1.0, 1.0], [1.0] * 10 + [80.0] * 2] * 9, []),  # overtaken: late once
        ([STALL, IN_TIME] * 4, []),  # one stall counts once
        ([[1.0] * 2 + [300.0] * 10], [(SLOW, 6)]),  # as many late messages with separate ends
        ([[2.5] * 12] * 60, []),  # a baseline that settles a little higher
        ([[31.0] * 3], []),
        ([[31.0] * 3, [31.0] * 3], [(SLOW, 7)]),  # the run goes on in the next step
        ([LATE, *[[36.0] * 12] * 6], [(SLOW, 6)]),  # hardly another delay
        # 4 would be in time, over 6 is late: between them is another delay.
        ([LATE, *[[5.0] * 12] * 9], [(SLOW, 6), (SLOW, 7)]),
        ([[1.0] * 4 + [11.1] * 7], []),  # one more would be a run
        ([[1.0] * 4 + [11.1] * 8], [(SLOW, 6)]),
        ([LATE, IN_TIME, IN_TIME, LATE], [(SLOW, 6), (RECOVERING, 7), (SLOW, 9)]),
        (
            [LATE, *[IN_TIME] * 3, LATE, *[IN_TIME] * 4],  # a jump resets the good steps
            [(SLOW, 6), (RECOVERING, 7), (SLOW, 10), (RECOVERING, 11), (HEALTHY, 14)],
        ),
    ],
)
def test_a_directions_states_follow_its_messages(steps, path):
    found = Steps().run(*steps)
    assert found.path() == path
    if steps[-1] == [36.0] * 12:  # only the latest verdict shows it
        assert (found.now.latency_ms, found.now.step) == (36.0, 6)


def test_a_growing_unsteady_delay_widens_no_threshold():
    drawn = random.Random(4)
    delays_ms = [0.25 * step for step in range(200)]
    steps = Steps(40)
    for delay_ms in delays_ms:
        steps.run([1.0 + max(0.0, drawn.gauss(delay_ms, 0.3 * delay_ms)) for _ in range(12)])
    assert steps.changes[0].health is SLOW
    assert steps.changes[0].evidence.threshold_ms <= 6.0 + 2 * 5.0
    assert delays_ms[steps.changes[0].step - 40] < 25.0


directions = ((0, 1), (1, 0), (1, 2), (2, 1), (3, 2))


@pytest.mark.parametrize(
    ("others_ms", "directions", "path"),
    [
        (1.0, directions, [(SLOW, 1)]),
        (31.0, directions, []),  # all are equally slow
        (1.0, directions[-1:], []),  # two directions don't show which one is slow
    ],
)
def test_slow_from_the_first_step_is_judged_by_others(others_ms, directions, path):
    steps = Steps(healthy=0)
    for route in (DELEGATED, DELEGATED, DELEGATED, DIRECT, DIRECT, DIRECT):
        others = [messages([others_ms] * 12, route, direction) for direction in directions]
        steps.observe(grouped(*others, messages(LATE, route)))
    assert steps.path() == path  # on another route too
    if path:
        (slow,) = steps.changes
        numbers = slow.latency_ms, slow.evidence.baseline_ms, slow.evidence.threshold_ms
        assert numbers == (31, 1, 6)
        assert steps.baseline_ms(DIRECT) == 1.0  # the others'
        steps.run(*[IN_TIME] * 4, route=DIRECT)
        assert steps.path()[1:] == [(RECOVERING, 6), (HEALTHY, 9)]


def slow_from_the_start():
    """A link that was slow from the start and is healthy by now."""
    steps = Steps(healthy=0)
    changes = steps.begin_slow(messages([31.0] * 4, DIRECT), {DIRECT: 1.0, DELEGATED: 2})
    assert changes == [steps.now]
    assert (steps.now.health, steps.now.latency_ms) == (SLOW, 31.0)
    assert steps.run(*[[32.0] * 12] * 4).changes == []
    steps.run(*[[2.0] * 12] * 4)
    assert [health for health, _ in steps.path()] == [RECOVERING, HEALTHY]
    assert steps.baseline_ms(DIRECT) == 1.0  # for probes
    return steps


def test_a_link_slow_from_the_start_can_relapse():
    steps = slow_from_the_start().run([1.0] * 4 + [31.0] * 8, route=DIRECT)
    assert steps.path()[2:] == [(SLOW, 8)]
    assert len(steps.now.evidence.samples_ms) == SETTLED_RUN


def test_scattered_late_messages_cause_no_relapse():
    steps = slow_from_the_start()
    steps.run([1.0, 31.0, 1.0, 31.0, 31.0, 31.0, 31.0, 1.0, 1.0, 1.0, 1.0, 1.0], route=DIRECT)
    steps.run(*[IN_TIME] * 4, [1.0] * 6 + [9.0] * 6, route=DIRECT)
    assert len(steps.changes) == 2


def test_a_link_with_late_bursts_needs_longer_ones():
    jump = [1.0] * 4 + [14.0] * 8
    assert Steps(20).run(jump).path() == [(SLOW, 20)]
    bursts = Steps().run(*[[1.0] * 9 + [14.0] * 3] * 22)
    assert bursts.run(jump).changes == []
    assert bursts.run([14.0] * 12).path() == [(SLOW, 29)]


def test_a_slow_links_jitter_is_not_another_delay():
    drawn = random.Random(2)
    steps = Steps().run(*([drawn.gauss(30, 6) for _ in range(12)] for _ in range(100)))
    assert [health for health, _ in steps.path()] == [SLOW]
    assert steps.now.latency_ms == pytest.approx(30, abs=4)
    assert steps.now.jitter_ms == pytest.approx(6, abs=4)


@pytest.mark.parametrize("other_ms", [60.0, 15.0])
def test_another_delay_of_a_slow_link_is_reported(other_ms):
    steps = Steps().run(*[LATE] * 3, [31.0] * 4 + [other_ms] * 8, *[[other_ms] * 12] * 3)
    assert steps.path() == [(SLOW, 6), (SLOW, 9)]
    assert steps.changes[1].latency_ms == other_ms
    assert steps.changes[1].reason.startswith("link 2>3 has another delay")


def test_a_delay_that_never_settles_is_reported_less_and_less():
    levels = [[ms] * 12 for ms in (20.0, 40.0) * 20]
    assert len(Steps().run(*levels).changes) <= 12


class TestRoutes:
    def test_direct_times_say_nothing_of_delegated_ones(self):
        steps = Steps(route=DIRECT, usual_ms=0.0).run(*[[12.0] * 12] * 9)
        assert steps.changes == []
        assert steps.baseline_ms(DIRECT) == 0.0
        assert steps.baseline_ms(DELEGATED) == 12.0

    def test_a_run_of_late_messages_ends_with_its_route(self):
        steps = Steps(route=DIRECT).run([1.0] * 8 + [31.0] * 4, route=DIRECT)
        steps.run(*[[1.0] * 12] * 3).run([31.0] * 4 + [1.0] * 8, route=DIRECT)
        assert steps.changes == []

    def test_a_delegated_slow_link_is_compared_with_others(self):
        steps = Steps(route=DIRECT, usual_ms=0.0).run(*[[9.0] * 12] * 6, direction=(5, 6))
        steps.run([30.0] * 12, route=DIRECT)
        steps.run(*[[39.0] * 12] * 4)
        assert steps.now.health is SLOW
        steps.run(*[[9.5] * 12] * 4)
        assert [health for health, _ in steps.path()][-2:] == [RECOVERING, HEALTHY]

    def test_a_lone_delegated_link_is_judged_by_its_direct_time(self):
        steps = Steps(route=DIRECT, usual_ms=0.0).run([30.0] * 12, route=DIRECT)
        steps.run(*[[31.0] * 12] * 4, *[[1.0] * 12] * 4)
        assert [health for health, _ in steps.path()] == [SLOW, RECOVERING, HEALTHY]

    def test_another_route_is_no_other_delay(self):
        steps = Steps(route=DIRECT)
        steps.detector = steps.detector.with_usual((2, 3), 20.0, is_direct=DELEGATED)
        steps.run(*[LATE] * 2, route=DIRECT).run(*[[50.0] * 12] * 3)
        assert steps.path() == [(SLOW, 6)]
        assert steps.run([80.0] * 12).path() == [(SLOW, 6), (SLOW, 11)]


class TestFailures:
    def test_only_its_path_brings_a_dead_link_back(self):
        steps = Steps(route=DIRECT, usual_ms=0.0)
        (dead,) = steps.fail(6, "activation[3] 2>3 did not come in 3 s")
        assert (state(dead), dead.step) == (DEAD, 6)
        assert dead.reason == "link 2>3 is dead: activation[3] 2>3 did not come in 3 s"
        steps.run(*[[1.0] * 12] * 9, [31.0] * 12, *[[1.0] * 12] * 9)
        assert state(steps.now) == DEAD
        assert steps.now.latency_ms == 1.0
        steps.run(*[[0.0] * 12] * 5, route=DIRECT)
        assert state(steps.now) == DEAD
        (back,) = steps.return_path(steps.step)
        assert (back.health, back.path, back.step) == (RECOVERING, PathState.RETURNED, steps.step)
        assert back.reason == (
            "link 2>3 is back: both ends have found its direct path up for 20 steps in a row"
        )
        steps.run([1.0] * 12, [1.0] * 12)
        assert steps.now.health is RECOVERING
        assert steps.run([1.0] * 12).now.health is HEALTHY
        assert steps.now.path is PathState.UP
        assert steps.now.reason.startswith("link 2>3 is healthy again: 1.0 ms")

    def test_other_delegated_times_of_a_dead_link_are_reported(self):
        steps = Steps(route=DIRECT, usual_ms=0.0)
        steps.fail(6)
        steps.run([1.0] * 12, [31.0] * 12, [31.0] * 12, [1.0] * 12, [2.0] * 12)
        assert steps.path() == [(DEAD, 7), (DEAD, 9)]
        slower, quicker = steps.changes
        assert (slower.latency_ms, quicker.latency_ms) == (31.0, 1.0)
        assert slower.reason == (
            "link 2>3 is dead, and delegated messages have another delay: 31.0 ms (31.0 to 31.0) "
            "for 5 in a row, was 1.0"
        )

    def test_a_repeated_failure_or_return_is_ignored(self):
        steps = Steps()
        assert steps.return_path(6) == []  # it isn't dead
        assert steps.now.health is HEALTHY
        assert len(steps.fail(6)) == 1
        assert steps.fail(6) == []
        steps.return_path(6)
        (dead,) = steps.fail(6, "its direct path is down again")
        assert (state(dead), dead.step) == (DEAD, 6)
        steps.return_path(6)
        assert steps.run(LATE).path() == [(SLOW, 6)]  # it may come back slow
        assert steps.now.path is PathState.RETURNED

    def test_a_link_without_messages_recovers_by_its_path(self):
        steps = Steps(healthy=0)
        steps.fail(0, direction=(0, 3))
        back, healthy = steps.return_path(20, direction=(0, 3))
        assert (back.health, healthy.health) == (RECOVERING, HEALTHY)
        assert steps.detector.verdicts[0, 3] is healthy


steps_of_a_link = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 5.0, 15.0, 31.0, 80.0]), st.booleans(), st.integers(1, 14)
    ),
    max_size=25,
)


def run_of(messages_ms, drawn):
    """Three healthy steps and those of a link, with failures and returns among them."""
    steps = Steps(healthy=3)
    for number, (ms, route, count) in enumerate(messages_ms):
        steps.run([ms * drawn.uniform(0.9, 1.1) for _ in range(count)], route=route)
        if drawn.random() < 0.1:
            steps.changes += steps.fail(number, "gave up")
        if drawn.random() < 0.1:
            steps.changes += steps.return_path(number)
    return steps


@settings(deadline=None)
@given(steps_of_a_link, st.randoms(use_true_random=False))
def test_verdicts_follow_the_table_with_evidence(messages_ms, drawn):
    steps = run_of(messages_ms, drawn)
    before = HEALTHY, PathState.UP
    for verdict in steps.changes:
        now = verdict.health, verdict.path
        assert now in TRANSITIONS[before].values()
        if verdict.is_slow and before[0] is not SLOW:
            assert min(verdict.evidence.samples_ms) > verdict.evidence.threshold_ms
        if verdict.health is RECOVERING and before[1] is not PathState.FAILED:
            assert max(verdict.evidence.samples_ms) < verdict.evidence.threshold_ms
        assert verdict.reason.startswith("link 2>3 ")
        before = now
    assert (steps.now.health, steps.now.path) == before


@given(st.floats(6.1, 200.0), st.floats(1.01, 3.0))
def test_longer_and_later_runs_are_less_likely(least_ms, more):
    healthy = HealthyMessages()
    healthy.learn([1.0] * 200 + [10.0, 40.0, 1.0] * 5)

    def chance(ms, count):
        return healthy.run_chance(ms, count, 6.0)

    assert chance(least_ms, 4) < chance(least_ms, 3)
    assert chance(more * least_ms, 4) <= chance(least_ms, 4)
