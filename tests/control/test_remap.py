import pytest

from jaxmorph.control.remap import (
    SlowPair,
    SumWatch,
    Traffic,
    by_other_stages,
    choose_layout,
    traffic,
)
from jaxmorph.placement import Layout, Placement, Position
from jaxmorph.records import Link

LAYOUT = Layout.first(4, 2)
LINKS = Placement(4).links
SLOW = SlowPair((1, 5), excess_s=2.64, delay_ms=30.0)


def steps_s(delays_ms):
    """A step of 0.4 s, and more for each slow link, most for the last."""
    return 0.4 + sum(delay_ms / 1e3 * (1 + link.lower) for link, delay_ms in delays_ms.items())


def test_a_sum_is_slow_that_takes_longer_twice():
    watch, seen = SumWatch(), []
    for took_s in (0.02, 0.03, 0.5, 0.03, 0.5, 0.5, 0.5):
        both_s = [0.02, took_s]
        watch = watch.after(both_s, 0.4 + took_s, by_others_s=both_s)
        seen.append(watch.slow())
    assert seen[:5] == [{}] * 5
    assert seen[5] == seen[6] == {1: pytest.approx(0.48)}


def test_a_sum_that_is_slow_from_the_start_is_found_by_those_of_other_stages():
    watch, took_s, compares = SumWatch(), (0.5, 0.02, 0.1, 0.0), (True, True, True, True)
    by_others_s = by_other_stages(took_s, (100, 100, 400, 100), compares)
    for _ in range(2):
        watch = watch.after(took_s, 0.9, by_others_s)
    assert by_others_s == (0.02, 0.02, 0.08, 0.02)  # four times the bytes, four times as long
    assert watch.slow() == {0: pytest.approx(0.48)}


def test_a_sum_within_a_host_says_nothing_about_one_between_hosts():
    assert by_other_stages((0.5, 0.02), (100, 100), (True, False)) == (0.5, 0.02)


def test_a_sum_that_is_a_small_share_of_the_step_is_not_slow():
    watch = SumWatch()
    for took_s in (0.001, 0.05, 0.05, 0.05):
        watch = watch.after([took_s], 0.4, by_others_s=[took_s])
    assert watch.slow() == {}


@pytest.mark.parametrize(
    ("layout", "hosts", "expected"),
    [
        (LAYOUT, (1, 5), Traffic(stages=(1,))),
        (LAYOUT, (1, 2), Traffic(links=((0, Link(1, 2)),))),
        (LAYOUT, (1, 6), Traffic()),
        (LAYOUT.swapped(5, 6), (1, 5), Traffic()),
        (LAYOUT.swapped(1, 4), (1, 5), Traffic(links=((1, Link(0, 1)),))),
        (Layout.first(4, 2, ranks_per_host=4), (0, 1), Traffic(stages=(0, 1, 2, 3))),
        (
            Layout.first(4, 2, ranks_per_host=2),
            (0, 1),
            Traffic(links=((0, Link(1, 2)),)),
        ),
    ],
)
def test_hosts_carry_what_their_ranks_exchange(layout, hosts, expected):
    assert traffic(layout, hosts, LINKS) == expected


def test_a_slow_pair_goes_where_nothing_is_sent():
    found = choose_layout(LAYOUT, [SLOW], LINKS, steps_s)
    assert found is not None
    assert traffic(found, (1, 5), LINKS) == Traffic()
    assert found.positions[0] == Position(0, 0)  # it records the run


def test_a_slow_pair_becomes_the_link_of_the_pipeline_that_costs_least():
    """That of first and last stage, for tied gradients, costs even less, but doesn't count."""
    links = Placement(4, num_chunks=2).links

    def with_a_cheap_link(delays_ms):
        return steps_s({link: ms for link, ms in delays_ms.items() if link != Link(0, 3)})

    found = choose_layout(LAYOUT, [SLOW], links, with_a_cheap_link, LINKS)
    assert found is not None
    (link,) = traffic(found, (1, 5), links).links
    assert link[1] == Link(0, 1)
    assert not traffic(found, (1, 5), links).stages


def test_ranks_stay_where_moving_gains_nothing():
    def slower_on_links(delays_ms):
        return 0.4 + 10.0 * bool(delays_ms)

    assert choose_layout(LAYOUT, [SLOW], LINKS, slower_on_links, LINKS) is None
    assert choose_layout(LAYOUT.swapped(5, 6), [SLOW], LINKS, steps_s) is None


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_with_whole_replicas_take_several_swaps(num_hosts):
    """All stages sum over each pair of hosts, so a single swap shortens nothing."""
    layout = Layout.first(4, num_hosts, ranks_per_host=4)
    pair = SlowPair((1, 5), excess_s=2.64, delay_ms=30.0)
    assert traffic(layout, (0, 1), LINKS).stages == (0, 1, 2, 3)
    for pipeline in ((), LINKS):
        found = choose_layout(layout, [pair], LINKS, steps_s, pipeline)
        assert found is not None
        carried = traffic(found, (0, 1), LINKS)
        assert not carried.stages
        assert carried.links or not pipeline
        assert found.positions[0] == Position(0, 0)


def test_no_rank_moves_within_one_host():
    layout = LAYOUT.on_hosts(["a"] * 8)
    assert choose_layout(layout, [SLOW], LINKS, steps_s) is None


def test_pairs_that_were_slow_before_are_avoided_too():
    known = SlowPair((1, 6), excess_s=2.64, delay_ms=30.0)
    found = choose_layout(LAYOUT, [SLOW, known], LINKS, steps_s)
    assert found is not None
    assert traffic(found, (1, 5), LINKS) == traffic(found, (1, 6), LINKS) == Traffic()
