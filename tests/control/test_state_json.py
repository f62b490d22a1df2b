"""The controller's state survives being written and read."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compute_watch import COSTS
from test_compute_watch import step as compute_step
from test_detector import grouped, messages, run_of, steps_of_a_link

from jaxmorph.control.compute_watch import ComputeWatch
from jaxmorph.control.detector import Detector
from jaxmorph.control.link_state import FailedPaths, PathFailure
from jaxmorph.control.measurements import op_times
from jaxmorph.plain_json import ParseError, dump, parse
from jaxmorph.records import Link

LINKS = (Link(0, 1), Link(1, 2))


def written_and_read(value):
    return parse(type(value), json.loads(dump(value)), "state")


@settings(max_examples=50)
@given(steps_of_a_link, st.randoms(use_true_random=False), steps_of_a_link)
def test_a_restored_detector_continues_the_same(messages_ms, drawn, later):
    steps = run_of(messages_ms, drawn)
    one, other = steps.detector, written_and_read(steps.detector)
    assert other == one
    for number, (ms, route, count) in enumerate(later, start=steps.step):
        samples = grouped(messages([ms] * count, route))
        one, changes = one.observe(number, samples)
        other, other_changes = other.observe(number, samples)
        assert (other, other_changes) == (one, changes)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from([0.5, 1.0, 1.5])), max_size=8))
def test_a_restored_compute_watch_continues_the_same(slower):
    watch = ComputeWatch(COSTS)
    for number, (stage, factor) in enumerate(slower):
        times = op_times(compute_step(stage, factor))
        other = written_and_read(watch)
        assert other == watch
        watch, notices = watch.observe(number, times)
        assert other.observe(number, times) == (watch, notices)


def after(paths, link, what):
    """The next state after a change of a link's path, and its result."""
    match what:
        case "fails":
            return paths.record([PathFailure(link)])
        case "begins":
            return paths.restore([link]), None
        case "is used":
            return paths.take_restored({})
        case "begins once more":
            return paths.limit_restores(link, 1)
    return paths.observe({link: True}, LINKS)


whats = st.sampled_from(
    ["fails", "begins", "is used", "begins once more", "is up", "is up", "is up"]
)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(LINKS), whats), max_size=20))
def test_restored_failed_paths_continue_the_same(sequence):
    paths = FailedPaths.begin(LINKS[:1], 2, 8)
    for link, what in sequence:
        other = written_and_read(paths)
        assert other == paths
        paths, *shown = after(paths, link, what)
        assert after(other, link, what) == (paths, *shown)


def test_an_error_names_the_key_and_the_field():
    data = json.loads(dump(FailedPaths.begin(LINKS, 2, 8)))
    data["links"][1][1]["failures"] = "many"
    with pytest.raises(
        ParseError, match=r"^state: links.1-2.failures: got 'many', expected a whole"
    ):
        parse(FailedPaths, data, "state")
    assert parse(Detector, {"directions": []}, "state") == Detector()
