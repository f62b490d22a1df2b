"""Any changed byte and any missing file of a checkpoint is found and named."""

import errno
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from zlib import crc32

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.checkpoints import checksums
from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, damage_of, seal_of, stage_path
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.config import Config
from jaxmorph.errors import UserError

LAYERS = (range(1), range(1, 3))


def save(folder, step):
    """Saves a checkpoint of two parts, each with files in folders."""
    unfinished = folder.unfinished(step)
    for number in range(len(LAYERS)):
        inner = stage_path(unfinished, number) / "inner"
        inner.mkdir(parents=True)
        (inner / "array").write_bytes(bytes(range(50)) * (step + number))
        (inner.parent / "metadata").write_text(f"{step} {number}")
        (inner.parent / "empty").touch()
        folder.seal_part(step, number)
    folder.commit(Manifest(step, LAYERS, vocab_size=256, tied=(), config=Config()))


@cache
def checkpoint() -> Path:
    folder = CheckpointFolder(Path(mkdtemp(prefix="jaxmorph-test-")))
    save(folder, 7)
    return folder.finished(7)


@pytest.fixture(scope="module", autouse=True)
def _remove_it():
    yield
    shutil.rmtree(checkpoint().parent)


def files(path):
    return sorted(each for each in path.rglob("*") if each.is_file())


def damaged(path, content):
    """The damage found, by content and by length, while a file has another content, or none."""
    was = path.read_bytes()
    try:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        return damage_of(checkpoint(), thorough=True), damage_of(checkpoint(), thorough=False)
    finally:
        path.write_bytes(was)


def test_a_checkpoint_as_it_was_made_is_whole():
    assert damage_of(checkpoint(), thorough=True) is None
    assert len(files(checkpoint())) == 2 * (3 + 1) + 2


@given(st.data())
def test_any_flipped_bit_in_any_file_is_found(data):
    path = data.draw(st.sampled_from([each for each in files(checkpoint()) if each.stat().st_size]))
    was = path.read_bytes()
    at = data.draw(st.integers(0, len(was) - 1))
    flipped = was[at] ^ (1 << data.draw(st.integers(0, 7)))
    found, _ = damaged(path, was[:at] + bytes([flipped]) + was[at + 1 :])
    assert found is not None
    # The seal reports a manifest that has changed.
    assert found.file.name in (path.name, "manifest.seal")


@given(st.data())
def test_a_short_or_missing_file_is_found_by_lengths(data):
    path = data.draw(st.sampled_from(files(checkpoint())))
    was = path.read_bytes()
    length = data.draw(st.one_of(st.none(), st.integers(0, max(0, len(was) - 1))))
    if length == len(was):
        return  # an empty file can't be shorter
    for found in damaged(path, None if length is None else was[:length]):
        assert found is not None
        assert found.file.name in (path.name, "manifest.seal")


def test_damage_names_what_was_got_and_expected():
    path = stage_path(checkpoint(), 1) / "metadata"
    assert path.read_bytes() == b"7 1"
    found, _ = damaged(path, b"7 2")
    got, expected = f"{crc32(b'7 2'):08x}", f"{crc32(b'7 1'):08x}"
    says = f"{path}: got 3 bytes of CRC-32 {got}, expected 3 bytes of CRC-32 {expected}"
    assert str(found) == says
    found, _ = damaged(path, b"7")
    assert str(found) == f"{path}: got 1 bytes, expected 3 bytes"
    found, _ = damaged(path, None)
    assert str(found).startswith(f"{path}: got No such file or directory, expected 3 bytes of CRC")


