"""A checkpoint is whole or does not exist, whatever is written, killed or removed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder, require_plain
from jaxmorph.checkpoints.manifest import Manifest, seal_of, stage_path
from jaxmorph.config import Config
from jaxmorph.errors import UserError

LAYERS = (range(1), range(1, 3))


def manifest(step):
    config = Config.model_validate({"run": {"seed": 7}, "model": {"width": 32}})
    return Manifest(step, LAYERS, vocab_size=256, tied=((("token",), ("token",)),), config=config)


def write_parts(folder, step, numbers=(0, 1)):
    for number in numbers:
        part = stage_path(folder.unfinished(step), number)
        part.mkdir(parents=True)
        (part / "array").write_text(str(step))
        folder.seal_part(step, number)


def commit(folder, *steps):
    for step in steps:
        write_parts(folder, step)
        folder.commit(manifest(step))


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_no_folder_has_no_checkpoints(tmp_path):
    folder = CheckpointFolder(tmp_path / "none")
    folder.clean()
    assert folder.steps() == folder.commit_written(9) == ()


def test_nothing_is_a_checkpoint_before_its_commit(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write_parts(folder, 7)
    assert folder.steps() == ()
    folder.commit(manifest(7))
    assert folder.steps() == (7,)
    assert names(folder) == ["step_7"]
    assert (stage_path(folder.finished(7), 1) / "array").read_text() == "7"


def test_replicas_that_divide_the_optimizer_have_parts_of_their_own(tmp_path):
    folder = CheckpointFolder(tmp_path)
    sections = {"parallelism": {"data": 2}, "optimizer": {"shard": "data"}}
    divided = replace(manifest(7), config=Config.model_validate(sections))
    folder.begin(divided)
    write_parts(folder, 7)
    assert folder.commit_written(9) == ()
    for number in range(2):
        part = stage_path(folder.unfinished(7), number, 1)
        part.mkdir()
        (part / "array").write_text(f"share {number}")
        folder.seal_part(7, number, 1)
    assert folder.commit_written(9) == (7,)
    assert folder.newest_whole() == (7, ())
    (stage_path(folder.finished(7), 1, 1) / "array").write_text("share 2")
    step, (damaged,) = folder.newest_whole()
    assert (step, damaged.damage.file.parent.name) == (None, "virtual_stage_1_replica_1")


def test_parts_written_by_all_ranks_are_committed_later(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (7, 8):
        folder.begin(manifest(step))
        write_parts(folder, step)
    assert folder.steps() == ()
    assert folder.commit_written(7) == (7,)  # the eighth step's records were lost
    assert folder.steps() == (7,)
    assert folder.manifest(7).vocab_size == 256
    assert folder.newest_whole() == (7, ())
    assert sorted(path.name for path in folder.finished(7).iterdir()) == [
        "manifest.json", "manifest.seal", "virtual_stage_0", "virtual_stage_0.files",
        "virtual_stage_1", "virtual_stage_1.files",
    ]  # fmt: skip
    assert folder.commit_written(8) == (8,)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("manifest.draft", Path.unlink),
        ("manifest.draft", cut_short),
        ("manifest.draft", lambda path: path.write_text(path.read_text().replace("256", "257"))),
        ("virtual_stage_1.files", Path.unlink),
        ("virtual_stage_1.files", cut_short),
        ("virtual_stage_1/array", lambda path: path.write_text("8")),
        ("../step_7", lambda path: (path / "of_another").mkdir(parents=True)),
    ],
)
def test_a_partly_written_checkpoint_is_never_committed(tmp_path, name, harm):
    folder = CheckpointFolder(tmp_path)
    folder.begin(manifest(7))
    write_parts(folder, 7)
    harm(folder.unfinished(7) / name)
    assert folder.commit_written(7) == ()
    assert folder.unfinished(7).is_dir()


def test_a_checkpoint_with_a_part_missing_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write_parts(folder, 7, numbers=(0,))
    with pytest.raises(FileNotFoundError, match=r"virtual_stage_1 isn't here: do all ranks share"):
        folder.commit(manifest(7))
    assert folder.steps() == ()


def test_the_manifest_reads_back_with_position_and_seed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 7)
    read = folder.manifest(7)
    assert replace(read, parts=None) == manifest(7)
    assert read.parts is not None
    assert len(read.parts) == 2
    content = json.loads((folder.finished(7) / "manifest.json").read_text())
    assert (content["step"], content["data_position"], content["random_seed"]) == (7, 7, 7)
    assert content["layers"] == [[0, 1], [1, 3]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "got no manifest of a checkpoint"),
        ('{"format": 3}', "got no manifest of a checkpoint: KeyError('step')"),
        ('{"format": 99}', "got format 99, expected 3"),
    ],
)
def test_a_wrong_manifest_is_one_line(tmp_path, text, says):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 7)
    path = folder.finished(7) / "manifest.json"
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"manifest.json: got other content than manifest.seal is of"
    ):
        folder.manifest(7)
    path.with_suffix(".seal").write_bytes(seal_of(text.encode()))
    with pytest.raises(UserError) as error:
        folder.manifest(7)
    assert says in str(error.value)
    assert "step_7/manifest.json: " in str(error.value)
    assert "\n" not in str(error.value)


def test_pruning_orders_steps_as_numbers(tmp_path):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 2, 10, 9)
    folder.prune(2)
    assert folder.steps() == (9, 10)
    assert names(folder) == ["step_10", "step_9"]


def test_what_a_failing_storage_kept_goes_with_the_next_pruning(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write_parts(folder, 8)  # failed, and could not be removed either
    (tmp_path / "step_5.removed").mkdir()
    commit(folder, 9)
    write_parts(folder, 10)  # other ranks have begun the next one
    assert folder.prune(2) == ()
    assert names(folder) == ["step_10.unfinished", "step_9"]


def test_only_unfinished_and_removed_folders_are_cleaned(tmp_path):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 7)
    write_parts(folder, 14)
    (tmp_path / "step_3.removed").mkdir()
    (tmp_path / "step_notes").mkdir()
    folder.clean()
    assert names(folder) == ["step_7", "step_notes"]


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path, monkeypatch):
    def refuse(folder):
        raise OSError("Invalid argument")

    monkeypatch.setattr("jaxmorph.checkpoints.folder.sync_folder", refuse)
    monkeypatch.setattr("jaxmorph.checkpoints.checksums.sync_folder", refuse)
    folder = CheckpointFolder(tmp_path)
    commit(folder, 7)
    assert folder.steps() == (7,)


def test_a_half_removed_checkpoint_is_none(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 1, 2)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)  # as if killed there
    folder.prune(1)
    assert folder.steps() == (2,)


@pytest.mark.parametrize("name", ["a[1]", "what?", "a*", "back\\slash"])
def test_a_path_that_reads_as_a_pattern_is_refused(tmp_path, name):
    (tmp_path / "link").symlink_to(tmp_path / name)
    for path in (tmp_path / name / "run", tmp_path / "link"):
        with pytest.raises(
            UserError, match=r"^run.dir: got \S+, expected a path without [*?\\\[]: no"
        ):
            require_plain(path, "run.dir")
    require_plain(tmp_path / "a{1},~ #%&()'é", "run.dir")
