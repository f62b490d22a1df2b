"""The slow and dead directions that a run records, and their use at its next start."""

import pytest
from test_detector import DELEGATED, DIRECT, Steps, messages
from verdict_examples import verdict

from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.verdicts import (
    KnownDirection,
    dead_of,
    slow_of,
    with_healthy_latencies,
    with_known_delays,
)
from jaxmorph.plain_json import dump, parse_line
from jaxmorph.records import Link, Routes
from jaxmorph.schedule.costs import LinkDelay

LINK = Link(2, 3)
SLOW = KnownDirection(verdict(2, 3, 41.5), "delegated", {"direct": 0.5, "delegated": 1.5})
DEAD = KnownDirection(verdict(3, 2, 1.5, path=PathState.FAILED), "delegated", SLOW.usual_ms)
LINKS = {Link(1, 2): LinkDelay(0.4, 0.4), LINK: LinkDelay(0.6, 0.7)}
BY_HOSTS: Routes = dict.fromkeys(LINKS, "delegated")


def test_healthy_and_recovering_links_are_not_kept():
    steps = Steps().run([31.0] * 12, [1.0] * 12)
    assert steps.now.health is LinkHealth.RECOVERING
    assert steps.detector.known_directions() == ()


@pytest.mark.parametrize("route", [DIRECT, DELEGATED])
def test_a_slow_direction_is_kept_with_usual_times(route):
    steps = Steps(route=route).run([31.0] * 12, route=route)
    (known,) = steps.detector.known_directions()
    measured, other = ("direct", "delegated") if route is DIRECT else ("delegated", "direct")
    assert (known.direction, known.route, known.added_ms) == ((2, 3), measured, pytest.approx(30.0))
    assert known.usual_ms == {measured: 1.0, other: 3.0}  # the other one is derived
    assert known.in_words() == "2>3 slow, 31.0 ms (healthy: 1.0)"


def test_a_dead_link_is_kept_in_both_directions():
    steps = Steps()
    steps.fail(6, "no answer", LINK)
    steps.fail(6, "no answer", LINK[::-1])
    known = steps.detector.known_directions()
    assert [each.direction for each in known] == [(2, 3), (3, 2)]
    assert dead_of(known) == {LINK}
    assert slow_of(known) == {}
    assert known[0].in_words() == "2>3 without a direct path"


def test_a_known_direction_reads_back_from_json():
    for known in (SLOW, DEAD):
        assert parse_line(KnownDirection, dump(known), "a file") == known


def test_the_evidence_of_a_dead_link_says_dead():
    fields = DEAD.verdict.to_json()
    assert fields["health"] == "dead"
    assert "path" not in fields


def test_a_known_slow_direction_is_planned_as_slow():
    assert with_known_delays(LINKS, {}, [SLOW])[LINK] == LinkDelay(40.5, 0.7)
    assert with_known_delays(LINKS, BY_HOSTS, [SLOW])[LINK] == LinkDelay(41.5, 0.7)
    slower = {LINK: LinkDelay(60.0, 0.7)}
    assert with_known_delays(slower, {}, [SLOW]) == slower
    assert with_known_delays(LINKS, {}, [SLOW])[Link(1, 2)] == LINKS[Link(1, 2)]


def test_dead_and_unknown_links_stay_as_measured():
    assert with_known_delays(LINKS, {}, [DEAD]) == LINKS
    assert with_known_delays({}, {}, [SLOW]) == with_healthy_latencies({}, {}, [SLOW]) == {}


def test_healthy_latencies_are_the_recorded_ones():
    assert with_healthy_latencies(LINKS, {}, [SLOW, DEAD])[LINK] == LinkDelay(0.5, 0.5)
    assert with_healthy_latencies(LINKS, BY_HOSTS, [SLOW, DEAD])[LINK] == LinkDelay(1.5, 1.5)
    unknown = KnownDirection(SLOW.verdict, "direct", {})
    assert (
        with_healthy_latencies(LINKS, {}, [unknown])
        == with_known_delays(LINKS, {}, [unknown])
        == LINKS
    )


@pytest.mark.parametrize(
    ("now_ms", "later", "path"),
    [
        (0.5, [], []),  # a few fast messages change nothing
        (40.5, [[41.5] * 12, [42.0] * 12], []),  # the same delay is not reported again
        (40.5, [[1.5] * 12] * 4, [(LinkHealth.RECOVERING, 0), (LinkHealth.HEALTHY, 3)]),
        (40.5, [[90.0] * 12], [(LinkHealth.SLOW, 0)]),  # another delay is reported
    ],
)
def test_a_known_slow_direction_begins_slow(now_ms, later, path):
    steps = Steps(healthy=0)
    samples, usual_ms = messages([now_ms] * 8, DIRECT), {DIRECT: 0.5, DELEGATED: 1.5}
    (slow,) = steps.begin_slow(samples, usual_ms, SLOW.verdict)
    assert (slow.health, slow.latency_ms, slow.step) == (LinkHealth.SLOW, 41.5, -1)
    assert slow.evidence == SLOW.verdict.evidence
    assert slow.reason == ("link 2>3 was slow before the restart: 41.5 ms (healthy: 1.1)")
    assert steps.run(*later).path() == path


def test_a_known_verdict_replaces_no_newer_one():
    steps = Steps().run([31.0] * 12)
    assert steps.begin_slow(messages([31.0]), {}, SLOW.verdict, step=7) == []
    assert steps.now.latency_ms == 31.0
    assert Detector().known_directions() == ()
