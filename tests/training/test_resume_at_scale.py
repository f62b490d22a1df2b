"""847 GB of checkpoint over 64 ranks, on storage that is simulated."""

import pytest

from benchmarks.resume_at_scale import Setting, bars, measure


@pytest.mark.long
def test_a_large_checkpoint_is_read_by_all_ranks_together(tmp_path):
    measured = measure(tmp_path, Setting(ranks=64))
    assert measured[0] > 840e9
    assert [str(bar) for bar in bars(*measured) if not bar.holds] == []
