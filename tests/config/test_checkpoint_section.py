import pytest

from jaxmorph.config.checkpoint_section import Checkpoint


@pytest.mark.parametrize(
    ("every_steps", "due"), [(7, [7, 14, 20]), (10, [10, 20]), (None, [20]), (0, [])]
)
def test_the_state_is_saved_at_an_interval_and_at_the_end(every_steps, due):
    section = Checkpoint(every_steps=every_steps)
    assert [step for step in range(1, 21) if section.is_due(step, 20)] == due
