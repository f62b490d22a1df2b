"""One process at a time in a run's folders."""

import errno
import sys

import pytest

from jaxmorph.errors import UserError
from jaxmorph.training.resume import hold


def test_a_folder_in_use_is_refused_until_it_is_let_go(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with hold([one, one]):
        in_use = pytest.raises(UserError, match=r"^\S+/one is in use by another run, expected")
        with in_use, hold([other, one]):
            pass
        with hold([other]):
            pass
    with hold([one]):
        pass


def test_a_folder_that_cannot_be_held_is_used_without(tmp_path, monkeypatch):
    with hold([tmp_path / "none"]):
        assert not list(tmp_path.iterdir())

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", no_locks)
        with hold([tmp_path]), hold([tmp_path]):
            pass
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with hold([tmp_path]), hold([tmp_path]):
        pass
