import threading
from itertools import islice

import numpy as np
import pytest

from jaxmorph.data import Batches, Tokens, read_ahead
from jaxmorph.data.batches import pack
from jaxmorph.errors import UserError


def make_batches(num_tokens: int = 97, vocab_size: int = 1000, **changes) -> Batches:
    tokens = Tokens(np.arange(num_tokens, dtype=np.uint16), vocab_size, "some text")
    sizes = {"microbatches": 2, "microbatch_size": 3, "sequence_length": 4, "seed": 5}
    return Batches(tokens, **{**sizes, **changes})


def test_targets_are_the_tokens_after_the_inputs():
    inputs, targets = make_batches().inputs(0), make_batches().targets(0)
    assert inputs.shape == targets.shape == (2, 3, 4)
    assert inputs.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(targets, inputs + 1)


def test_a_step_is_the_same_however_it_is_reached():
    batches, again = make_batches(), make_batches()
    for step in (7, 0, 123_456, 7):
        np.testing.assert_array_equal(batches.inputs(step), again.inputs(step))
        np.testing.assert_array_equal(batches.targets(step), again.targets(step))


def test_microbatch_size_does_not_change_a_steps_data():
    one = make_batches(microbatches=1, microbatch_size=6).inputs(2)
    np.testing.assert_array_equal(make_batches().inputs(2).reshape(1, 6, 4), one)


def test_each_epoch_predicts_all_tokens_in_another_order():
    batches = make_batches(num_tokens=97)  # 24 windows: 4 steps of 6
    epochs = [[batches.targets(epoch * 4 + step) for step in range(4)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(np.ravel(epoch)) == list(range(1, 97))
    assert np.any(np.array(epochs[0]) != np.array(epochs[1]))


def test_seeds_give_different_orders():
    assert np.any(make_batches(seed=1).inputs(0) != make_batches(seed=2).inputs(0))


def test_too_short_a_text_is_refused_with_both_counts():
    make_batches(num_tokens=25)
    with pytest.raises(UserError) as caught:
        make_batches(num_tokens=24)
    assert str(caught.value) == (
        "data.path: some text: got 24 tokens, expected at least 25 for one step "
        "(2 microbatches of 3 sequences of 4 tokens, plus one for the last target)"
    )


def test_windows_are_packed_by_their_separators():
    ids = np.array([[5, 6, 0, 7, 0, 0, 8, 9, 4], [0, 5, 6, 7, 8, 9, 9, 0, 3]], np.uint8)
    packed = pack(ids, separator=0)
    assert packed.segments.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert packed.targets.tolist() == [[6, 0, -1, 0, -1, -1, 9, 4], [-1, 6, 7, 8, 9, 9, 0, -1]]


def test_packed_batches_are_those_without_packing_and_segments():
    plain, packed = make_batches(), make_batches(separator=7)
    assert plain.extras(0) == {}
    for step in range(4):
        inputs, targets, extras = packed.inputs(step), packed.targets(step), packed.extras(step)
        np.testing.assert_array_equal(inputs["tokens"], plain.inputs(step))
        is_end = inputs["tokens"] == 7
        np.testing.assert_array_equal(targets, np.where(is_end, -1, plain.targets(step)))
        # Each window begins a segment, and in those without an end there is no other.
        ends_before = np.cumsum(is_end, -1) - is_end
        np.testing.assert_array_equal(extras["segments"], ends_before)
        arrays = (*inputs.values(), targets, *extras.values())
        assert {(each.shape, each.dtype.name) for each in arrays} == {((2, 3, 4), "int32")}


def test_reading_ahead_raises_the_readers_errors():
    batches = make_batches(vocab_size=96)
    with read_ahead(batches.inputs) as steps, pytest.raises(UserError, match="got token 96, exp"):
        list(islice(steps, 4))


def test_reading_ahead_gives_the_steps_in_order_from_any_step():
    batches = make_batches()
    with read_ahead(batches.targets, first_step=3) as steps:
        for step in range(3, 20):
            np.testing.assert_array_equal(next(steps), batches.targets(step))


def test_reading_ahead_uses_a_thread_until_closed():
    reached, before = threading.Event(), set(threading.enumerate())

    def read(step: int) -> int:
        if step == 1:
            reached.set()
        return step

    with read_ahead(read) as steps:
        assert reached.wait(10)
        assert next(steps) == 0
        readers = set(threading.enumerate()) - before
        assert readers
    for reader in readers:
        reader.join(10)
    assert not readers & set(threading.enumerate())
