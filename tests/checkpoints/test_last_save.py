"""What a run leaves behind whose last state can't be saved."""

import pytest

from jaxmorph.checkpoints.saver import CheckpointError
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.config import check_config
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.train import train

CONFIG = {
    "run": {"steps": 1},
    "model": {"preset": "tiny", "width": 8, "num_layers": 1, "num_heads": 1},
    "data": {"sequence_length": 4},
    "parallelism": {"stages": 1},
    "batch": {"microbatches": 1, "microbatch_size": 1},
    "checkpoint": {"every_steps": 1},
}


def test_it_fails_once_that_has_been_told_and_nothing_of_it_is_left(tmp_path, monkeypatch):
    def write(files, path, tree):
        path.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(TreeFiles, "write", write)
    monkeypatch.setattr("jaxmorph.train.settle_garbage", lambda: None)  # other tests' it isn't
    (tmp_path / "checkpoints").mkdir()
    told = []
    with pytest.raises(CheckpointError, match="rank 0: No space left on device"):
        train(check_config(CONFIG), SoleRank(), told.append, tmp_path)
    assert [message["record"]["step"] for message in told if message["kind"] == "step"] == [0]
    assert "checkpoint_failed" in [m["event"]["kind"] for m in told if m["kind"] == "event"]
    assert [*(tmp_path / "checkpoints").iterdir()] == []
