import pytest

from jaxmorph.schedule.costs import Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.slackness import (
    adapted_warmup_forwards,
    initial_warmup_forwards,
    reachable_warmup_forwards,
    required_slackness,
    tolerated_latency_ms,
)

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
NO_CAPS = (64,) * 4


@pytest.mark.parametrize(
    ("latency_ms", "slackness"), [(0.0, 1), (5.0, 2), (10.0, 2), (10.5, 3), (20.0, 3), (30.0, 4)]
)
def test_equation_1_for_equal_ops(latency_ms, slackness):
    assert required_slackness(EQUAL, chain_links([0.0, latency_ms, 0.0])) == (1, slackness, 1)


def test_equation_1_weighs_each_stage_and_both_directions():
    costs = StageCosts((10.0, 4.0), (20.0, 6.0), (1.0, 1.0))
    links = {Link(0, 1): LinkState(3.0, 8.0)}
    assert required_slackness(costs, links) == (5,)  # (10 + 20 + 3 + 8) / (4 + 6), rounded up


def test_equation_1_is_not_pushed_over_by_rounding():
    costs = StageCosts.uniform(2, 0.1, 0.2, 0.1)
    assert required_slackness(costs, chain_links([0.15])) == (2,)


def test_stages_that_take_no_time_ask_for_no_slackness_they_cannot_use():
    free = StageCosts((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0,) * 3)
    assert required_slackness(free)[1] == 0
    assert adapted_warmup_forwards(free, {}, 12, (12,) * 3) == (9, 3, 1)


def test_theorem_1_tolerates_slackness_minus_one_ops():
    assert tolerated_latency_ms(EQUAL, (11, 7, 2, 1)) == (30.0, 40.0, 0.0)


def _alternating(warmup: tuple[int, ...], microbatches: int) -> Schedule:
    """Warm-up forwards, then B and F in turn, then all W: the steady phase of Figure 7."""
    rows = []
    for forwards in warmup:
        row = [f"F{m}" for m in range(forwards)]
        for m in range(microbatches):
            row.append(f"B{m}")
            if m + forwards < microbatches:
                row.append(f"F{m + forwards}")
        rows.append(" ".join([*row, *(f"W{m}" for m in range(microbatches))]))
    return Schedule.from_rows("alternating", rows)


@pytest.mark.parametrize("slackness", [2, 3, 4])
def test_delay_grows_with_the_microbatches_only_beyond_the_threshold_of_theorem_1(slackness):
    costs = StageCosts.uniform(2, 10.0, 10.0, 0.0)
    warmup, microbatches, beyond_ms = (1 + slackness, 1), 120, 40.0
    schedule = _alternating(warmup, microbatches)
    (threshold_ms,) = tolerated_latency_ms(costs, warmup)

    def step_ms(latency_ms: float) -> float:
        return simulate(schedule, costs, chain_links([latency_ms])).makespan_ms

    assert step_ms(threshold_ms) - step_ms(0.0) <= 2 * threshold_ms
    growth_ms = step_ms(threshold_ms + beyond_ms) - step_ms(threshold_ms)
    assert growth_ms == pytest.approx(2 * beyond_ms * microbatches / (slackness + 1), rel=0.05)


@pytest.mark.parametrize(
    ("stages", "max_live", "warmup"),
    [
        (4, 7, (7, 5, 3, 1)),
        (4, 12, (12, 8, 4, 1)),
        (8, 15, (15, 13, 11, 9, 7, 5, 3, 1)),
        (4, 2, (2, 1, 1, 1)),
        (1, 5, (5,)),
    ],
)
def test_algorithm_1_spreads_the_slackness_evenly(stages, max_live, warmup):
    assert initial_warmup_forwards(stages, max_live) == warmup


@pytest.mark.parametrize(
    ("link_ms", "warmup"),
    [
        ([0.0, 0.0, 0.0], (7, 5, 3, 1)),
        ([10.0, 0.0, 0.0], (7, 5, 3, 1)),
        ([20.0, 0.0, 0.0], (8, 5, 3, 1)),
        ([0.0, 0.0, 30.0], (9, 7, 5, 1)),
        ([0.0, 200.0, 0.0], (9, 7, 3, 1)),  # clipped to N - 2S = 4
    ],
)
def test_algorithm_2_widens_the_slackness_of_slow_links(link_ms, warmup):
    assert adapted_warmup_forwards(EQUAL, chain_links(link_ms), 12, NO_CAPS) == warmup


def test_algorithm_2_is_guarded_where_there_are_few_microbatches():
    links = chain_links([50.0, 0.0, 0.0])
    assert adapted_warmup_forwards(EQUAL, links, 8, NO_CAPS) == (4, 3, 2, 1)
    assert adapted_warmup_forwards(EQUAL, links, 2, NO_CAPS) == (2, 2, 2, 1)


def test_warm_ups_stop_at_what_earlier_stages_can_hold():
    assert adapted_warmup_forwards(EQUAL, {}, 12, (12, 4, 12, 12)) == (7, 4, 3, 1)
    assert reachable_warmup_forwards((7, 5, 3, 1), 12, (2, 9, 9, 9)) == (2, 2, 2, 1)