def test_a_change_in_any_file_of_orbax_is_found(tmp_path):
    folder, layers = CheckpointFolder(tmp_path), (range(1),)
    part = stage_path(folder.unfinished(1), 0)
    folder.unfinished(1).mkdir()
    TreeFiles().write(part, {"params": {"w": jnp.arange(300.0)}})
    folder.seal_part(1, 0)
    folder.commit(Manifest(1, layers, vocab_size=9, tied=(), config=Config()))
    written = [each for each in files(folder.finished(1)) if each.stat().st_size]
    assert len(written) > 3
    for path in written:
        was = path.read_bytes()
        path.write_bytes(was[:-1] + bytes([was[-1] ^ 1]))
        assert damage_of(folder.finished(1), thorough=True) is not None, path
        path.write_bytes(was)
    assert damage_of(folder.finished(1), thorough=True) is None


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (7, 14, 21):
        save(folder, step)
    assert folder.newest_whole() == (21, ())
    (stage_path(folder.finished(21), 0) / "metadata").unlink()
    (folder.finished(14) / "manifest.json").unlink()
    step, found = folder.newest_whole()
    assert step == 7
    assert [each.step for each in found] == [21, 14]
    assert [each.damage.file.name for each in found] == ["metadata", "manifest.json"]


def test_a_checkpoint_set_aside_is_not_counted(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 7)
    save(folder, 14)
    assert folder.set_aside(14) == tmp_path / "step_14.damaged"
    assert folder.steps() == (7,)
    save(folder, 14)
    assert folder.set_aside(14) == tmp_path / "step_14.damaged-2"
    folder.clean()
    save(folder, 14)
    assert folder.newest_whole() == (14, ())
    assert len(list(tmp_path.iterdir())) == 4


def test_a_checkpoint_that_lacks_a_file_is_not_counted(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4):
        save(folder, step)
    (stage_path(folder.finished(3), 0) / "metadata").unlink()
    assert folder.prune(2) == ()
    assert folder.steps() == (2, 3, 4)
    assert folder.newest_whole()[0] == 4


def rewrite(folder, step, change):
    """Changes the manifest, and its seal with it."""
    path = folder.finished(step) / "manifest.json"
    content = json.dumps(json.loads(path.read_bytes()) | change).encode()
    path.write_bytes(content)
    (path.parent / "manifest.seal").write_bytes(seal_of(content))


def test_another_versions_checkpoint_is_not_damaged(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 7)
    rewrite(folder, 7, {"format": 99})
    with pytest.raises(UserError, match=r"step_7/manifest.json: got format 99, expected 3"):
        folder.newest_whole()


def test_a_checkpoint_with_intra_step_auto_is_read(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 7)
    config = folder.manifest(7).to_json()["config"]
    rewrite(folder, 7, {"config": config | {"adaptation": {"intra_step": "auto"}}})
    assert folder.newest_whole() == (7, ())
    assert folder.manifest(7).config == Config()


def test_a_checkpoint_without_checksums_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 7)
    rewrite(folder, 7, {"parts": None})
    _, (found,) = folder.newest_whole()
    assert f"{found.damage}".endswith("got no checksums, expected those of each part")
    (folder.finished(7) / "manifest.seal").unlink()
    _, (found,) = folder.newest_whole()
    assert found.damage.file.name == "manifest.seal"
    assert found.damage.got == "No such file or directory"


def test_each_rank_reads_only_its_share_of_the_parts():
    array = next(path for path in files(checkpoint()) if path.name == "array")
    was = array.read_bytes()
    array.write_bytes(was[:-1] + b"x")
    shares = [slice(rank, None, 2) for rank in range(2)]
    found = [damage_of(checkpoint(), thorough=True, parts=share) for share in shares]
    array.write_bytes(was)
    assert [damage and damage.file for damage in found] == [array, None]


def test_storage_that_fails_for_a_moment_damages_nothing(monkeypatch):
    monkeypatch.setattr(checksums, "_PAUSES_S", (0.0, 0.0))
    path, failures = stage_path(checkpoint(), 1) / "metadata", []
    open_path = Path.open

    def fails_at_first(self, *how, **named):
        if self == path and len(failures) < num_failures:
            failures.append(self)
            raise OSError(errno.EIO, "Input/output error", str(self))
        return open_path(self, *how, **named)

    monkeypatch.setattr(Path, "open", fails_at_first)
    num_failures = 2
    assert damage_of(checkpoint(), thorough=True) is None
    assert len(failures) == 2
    num_failures = 100
    found = damage_of(checkpoint(), thorough=True)
    assert found is not None
    assert (found.file, found.got) == (path, "Input/output error")
