"""Every rank sees what every other writes, or all say the same of it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxmorph.checkpoints import saver
from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.saver import require_shared
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import SoleRank

LIMIT_S = 30


class Meeting(SoleRank):
    """A rank among several threads."""

    def __init__(self, rank, said, barrier):
        self.rank, self.num_ranks, self._said, self._barrier = rank, len(said), said, barrier

    def exchange(self, message, detail=None):
        self._said[self.rank] = message
        self._barrier.wait(LIMIT_S)
        everything = list(self._said)
        self._barrier.wait(LIMIT_S)
        return everything


def outcomes(*folders):
    """What each rank, with its own folder, says."""
    said, barrier = [{} for _ in folders], threading.Barrier(len(folders))

    def ask(rank):
        try:
            require_shared(folders[rank], Meeting(rank, said, barrier))
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(ask, range(len(folders))))


def test_a_shared_folder_is_left_as_it_was(tmp_path):
    assert outcomes(tmp_path, tmp_path, tmp_path) == [""] * 3
    assert not list(tmp_path.iterdir())


def test_a_folder_of_one_ranks_own_is_told_by_all(tmp_path):
    (tmp_path / "own").mkdir()
    one, other, third = outcomes(tmp_path, tmp_path / "own", tmp_path)
    for line, folder in ((one, tmp_path), (other, tmp_path / "own"), (third, tmp_path)):
        assert line == (
            f"checkpoint.dir: {folder}: rank 0 does not see all files: none of rank 1; expected a "
            "folder that all ranks share (checkpoint.every_steps=0 saves nothing)"
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["own"]


def test_a_folder_that_one_rank_cannot_write_to_is_told_by_all(tmp_path):
    one, other = outcomes(tmp_path, tmp_path / "none")
    assert one.startswith(f"checkpoint.dir: {tmp_path}: rank 1 cannot write there: No such file")
    assert "rank 1 cannot write there: No such file" in other
    assert not list(tmp_path.iterdir())


def test_what_a_rank_leaves_that_is_killed_goes_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "_remove", lambda path: None)  # as if it came to no more
    assert outcomes(tmp_path, tmp_path) == ["", ""]
    (tmp_path / ".rank_0_of_mine").touch()
    assert len(list(tmp_path.iterdir())) == 3
    CheckpointFolder(tmp_path).clean()
    assert [path.name for path in tmp_path.iterdir()] == [".rank_0_of_mine"]


def test_a_sole_rank_needs_a_folder_too(tmp_path):
    require_shared(tmp_path, SoleRank())
    with pytest.raises(UserError, match="rank 0 cannot write there"):
        require_shared(tmp_path / "none", SoleRank())
