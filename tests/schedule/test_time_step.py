import math

import pytest

from jaxmorph.schedule.costs import Link, LinkState
from jaxmorph.schedule.time_step import in_whole_steps, links_in_whole_steps


@pytest.mark.parametrize(
    ("value_ms", "step_ms", "rounded_ms"),
    [(0.0, 0.5, 0.0), (1.0, 0.5, 1.0), (1.01, 0.5, 1.5), (0.2, 0.5, 0.5), (7.0, 3.0, 9.0)],
)
def test_times_round_up_to_whole_steps(value_ms, step_ms, rounded_ms):
    assert in_whole_steps(value_ms, step_ms) == rounded_ms


@pytest.mark.parametrize("value_ms", [0.3, 0.7, 1.1, 2.9])
def test_whole_steps_stay_what_they_are_when_floating_point_divides_them_unevenly(value_ms):
    assert in_whole_steps(value_ms, 0.1) == value_ms


@pytest.mark.parametrize("step_ms", [0.0, -1.0, math.nan, math.inf])
def test_a_step_that_is_no_length_of_time_is_named(step_ms):
    with pytest.raises(ValueError, match=r"time_step_ms: got (0.0|-1.0|nan|inf), expected"):
        in_whole_steps(1.0, step_ms)


def test_all_of_a_links_state_is_rounded():
    links = {Link(0, 1): LinkState(0.1, 0.6, 1.1, 1.5)}
    assert links_in_whole_steps(links, 0.5) == {Link(0, 1): LinkState(0.5, 1.0, 1.5, 1.5)}
