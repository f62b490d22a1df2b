"""Whether a run can resume, known before anything is started."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from written_run import CONFIG, write_run

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import stage_path
from jaxmorph.config import Config, load_config
from jaxmorph.data.tokens import DataDigest
from jaxmorph.errors import UserError
from jaxmorph.report.terminal import Reporter
from jaxmorph.training import resume, saved_model
from jaxmorph.training.resume import (
    RunStart,
    check_data,
    check_vocabulary,
    checkpoint_folder,
    find_resumption,
    find_resumption_here,
    hold,
    kept_cut,
    prepare_checkpoints,
    require_no_checkpoints,
    saved_run,
    set_aside,
    start_of_script,
    try_named_folder,
    with_absolute_folder,
    without_weights,
)
from jaxmorph.training.run_checkpoints import RunCheckpoints, TrainedOn
from jaxmorph.training.saved_model import load_saved_model


def test_a_run_resumes_with_its_overrides(tmp_path):
    run = write_run(tmp_path, [7, 14])
    (checkpoint_folder(Config(), run).path / "step_16.unfinished").mkdir()
    found, _ = find_resumption(run, ["run.steps=30", "optimizer.learning_rate=1e-4"])
    assert found.first_step == 14
    assert found.config.run.steps == 30
    assert found.config.optimizer.learning_rate == 1e-4
    assert found.config.model.options == {"width": 32, "num_layers": 4}
    assert without_weights(found.config).model.weights is None
    assert without_weights(found.config).model.options == found.config.model.options


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.steps=13", "got 13, expected at least the 14 steps that the last checkpoint has"),
        ("run.dir=runs/other", "got runs/other, expected none: a resumed run continues in its"),
        ("model.width=64", "got 64, expected 32, that of the checkpoint's model"),
        ("model.num_heads=2", "got 2, expected no value: it is not set in the checkpoint's model"),
        ("model.preset=small", "got small, expected tiny, that of the checkpoint's model"),
        ("data.held_out_fraction=0.1", "got 0.1, expected 0: held-out text must stay held out"),
        ("checkpoint.dir=/other", "got /other, expected none: a run's checkpoints stay in one"),
        ("data.sequence_length=64", "got 64, expected 128, that of the checkpoint's model"),
    ],
)
def test_a_refused_override_is_named(tmp_path, override, says):
    run = write_run(tmp_path, [7, 14])
    with pytest.raises(UserError) as error:
        find_resumption(run, [override])
    assert str(error.value).startswith(f"{override} (command line): {says}")


def test_the_last_steps_checkpoint_ends_a_run(tmp_path):
    run = write_run(tmp_path, [7, 14])
    assert find_resumption(run, ["run.steps=14"])[0].is_done
    assert not find_resumption(run, [])[0].is_done
    corrupt(run, 14)
    assert not find_resumption(run, ["run.steps=14"])[0].is_done


def test_a_script_may_exceed_run_steps(tmp_path):
    config = Config.model_validate(CONFIG | {"run": {"dir": str(tmp_path), "steps": 20}})
    run = write_run(tmp_path, [150], config)
    start = start_of_script(config, resume=True)
    assert (start.first_step, start.directory) == (150, run)


def test_a_script_resumes_where_its_directory_is_now(tmp_path, monkeypatch):
    run = write_run(tmp_path / "x-2", [7], CONFIG | {"run": {"dir": "runs/x"}})
    monkeypatch.chdir(tmp_path)
    for spelled in (str(run), "x-2"):
        config = Config.model_validate(CONFIG | {"run": {"dir": spelled}})
        start = start_of_script(config, resume=True)
        assert (start.first_step, start.directory) == (7, Path(spelled))


def test_a_scripts_run_is_refused_as_such(tmp_path):
    run = write_run(tmp_path, [150], vocab_size=0)  # more steps than its configuration has
    by_script = f"{run}: got a script's run, whose model only the script knows"
    for find in (
        lambda: find_resumption(run, []),
        lambda: find_here(here(run)),
        lambda: load_saved_model(run),
    ):
        with pytest.raises(UserError, match=f"^{by_script}"):
            find()


def test_own_data_need_no_vocabulary(tmp_path, monkeypatch):
    own = CONFIG | {"data": {"factory": "my_data"}}
    run = write_run(tmp_path, [7], own, vocab_size=0)
    found, manifest = find_resumption(run, [])
    assert found.first_step == 7
    check_vocabulary(manifest, 0)
    monkeypatch.setattr(saved_model, "TreeFiles", lambda: SimpleNamespace(read=lambda *_: [{}]))
    monkeypatch.setattr(saved_model, "PARAMS", 0)
    monkeypatch.setattr(saved_model, "build_model", lambda config, vocab_size: vocab_size)
    assert load_saved_model(run).model == 0


def here(directory, **sections):
    """A configuration of a run in a directory."""
    return Config.model_validate(CONFIG | {"run": {"dir": str(directory), "steps": 20}} | sections)


def find_here(config):
    return find_resumption_here(config, Path("run.yaml"), [])


def test_a_run_is_found_where_its_configuration_says(tmp_path):
    run = write_run(tmp_path / "run", [7, 14])  # whose own configuration names another directory
    resumption = find_here(here(run, optimizer={"learning_rate": 1e-4}))
    assert resumption is not None
    found, _ = resumption
    assert (found.first_step, found.is_done) == (14, False)
    assert found.config.optimizer.learning_rate == 1e-4
    with pytest.raises(UserError, match=r"^run.yaml: model.width: got 64, expected 32, that "):
        find_here(here(run, model={"width": 64, "num_layers": 4}))
    for step in (7, 14):
        corrupt(run, step)
    with pytest.raises(UserError, match="got no whole checkpoint in "):
        find_here(here(run))  # it doesn't begin again
    shutil.rmtree(run / "checkpoints")
    assert find_here(here(run)) is None
    assert find_here(here(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("before", ["nothing", "a volume's files", "an attempt that failed"])
def test_a_run_without_a_checkpoint_begins_in_its_directory(tmp_path, before):
    directory = tmp_path / "run"
    if before == "a volume's files":
        (directory / "lost+found").mkdir(parents=True)
    if before == "an attempt that failed":
        write_run(directory, [])
        (directory / "metrics.jsonl").write_text('{"step": 0')
    with RunStart(here(directory), directory=directory).open_record(Reporter()) as record:
        assert record.directory == directory
        assert (directory / "metrics.jsonl").read_text() == ""
    assert load_config(directory / "config.yaml").run.steps == 20
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_options_that_keep_the_model_may_change(tmp_path):
    run = write_run(tmp_path, [7])
    overrides = ["model.weights=null", "parallelism.layers=auto", "checkpoint.every_steps=3"]
    overrides += ["model.attention=xla", "model.dropout=0.1"]
    assert find_resumption(run, overrides)[0].first_step == 7


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("parallelism.layers=auto", (range(1), range(1, 4))),
        ("parallelism={stages: 4, layers: auto}", None),
        ("parallelism={stages: 1, chunks: 1}", None),
        ("parallelism={stages: 2, layers: even}", None),
        ("parallelism.layers=[2,2]", None),
    ],
)
def test_an_automatic_cut_stays_and_another_may_be_set(tmp_path, override, kept):
    found, manifest = find_resumption(write_run(tmp_path, [7]), [override])
    assert kept_cut(found.config, manifest) == kept


def corrupt(run, step):
    part = stage_path(checkpoint_folder(Config(), run).finished(step), 1) / "array"
    part.write_text(f"{step + 1} 1")
    return part


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
    run = write_run(tmp_path, [7, 14, 18])
    path = corrupt(run, 18)
    assert find_resumption(run, [], thorough=False)[0].first_step == 18
    found, _ = find_resumption(run, [])
    assert found.first_step == 14
    events = []
    record: Any = SimpleNamespace(write_event=lambda *event: events.append(event))
    set_aside(found.config, run, found.passed_over, record, 14)
    ((step, kind, line),) = events
    assert (step, kind) == (14, "checkpoint_damaged")
    aside = tmp_path / "checkpoints" / "step_18.damaged"
    assert line.startswith(f"passed over, and now {aside}: {path}: got 4 bytes of CRC-32 ")
    assert aside.is_dir()
    assert find_resumption(run, [])[0].passed_over == ()


def test_without_a_whole_checkpoint_all_damage_is_listed(tmp_path):
    run = write_run(tmp_path, [7, 14])
    paths = [corrupt(run, step) for step in (14, 7)]
    with pytest.raises(UserError) as error:
        find_resumption(run, [])
    assert str(error.value).startswith(f"--resume: got no whole checkpoint in {tmp_path}")
    for path in paths:
        assert f"{path}: got " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_run_differs_from_a_missing_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"^--resume: got \S+/none, expected a run's directory, w"):
        find_resumption(tmp_path / "none", [])
    run = write_run(tmp_path, [])
    (tmp_path / "checkpoints" / "step_7.unfinished").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^--resume: got no checkpoint in \S+/checkpoints, expect"):
        find_resumption(run, [])


def test_another_vocabulary_is_refused(tmp_path):
    _, manifest = find_resumption(write_run(tmp_path, [7]), [])
    check_vocabulary(manifest, 256)
    with pytest.raises(UserError, match=r"^data.vocab_size: got 300, expected 256"):
        check_vocabulary(manifest, 300)


def test_checkpoints_may_be_elsewhere_but_not_among_another_runs(tmp_path):
    elsewhere = CONFIG | {"checkpoint": {"dir": str(tmp_path / "elsewhere")}}
    config = Config.model_validate(elsewhere)
    require_no_checkpoints(config)
    run = write_run(tmp_path / "run", [7], elsewhere)
    assert CheckpointFolder(tmp_path / "elsewhere").steps() == (7,)
    assert find_resumption(run, [])[0].first_step == 7
    with pytest.raises(UserError, match=r"^checkpoint.dir: got \S+, which has another run's"):
        require_no_checkpoints(config)


def test_unfinished_checkpoints_are_removed(tmp_path):
    run = write_run(tmp_path / "run", [7])
    folder = checkpoint_folder(Config(), run)
    folder.unfinished(9).mkdir()
    prepare_checkpoints(Config(), run)
    assert [path.name for path in folder.path.iterdir()] == ["step_7"]


def named_folder(folder, **sections):
    return Config.model_validate({"checkpoint": {"dir": str(folder)}, **sections})


@pytest.mark.parametrize("make", [try_named_folder, lambda own: prepare_checkpoints(own, Path())])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, make):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match=r"^checkpoint.dir: \S+/file/in: cannot be made: Not a dir"):
        make(named_folder(tmp_path / "file" / "in"))


def test_changed_data_are_refused(tmp_path):
    found, manifest = find_resumption(write_run(tmp_path, [7]), [])
    check_data(manifest, found.config, DataDigest(9, "ab"))
    for changed in (DataDigest(10, "ab"), DataDigest(9, "cd")):
        with pytest.raises(UserError, match=r"^data.path: got \d+ tokens, expected the 9 that the"):
            check_data(manifest, found.config, changed)
    other, manifest = find_resumption(tmp_path, ["data.path=other.txt"])
    check_data(manifest, other.config, DataDigest(10, "cd"))


def test_a_named_folder_is_the_same_from_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_folder(Config.model_validate(CONFIG | {"checkpoint": {"dir": "saved"}}))
    run = write_run(tmp_path / "run", [7], config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_resumption(run, [])[0].first_step == 7
    assert find_resumption(run, ["checkpoint.dir=../saved"])[0].first_step == 7
    with pytest.raises(UserError, match=r"got \S+/elsewhere/saved, expected \S+/saved: a run's"):
        find_resumption(run, ["checkpoint.dir=saved"])


def test_a_named_folder_outside_the_run_is_made(tmp_path):
    prepare_checkpoints(Config.model_validate({"checkpoint": {"every_steps": 0}}), tmp_path)
    try_named_folder(named_folder(tmp_path / "run" / "saved", run={"dir": f"{tmp_path}/run"}))
    assert not list(tmp_path.iterdir())
    try_named_folder(named_folder(tmp_path / "saved", run={"dir": f"{tmp_path}/run"}))
    assert not list((tmp_path / "saved").iterdir())


def test_a_read_only_folder_is_refused(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "TemporaryFile", full)
    with pytest.raises(
        UserError, match=r"^checkpoint.dir: \S+/saved: cannot be written to: No spa"
    ):
        try_named_folder(named_folder(tmp_path / "saved"))


def test_a_held_folder_is_refused_until_released(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with hold([one, one]):
        in_use = pytest.raises(UserError, match=r"^\S+/one: in use by another run, expected")
        with in_use, hold([other, one]):
            pass
        with hold([other]):
            pass
    with hold([one]):
        pass


def test_a_folder_without_locks_is_used(tmp_path, monkeypatch):
    with hold([tmp_path / "none"]):
        assert not list(tmp_path.iterdir())

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", no_locks)
        with hold([tmp_path]), hold([tmp_path]):
            pass


def edit_config(run, before, after):
    path = run / "config.yaml"
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"run:", b"rwn:"), (b"steps: 20", b"steps: 2\xb0"), (b"model:", b"\x00odel:")],
)
def test_an_unreadable_configuration_is_the_checkpoints(tmp_path, before, after):
    run = write_run(tmp_path, [7, 14])
    config = find_resumption(run, ["run.steps=30"])[0].config
    edit_config(run, before, after)
    found, _ = find_resumption(run, ["run.steps=30"])
    assert (found.first_step, found.config) == (14, config)
    assert found.damage.startswith(f"{run}/config.yaml: ")
    assert found.damage.endswith("; that of the checkpoint is used")
    assert saved_run(run).folder.steps() == (7, 14)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (b"width: 32", b"width: 33", "model.width: got 33; that of the checkpoint is used, 32"),
        (b"width: 32", b"wadth: 32", "model.wadth: got 32; that of the checkpoint is used, none; "
         "config.yaml: model.width: got none; that of the checkpoint is used, 32"),
        (b"steps: 20", b"steps: 10", "run.steps: got 10; that of the checkpoint is used, 20"),
        (b"held_out_fraction: 0.0", b"held_out_fraction: 0.4",
         "data.held_out_fraction: got 0.4; that of the checkpoint is used, 0.0"),
        (b"dir: null", b"dir: nunl", "checkpoint.dir: got {0}/nunl, which has no checkpoint; "
         "those of {0}/checkpoints are used"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_the_checkpoints(tmp_path, monkeypatch, before, after, says):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path, [7, 14])
    config = find_resumption(run, [])[0].config
    edit_config(run, before, after)
    found, _ = find_resumption(run, [])
    assert (found.first_step, found.config) == (14, config)
    assert found.damage == f"config.yaml: {says.format(tmp_path)}"


@pytest.mark.parametrize("section", [b"run:", b"rwn:"])
def test_moved_checkpoints_stay_where_they_are(tmp_path, section):
    run = write_run(tmp_path / "run", [7], CONFIG | {"checkpoint": {"dir": f"{tmp_path}/named"}})
    shutil.move(tmp_path / "named", run / "checkpoints")
    edit_config(run, b"run:", section)
    found, _ = find_resumption(run, [])
    assert checkpoint_folder(found.config, run).path == run / "checkpoints"


def test_a_script_resumes_whatever_its_directory_says(tmp_path):
    config = Config.model_validate(CONFIG | {"run": {"dir": str(tmp_path), "steps": 20}})
    run = write_run(tmp_path, [7], config)
    for before, after in ((b"dir: null", b"dir: nunl"), (b"steps", b"stops")):
        edit_config(run, before, after)
        start = start_of_script(config, resume=True)
        assert (start.first_step, start.directory, bool(start.damage)) == (7, run, True)


def test_fewer_steps_have_as_short_a_warm_up(tmp_path):
    config = Config.model_validate(
        CONFIG | {"run": {"steps": 600}, "optimizer": {"warmup_steps": 60}}
    )
    run = write_run(tmp_path, [7], config)
    fewer = find_resumption(run, ["run.steps=45"])[0].config
    assert (fewer.run.steps, fewer.optimizer.warmup_steps) == (45, 4)
    kept = find_resumption(run, ["run.steps=300"])[0].config
    assert kept.optimizer.warmup_steps == 60
    with pytest.raises(UserError, match=r"^\S+ \(command line\): got 50, expected at most run.st"):
        find_resumption(run, ["run.steps=45", "optimizer.warmup_steps=50"])


def test_a_resumption_names_what_has_changed(tmp_path):
    run = write_run(tmp_path, [7])
    overrides = ["run.steps=30", "data.path=other.bin", "batch.microbatches=3"]
    config, layers = find_resumption(run, overrides)[0].config, (range(1), range(1, 4))
    origin = RunCheckpoints(config, run, 7).origin(layers, TrainedOn(256, DataDigest(10, "cd")))
    before = Config().batch.microbatches
    assert origin.endswith(
        f'by its checksums; changed: run.steps 30 (was 20), data.path "other.bin" (was null), '
        f"batch.microbatches 3 (was {before}); other data: 10 tokens (was 9)"
    )
    same = RunCheckpoints(find_resumption(run, [])[0].config, run, 7)
    assert same.origin(layers, TrainedOn(256, DataDigest(9, "ab"))).endswith("by its checksums")
