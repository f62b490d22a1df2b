"""What `jaxmorph train` does around the ranks: where they log, how a cluster's rank ends."""

import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.start import TRY_AGAIN, _exit_code, _log_folder


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


def test_before_a_rank_knows_its_run_starting_again_is_no_help():
    assert _exit_code(check_config({}), [], RuntimeError("nobody there")) == 1
