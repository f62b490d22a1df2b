import numpy as np
import pytest

from jaxmorph.gpu_check.folder_store import FolderStore
from jaxmorph.gpu_check.settings import ON_CPU, ON_GPU
from jaxmorph.gpu_check.stage_task import StageTask, batch_of, optimizer_of


def test_a_task_comes_through_a_command_line():
    task = StageTask("delay", True, ON_GPU.parity, num_steps=7, num_sends=3, delay_ms=12.5)
    assert StageTask.parse(task.to_word()) == task


def test_every_process_makes_the_same_batches_and_no_step_has_anothers():
    sizes = ON_GPU.parity
    tokens, targets = batch_of(sizes, 3)
    again, other = batch_of(sizes, 3)[0], batch_of(sizes, 4)[0]
    assert tokens.shape == (4, sizes.microbatch_size, sizes.sequence_length)
    assert np.array_equal(tokens, again)
    assert not np.array_equal(tokens, other)
    assert np.array_equal(tokens[..., 1:], targets[..., :-1])
    assert 0 <= tokens.min() <= tokens.max() < sizes.vocab_size


def test_a_folder_tells_what_was_stored_and_gives_up_in_time(tmp_path):
    store = FolderStore(tmp_path)
    store.key_value_set("jaxmorph/rendezvous", "here")
    assert store.blocking_key_value_get("jaxmorph/rendezvous", 1) == "here"
    with pytest.raises(TimeoutError, match="nobody has set other within"):
        store.blocking_key_value_get("other", 20)


def test_a_wide_model_takes_smaller_steps_lest_rounding_grows_from_one_to_the_next():
    rates = [optimizer_of(settings.parity).learning_rate for settings in (ON_CPU, ON_GPU)]
    assert rates == pytest.approx([1e-2, 1.77e-3], rel=1e-2)
