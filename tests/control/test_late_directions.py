"""Links that were late and are in time again: what their ends report, what follows from it."""

import pytest
from verdict_examples import verdict

from jaxmorph.control.late_directions import (
    InTimeAgain,
    LastMessages,
    are_in_time,
    late_directions,
)
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.program.instructions import Payload, Transfer

UP, DOWN = (1, 2), (2, 1)
LATE = {UP: 4.0, DOWN: 4.0}


def messages(*took_ms, direction=UP, payload=Payload.ACTIVATION):
    source, destination = direction
    return [(Transfer(payload, source, destination, at), each) for at, each in enumerate(took_ms)]


def test_a_direction_is_late_by_its_messages_alone():
    others = (
        verdict(*DOWN, 1.0, LinkHealth.RECOVERING),
        verdict(*DOWN, 250.0, path=PathState.FAILED),
    )
    late = late_directions([verdict(*UP, 250.0), *others])
    assert late == {UP: pytest.approx(1.1 + 0.6 * 5.0)}


def test_an_end_reports_messages_that_have_become_much_shorter():
    last = LastMessages()
    assert last.report(messages(0.5, 0.5)) == InTimeAgain()
    assert last.report(messages(*[250.0] * 8)) == InTimeAgain()
    for _ in range(8):  # for as many steps as a plan may take
        assert last.report(messages(*[250.0] * 4, *[0.5] * 5)) == InTimeAgain({UP: 0.5})
    assert last.report(messages(*[0.5] * 9)) == InTimeAgain()


def test_single_messages_and_tied_gradients_show_nothing():
    last = LastMessages()
    last.report(messages(*[250.0] * 8))
    assert last.report(messages(*[250.0] * 7, 0.5)) == InTimeAgain()
    assert last.report(messages(0.1, payload=Payload.TIED)) == InTimeAgain()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({UP: 0.5}, {DOWN: 0.5}, True),
        ({UP: 0.5, DOWN: 90.0}, {UP: 70.0, DOWN: 0.5}, True),  # one end waits longer
        ({UP: 0.5}, {}, False),
        ({UP: 0.5}, {DOWN: 4.1}, False),
    ],
)
def test_all_directions_must_be_in_time(first, second, expected):
    reports = [InTimeAgain(first), InTimeAgain(second), InTimeAgain()]
    assert are_in_time(LATE, reports) is expected


def test_a_plan_for_other_reasons_is_never_dropped():
    assert not are_in_time({}, [InTimeAgain({UP: 0.5})])
