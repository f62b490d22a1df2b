"""`jaxmorph train` around the ranks: their logs, and how a cluster's rank ends."""

import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from written_run import write_run

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.config import check_config
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.progress import Stall, StalledError
from jaxmorph.runtime.rendezvous import RendezvousError, SoleRank
from jaxmorph.training import job, start, start_lines
from jaxmorph.training.job import TRY_AGAIN, _exit_code
from jaxmorph.training.resume import RunStart, checkpoint_folder
from jaxmorph.training.run import fail_together
from jaxmorph.training.start import _log_folder
from jaxmorph.training.start_lines import StartLines


def test_each_launch_has_its_own_logs(tmp_path):
    names = []
    for first_step in (0, 0, 6, 6, 0):
        folder = _log_folder(tmp_path, first_step)
        folder.mkdir(parents=True)
        names.append(str(folder.relative_to(tmp_path)))
    assert names == [
        "logs", "logs/from_step_0", "logs/from_step_6", "logs/from_step_6-2",
        "logs/from_step_0-2",
    ]  # fmt: skip


def test_a_restart_commits_written_checkpoints(tmp_path):
    config = check_config({"checkpoint": {"every_steps": 4}, "model": {"num_layers": 2}})
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (4, 8):
        folder.begin(Manifest(step, (range(2),), 256, (), config))
        part = stage_path(folder.unfinished(step), 0)
        part.mkdir()
        (part / "array").write_text(f"{step}")
        folder.seal_part(step, 0)
    record: Any = SimpleNamespace(num_recorded=7, start_lines=StartLines(print))
    assert start._last_whole(config, tmp_path, record) == 4
    record.num_recorded = 8
    assert start._last_whole(config, tmp_path, record) == 8


@pytest.mark.parametrize(
    ("saved", "policy", "error", "code"),
    [
        ([4, 8], {}, RuntimeError("gloo"), TRY_AGAIN),
        ([4, 8], {"max_restarts": 0}, RuntimeError("gloo"), 1),
        ([], {}, RuntimeError("gloo"), 1),
        ([], {"from_start": True}, RuntimeError("gloo"), 1),
        ([8, 10], {}, RuntimeError("after the last step"), 1),
        ([4], {}, UserError("data.path: nothing there"), 2),
        ([4], {}, KeyboardInterrupt(), 130),
        ([], {}, StalledError(Stall(65.0, "step 5")), TRY_AGAIN),
    ],
)
def test_exit_codes_say_whether_to_retry(tmp_path, monkeypatch, saved, policy, error, code):
    def newest_whole(folder, *, thorough):
        assert folder.path == tmp_path / "checkpoints"
        return max(saved, default=None), ()

    monkeypatch.setattr(CheckpointFolder, "newest_whole", newest_whole)
    config = check_config({"run": {"steps": 10}, "restart_policy": policy})
    assert _exit_code(config, [tmp_path], error) == code


@pytest.fixture
def in_a_job(monkeypatch):
    """Makes this process the one task of a job; it trains nothing."""
    trained = []

    def train(run, *_):
        trained.append(run.first_step)
        return True, run.directory

    monkeypatch.setattr(start, "started_by_cluster", lambda: True)
    monkeypatch.setattr(job, "watch_over", lambda report: None)
    monkeypatch.setattr(job, "join_cluster", lambda *_: SoleRank())
    monkeypatch.setattr(job, "_train_as_rank", train)
    return trained


def test_a_job_whose_run_is_done_verifies_it_together(tmp_path, in_a_job, monkeypatch, capsys):
    """No task reads the whole checkpoint by itself, and all learn when it is damaged."""
    tree = {"run": {"dir": str(tmp_path), "steps": 8}, "model": {"num_layers": 2}}
    config = check_config({**tree, "parallelism": {"stages": 1}})
    folder = checkpoint_folder(config, write_run(tmp_path, [4, 8], config, (range(2),)))
    looked, read = [], CheckpointFolder.newest_whole

    def newest_whole(self, *, thorough=True, before=None):
        looked.append(thorough)
        return read(self, thorough=thorough, before=before)

    monkeypatch.setattr(CheckpointFolder, "newest_whole", newest_whole)
    assert start.resume_training(tmp_path, []) == (
        f"{tmp_path} has done its 8 steps: nothing is left to do (run.steps=N continues to step N)"
    )
    (folder.finished(8) / "virtual_stage_0" / "array").write_text("8 1")
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as ended:  # there are steps to train, on other data
        start.resume_training(tmp_path, [])
    assert ended.value.code == 2
    assert "the data have changed" in capsys.readouterr().err
    assert in_a_job == []
    monkeypatch.setattr(start, "check_data", lambda *_: None)
    assert start.resume_training(tmp_path, []) == ""
    assert in_a_job == [4]
    assert not any(looked)
    with pytest.raises(UserError, match="--launch: got 'nowhere'"):
        start.resume_training(tmp_path, [], "nowhere")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_fail_alike_where_records_cannot_be_written(rank):
    """Only rank 0 writes them; another exit code of one rank would start the job again."""
    full = "metrics.jsonl: cannot be written: No space left on device"

    class OneOfTwo(SoleRank):
        def exchange(self, message, detail=b"", addressed=()):
            assert message == {"value": "" if rank else full}
            return [{"value": full}, {"value": ""}]

    with pytest.raises(RunFailedError, match=f"^{full}$") as failed:
        fail_together(OneOfTwo(), "" if rank else full, "", "rank 0: No space left on device")
    assert _exit_code(check_config({}), [], failed.value) == 1


