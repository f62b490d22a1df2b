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
