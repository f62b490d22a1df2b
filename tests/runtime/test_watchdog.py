"""A rank that makes no progress is ended, by itself or by others, with its stacks in its log."""

import pytest
from processes import is_running

from jaxmorph.runtime.launcher import RankFailedError, run_ranks

# None of these processes imports JAX.
pytestmark = [pytest.mark.usefixtures("ranks_find_modules"), pytest.mark.one_jax]


def run_until_it_stalls(how, tmp_path):
    """Run two ranks, of which rank 1 stalls; the failure, and that rank's log."""
    messages = []
    with pytest.raises(RankFailedError) as raised:
        run_ranks("stalling_rank", [how], 2, tmp_path, messages.append, within_s=60.0)
    assert not any(is_running(message["pid"]) for message in messages)
    return raised.value, (tmp_path / "rank_1.log").read_text()


@pytest.mark.parametrize("how", ["waits", pytest.param("is stopped", marks=pytest.mark.long)])
def test_a_stalled_rank_is_named_with_what_it_waits_for(tmp_path, how):
    failure, log = run_until_it_stalls(how, tmp_path)
    assert failure.reason.startswith("rank 1 failed: stalled: no progress for ")
    assert ", step 7, waits for Godot" in failure.reason
    assert failure.reason.endswith("as by SIGSTOP") == (how == "is stopped")
    (stalled,) = failure.stalled
    assert stalled.startswith("rank 1 stalled: no progress for ")
    assert "in stand_still" in log
    assert log.count("most recent call first") > 1  # of all threads


@pytest.mark.long  # it waits for most of its time
def test_a_rank_that_keeps_the_interpreters_lock_is_ended(tmp_path):
    failure, log = run_until_it_stalls("keeps the lock", tmp_path)
    assert failure.reason.startswith("rank 1 failed: ")
    assert "in stand_still" in log