def test_a_job_that_waits_to_start_says_so(tmp_path, in_a_job, monkeypatch):
    said = threading.Event()

    def join(*_):
        assert said.wait(30)
        return SoleRank()

    def say(line):
        assert line.startswith("joins the other ranks")
        said.set()

    monkeypatch.setattr(start_lines, "_LOOK_S", 0.001)
    monkeypatch.setattr(start_lines, "_EVERY_S", 0.0)
    monkeypatch.setattr(job, "join_cluster", join)
    monkeypatch.setattr(job, "open_reporter", lambda plain: SimpleNamespace(say=say))
    one_stage = check_config({"parallelism": {"stages": 1}})
    assert job.run_as_rank(RunStart(one_stage, directory=tmp_path), print) == ""
    assert in_a_job == [0]


def test_a_job_begins_where_its_directory_has_no_checkpoint(tmp_path, in_a_job, monkeypatch):
    monkeypatch.setattr(start, "check_run", lambda config: None)
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{dir: {tmp_path / 'run'}, steps: 9}}\nparallelism: {{stages: 1}}\n")
    assert start.resume_or_start(path, []) == ""
    assert in_a_job == [0]


@pytest.fixture
def runs(monkeypatch):
    """The starts of runs, of which none is run."""
    starts = []
    monkeypatch.setattr(start, "check_run", lambda config: None)
    monkeypatch.setattr(start, "_run", lambda run, *_: starts.append(run) or "")
    return starts


def test_one_command_starts_and_resumes(tmp_path, monkeypatch, runs):
    path, directory = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(f"run: {{dir: {directory}, steps: 9}}\n")
    assert start.resume_or_start(path, ["run.seed=4"]) == ""
    assert (runs[0].first_step, runs[0].directory, runs[0].config.run.seed) == (0, directory, 4)
    found = RunStart(runs[0].config, 6, directory)
    manifest = SimpleNamespace()
    monkeypatch.setattr(start, "find_resumption_here", lambda *_, thorough: (found, manifest))
    for name in ("check_vocabulary", "check_data"):
        monkeypatch.setattr(start, name, lambda *_: None)
    monkeypatch.setattr(start, "check_run", lambda config: SimpleNamespace(vocab_size=1, data=None))
    assert start.resume_or_start(path, []) == ""
    assert (runs[1].first_step, runs[1].directory) == (6, directory)
    found = RunStart(runs[0].config, 9, directory)
    assert start.resume_or_start(path, []) == (
        f"{directory} has done its 9 steps: nothing is left to do (run.steps=N continues to step N)"
    )
    assert len(runs) == 2


def test_several_tasks_start_no_local_runs(monkeypatch, tmp_path, runs):
    """Each would start all stages."""
    monkeypatch.setenv("SLURM_STEP_NODELIST", "here")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    path = tmp_path / "run.yaml"
    path.write_text("run: {steps: 9}\n")
    with pytest.raises(UserError, match=r"^--launch: got local in 2 tasks, each of which would"):
        start.resume_or_start(path, [], "local")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    start.resume_or_start(path, [f"run.dir={tmp_path / 'out'}"], "local")
    assert len(runs) == 1


def test_without_a_run_directory_there_is_no_retry():
    assert _exit_code(check_config({}), [], RuntimeError("peer gone")) == 1


@pytest.fixture
def handled_by_jax():
    """SIGTERM as `jax.distributed` leaves it: handled, without an effect."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handled_by_jax")
def test_a_rank_that_may_not_save_ends_at_sigterm(monkeypatch, capsys):
    def end(code):
        raise SystemExit(code)

    def train(*_):
        signal.raise_signal(signal.SIGTERM)
        return True, None

    monkeypatch.setattr(job, "watch_over", lambda report: None)
    monkeypatch.setattr(job, "join_cluster", lambda *_: SoleRank())
    monkeypatch.setattr(job, "_train_as_rank", train)
    monkeypatch.setattr(job.os, "_exit", end)
    config = {"parallelism": {"stages": 1}, "checkpoint": {"on_sigterm": False}}
    with pytest.raises(SystemExit) as ended:
        job.run_as_rank(RunStart(check_config(config)), print)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (ZeroDivisionError("upside down"), [("failed: ZeroDivisionError: upside down", False)]),
        (RendezvousError("rank 2 is gone", rank=2), []),
        (StalledError(Stall(65.0, "step 5")), [("stalled: no progress for 65 s, step 5", True)]),
    ],
)
def test_other_ranks_learn_why_one_fails(monkeypatch, capsys, error, notes):
    """An error that only follows another rank's says nothing new."""
    sent, left = [], []

    class Joined(SoleRank):
        def notify(self, doing, *, has_stalled=False):
            sent.append((doing, has_stalled))

    monkeypatch.setattr(job.os, "_exit", left.append)
    with job._leaving_at_once([Joined()], lambda error: 75):
        raise error
    assert (sent, left) == (notes, [75])
    assert f"{error}" in capsys.readouterr().err
