"""What `jaxmorph train` does around the ranks: where they log, how a cluster's rank ends."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training import start
from jaxmorph.training.resume import RunStart
from jaxmorph.training.start import TRY_AGAIN, _exit_code, _log_folder


def test_each_life_of_a_run_has_a_folder_for_its_logs(tmp_path):
    names = []
    for first_step in (0, 0, 6, 6, 0):
        folder = _log_folder(tmp_path, first_step)
        folder.mkdir(parents=True)
        names.append(str(folder.relative_to(tmp_path)))
    assert names == [
        "logs", "logs/from_step_0", "logs/from_step_6", "logs/from_step_6-2",
        "logs/from_step_0-2",
    ]  # fmt: skip


def test_before_ranks_start_again_what_they_had_all_written_becomes_a_checkpoint(tmp_path):
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
    ],
)
def test_a_clusters_rank_says_by_its_exit_code_whether_starting_again_helps(
    tmp_path, monkeypatch, saved, policy, error, code
):
    def newest_whole(folder, *, thorough):
        assert folder.path == tmp_path / "checkpoints"
        return max(saved, default=None), ()

    monkeypatch.setattr(CheckpointFolder, "newest_whole", newest_whole)
    config = check_config({"run": {"steps": 10}, "restart_policy": policy})
    assert _exit_code(config, [tmp_path], error) == code


@pytest.mark.parametrize("is_first", [True, False])
def test_each_task_makes_sure_that_a_run_is_done_and_one_says_so(monkeypatch, tmp_path, is_first):
    """Else the others could be gone by the time the first one finds the last checkpoint damaged."""
    thoroughly = []

    def find(directory, overrides, *, thorough=True):
        thoroughly.append(thorough)
        return SimpleNamespace(is_done=True, config=check_config({"run": {"steps": 8}}))

    monkeypatch.setattr(start, "find_resumption", find)
    monkeypatch.setattr(start, "is_first_task", lambda: is_first)
    said = start.resume_training(tmp_path, [])
    assert thoroughly[-1]
    assert said == (f"{tmp_path} has done its 8 steps: " * is_first) + (
        "nothing is left to do (run.steps=N goes on to N)" * is_first
    )
    with pytest.raises(UserError, match="--launch: got 'nowhere'"):
        start.resume_training(tmp_path, [], "nowhere")


def test_before_a_rank_knows_its_run_starting_again_is_no_help():
    assert _exit_code(check_config({}), [], RuntimeError("nobody there")) == 1


@pytest.fixture
def handled_by_jax():
    """SIGTERM as `jax.distributed` leaves it: heard, and nothing comes of it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handled_by_jax")
def test_a_clusters_rank_that_is_not_to_save_ends_at_sigterm_as_at_ctrl_c(monkeypatch, capsys):
    def end(code):
        raise SystemExit(code)

    def train(*_):
        signal.raise_signal(signal.SIGTERM)
        return True, None

    monkeypatch.setattr(start, "join_cluster", lambda *_: SoleRank())
    monkeypatch.setattr(start, "_train_as_rank", train)
    monkeypatch.setattr(start.os, "_exit", end)
    config = {"parallelism": {"stages": 1}, "checkpoint": {"on_sigterm": False}}
    with pytest.raises(SystemExit) as ended:
        start._run_as_rank(RunStart(check_config(config)))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"
