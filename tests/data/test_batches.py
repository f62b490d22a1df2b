import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest

from jaxmorph.data import Batches, ReadAhead, Tokens
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


def test_reading_ahead_raises_the_readers_errors():
    batches = make_batches(vocab_size=96)
    with ReadAhead(batches.inputs) as steps, pytest.raises(UserError, match="got token 96, exp"):
        list(islice(steps, 4))


def test_reading_ahead_gives_the_steps_in_order_from_any_step():
    batches = make_batches()
    with ReadAhead(batches.targets, first_step=3) as steps:
        for step in range(3, 20):
            np.testing.assert_array_equal(next(steps), batches.targets(step))


def test_reading_ahead_uses_a_thread_until_closed():
    reached, before = threading.Event(), set(threading.enumerate())

    def read(step: int) -> int:
        if step == 1:
            reached.set()
        return step

    steps = ReadAhead(read)
    assert reached.wait(10)
    assert next(steps) == 0
    readers = set(threading.enumerate()) - before
    assert readers
    steps.close()
    steps.close()
    for reader in readers:
        reader.join(10)
    assert not readers & set(threading.enumerate())


def test_loading_data_imports_no_jax():
    program = "import sys, jaxmorph.data, jaxmorph.config, jaxmorph.report; " \
        "jaxmorph.data.load_tokens(None); print('jax' in sys.modules)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"
