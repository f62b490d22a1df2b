from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.partition import even_cut, partition, stage_times_ms
from jaxmorph.stage.model import cut_layers


def _all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *inner, num_layers)
        yield tuple(end - start for start, end in pairwise(bounds))


@pytest.mark.parametrize(
    ("costs_ms", "first_ms", "last_ms", "stages", "layers"),
    [
        ([1] * 8, 0, 0, 4, (2, 2, 2, 2)),
        ([1] * 5, 0, 0, 4, (1, 2, 1, 1)),
        ([1] * 8, 0, 3, 4, (2, 2, 3, 1)),
        ([1] * 8, 3, 0, 4, (1, 2, 2, 3)),
        ([1] * 12, 1, 4, 4, (3, 4, 4, 1)),
        ([5, 1, 1, 1], 0, 0, 2, (1, 3)),
        ([1, 1, 1, 5], 0, 0, 2, (3, 1)),
        ([0.1] * 6, 0, 0, 3, (2, 2, 2)),
        ([1, 9, 1], 0, 0, 3, (1, 1, 1)),
        ([2, 2], 7, 7, 1, (2,)),
        ([0, 0, 0], 0, 0, 2, (2, 1)),
    ],
)
def test_partition_minimizes_the_slowest_stage(costs_ms, first_ms, last_ms, stages, layers):
    assert partition(costs_ms, first_ms, last_ms, stages) == layers


@given(
    costs_ms=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    first_ms=st.integers(0, 9),
    last_ms=st.integers(0, 9),
    data=st.data(),
)
def test_partition_is_the_best_of_all_cuts(costs_ms, first_ms, last_ms, data):
    stages = data.draw(st.integers(1, len(costs_ms)))
    even = even_cut(len(costs_ms), stages)

    def key(layers):
        times_ms = stage_times_ms(layers, costs_ms, first_ms, last_ms)
        distance = sum(abs(count - usual) for count, usual in zip(layers, even, strict=True))
        return max(times_ms), sum(time * time for time in times_ms), distance, layers

    assert partition(costs_ms, first_ms, last_ms, stages) == min(
        _all_cuts(len(costs_ms), stages), key=key
    )


@pytest.mark.parametrize(("layers", "stages"), [(8, 4), (9, 4), (10, 4), (11, 4), (5, 5), (7, 1)])
def test_the_even_cut_equals_cut_layers(layers, stages):
    assert even_cut(layers, stages) == tuple(map(len, cut_layers(layers, stages)))


@pytest.mark.parametrize("stages", [0, 4])
def test_every_stage_needs_a_layer(stages):
    with pytest.raises(ValueError, match=f"num_stages: got {stages}, expected between 1 and the 3"):
        partition([1, 1, 1], 0, 0, stages)


def test_stage_times_include_the_extras():
    assert stage_times_ms((1, 2), [1, 2, 4], 10, 20) == (11, 26)
