"""Ranks with chunks keep time with each other around the ring."""

import pytest

from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.check import check
from jaxmorph.program.in_step import lower_in_step
from jaxmorph.program.lowering import lower
from jaxmorph.schedule.builders import interleaved, one_forward_one_backward
from jaxmorph.schedule.costs import Link, LinkState, StageCosts
from jaxmorph.schedule.simulator import simulate


def costs(num_stages):
    return StageCosts.uniform(num_stages, 10, 10, 10)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_chunks", "early_ms", "in_step_ms"),
    [
        (2, 8, 2, 315, 270),
        (4, 8, 2, 290, 290),
        (5, 20, 2, 915, 705),
        (8, 32, 2, 1475, 1140),
        (8, 32, 4, 1457.5, 1090),
    ],
)
def test_a_ring_out_of_step_is_brought_in_step(
    num_stages, num_microbatches, num_chunks, early_ms, in_step_ms
):
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    early = lower(schedule, simulate(schedule, costs(num_stages)))
    chosen = lower_in_step(schedule, costs(num_stages), {}, {})
    check(chosen)
    assert simulate_blocking(early, costs(num_stages)).makespan_ms == pytest.approx(early_ms)
    assert simulate_blocking(chosen, costs(num_stages)).makespan_ms == pytest.approx(in_step_ms)
    assert tuple(tuple(program.ops()) for program in chosen) == schedule.orders


def test_with_one_chunk_and_on_one_rank_nothing_is_delayed():
    for schedule in (one_forward_one_backward(4, 8), interleaved(1, 4, 3)):
        own = costs(schedule.num_stages)
        early = lower(schedule, simulate(schedule, own), num_tied=1)
        assert lower_in_step(schedule, own, {}, {}, num_tied=1) == early


def test_delegated_links_keep_their_own_delays():
    schedule = interleaved(2, 4, 2)
    links = {Link(0, 1): LinkState(30, 30)}
    chosen = lower_in_step(schedule, costs(2), links, {Link(0, 1): "delegated"})
    check(chosen)
    expected = simulate(schedule, costs(2), links).makespan_ms
    assert simulate_blocking(chosen, costs(2), links).makespan_ms == pytest.approx(expected)
