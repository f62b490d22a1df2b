from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.errors import UserError
from jaxmorph.schedule.partition import cut_layers, even_cut, partition, stage_times_ms


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


@pytest.mark.parametrize("stages", [0, 4])
def test_every_stage_needs_a_layer(stages):
    with pytest.raises(ValueError, match=f"num_stages: got {stages}, expected between 1 and the 3"):
        partition([1, 1, 1], 0, 0, stages)


def test_stage_times_include_the_extras():
    assert stage_times_ms((1, 2), [1, 2, 4], 10, 20) == (11, 26)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (22, 4, [5, 6, 6, 5]),
        (9, 4, [2, 3, 2, 2]),
        (38, 8, [4, 5, 5, 5, 5, 5, 5, 4]),
        (3, 3, [1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_even_cut_gives_the_remainder_to_the_middle(num_layers, num_stages, counts):
    ranges = cut_layers(num_layers, num_stages)
    assert [len(r) for r in ranges] == counts
    assert [layer for r in ranges for layer in r] == list(range(num_layers))


def test_counts_may_be_given():
    assert cut_layers(6, 3, [1, 3, 2]) == (range(1), range(1, 4), range(4, 6))


@pytest.mark.parametrize("layers", [[1, 2], [3, 3, 1], [6, 0, 0], [2, 2, 2, 0]])
def test_counts_must_fit(layers):
    with pytest.raises(UserError, match=r"parallelism\.layers: got .*3 positive .* 6 layers"):
        cut_layers(6, 3, layers)


@pytest.mark.parametrize("num_stages", [0, 9])
def test_there_are_at_most_as_many_stages_as_layers(num_stages):
    with pytest.raises(UserError, match=rf"parallelism\.stages: got {num_stages}, .* 8 layers"):
        cut_layers(8, num_stages)


def test_chunks_take_layers_in_pipeline_order():
    counts = [len(part) for part in cut_layers(12, 3, num_chunks=2)]
    assert counts == [2] * 6
    assert cut_layers(7, 2, [1, 2, 3, 1], num_chunks=2)[2] == range(3, 6)


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "says"),
    [
        (3, 3, "got 3 chunks on each of 3 stages, expected at most as many virtual stages in all"),
        (2, 2, "got 2 chunks on each of 2 stages, .* 6 layers to be a multiple of 4, or a list in"),
    ],
)
def test_layers_that_chunks_do_not_divide_are_refused(num_stages, num_chunks, says):
    with pytest.raises(UserError, match=rf"parallelism\.chunks: {says}"):
        cut_layers(6, num_stages, num_chunks=num_chunks)


def test_counts_are_those_of_virtual_stages():
    with pytest.raises(UserError, match=r"4 positive counts \(one per virtual stage\) .* 6 layers"):
        cut_layers(6, 2, [3, 3], num_chunks=2)
