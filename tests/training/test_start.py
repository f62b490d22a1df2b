"""`jaxmorph train` around the ranks: their logs, and how a cluster's rank ends."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.progress import Stall, StalledError
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training import start
from jaxmorph.training.resume import RunStart
from jaxmorph.training.start import TRY_AGAIN, _exit_code, _log_folder, sigterm_asks

LIMIT_S = 30


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
    record: Any = SimpleNamespace(num_recorded=7)
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


@pytest.mark.parametrize("is_first", [True, False])
def test_each_task_verifies_a_finished_run(monkeypatch, tmp_path, is_first):
    """Otherwise the others could have left when the first task finds the checkpoint damaged."""
    thoroughly = []

    def find(directory, overrides, *, thorough=True):
        thoroughly.append(thorough)
        return SimpleNamespace(is_done=True, config=check_config({"run": {"steps": 8}}))

    monkeypatch.setattr(start, "find_resumption", find)
    monkeypatch.setattr(start, "started_by_cluster", lambda: True)
    monkeypatch.setattr(start, "is_first_task", lambda: is_first)
    reported = start.resume_training(tmp_path, [])
    assert thoroughly[-1]
    assert reported == (f"{tmp_path} has done its 8 steps: " * is_first) + (
        "nothing is left to do (run.steps=N continues to step N)" * is_first
    )
    with pytest.raises(UserError, match="--launch: got 'nowhere'"):
        start.resume_training(tmp_path, [], "nowhere")


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

    monkeypatch.setattr(start, "watch_over", lambda report: None)
    monkeypatch.setattr(start, "join_cluster", lambda *_: SoleRank())
    monkeypatch.setattr(start, "_train_as_rank", train)
    monkeypatch.setattr(start.os, "_exit", end)
    config = {"parallelism": {"stages": 1}, "checkpoint": {"on_sigterm": False}}
    with pytest.raises(SystemExit) as ended:
        start._run_as_rank(RunStart(check_config(config)))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which this process would have ended."""
    codes, has_ended = [], threading.Event()

    def end(code):
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr(start.os, "_exit", end)
    return codes, has_ended


def test_a_second_sigterm_ends_at_once(ended, capsys):
    codes, _ = ended
    with sigterm_asks(within_s=1e4) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        assert codes == []
        signal.raise_signal(signal.SIGTERM)
        assert codes == [143]
    assert "ended by SIGTERM before the state was saved" in capsys.readouterr().err


def test_a_stop_has_a_deadline(ended):
    codes, has_ended = ended
    with sigterm_asks(within_s=0.01):
        signal.raise_signal(signal.SIGTERM)
        assert has_ended.wait(LIMIT_S)
    assert codes == [143]


def test_ending_in_time_restores_signals(ended):
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    with sigterm_asks(within_s=1e4):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(LIMIT_S)
    assert threading.active_count() == threads
    assert ended[0] == []


def test_without_a_deadline_sigterm_is_ctrl_c(ended):
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_asks(within_s=None) as asked:
        assert not asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    assert ended[0] == []


@pytest.mark.parametrize("within_s", [None, 1e4])
def test_a_foreign_handler_becomes_the_default(monkeypatch, within_s):
    """Python sees a handler installed from C as None, and can't set None."""
    install, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def of_c(number, handler):
        assert handler is not None
        previous = install(number, handler)
        return None if previous == before else previous

    monkeypatch.setattr(signal, "signal", of_c)
    try:
        with sigterm_asks(within_s):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        install(signal.SIGTERM, before)
