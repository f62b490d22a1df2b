"""`jaxmorph launch`: what a script gets, and what its user sees."""

import json
import re
from pathlib import Path

import pytest
from in_this_process import jaxmorph

from jaxmorph.training import script_launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(60)]

GIVEN = """
import json, sys
from pathlib import Path
from jaxmorph.training.script_launch import launch_arguments
launched = launch_arguments()
found = {
    "words": sys.argv, "name": __name__, "path": sys.path[0], "rank": launched.rank,
    "ranks": launched.num_ranks, "jax": "jax" in sys.modules,
}
Path(sys.argv[-1], f"{launched.rank}.json").write_text(json.dumps(found))
print("shown by rank", launched.rank)
sys.exit(0)
"""
MISTAKEN = """
import jaxmorph
raise jaxmorph.UserError("batch: got a wombat, expected tokens")
"""
FAILING = """
print("received")
import sys
print("half way", file=sys.stderr)
raise ArithmeticError("upside down")
"""


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_script_runs_in_every_process(tmp_path, capfd):
    path = script(tmp_path, GIVEN)
    done = jaxmorph("launch", "--stages", 2, path, "--rank=7", "--stages", 5, tmp_path)
    assert done.returncode == 0, done.stderr
    assert capfd.readouterr().out == "shown by rank 0\n"
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["words"] == [str(path), "--rank=7", "--stages", "5", str(tmp_path)]
        assert found["name"] == "__main__"
        assert found["path"] == str(tmp_path)
        assert (found["rank"], found["ranks"]) == (rank, 2)
        assert not found["jax"]  # the script is the first to import it


def test_a_users_mistake_in_a_script_is_one_line(tmp_path):
    done = jaxmorph("launch", "--stages", 1, script(tmp_path, MISTAKEN))
    assert done.returncode == 2
    assert done.stderr == "error: batch: got a wombat, expected tokens\n"


def test_a_failed_script_keeps_its_log(tmp_path):
    done = jaxmorph("launch", "--stages", 1, script(tmp_path, FAILING))
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 0 failed: ArithmeticError: upside down")
    (log,) = re.findall(r"its log: (.*)", done.stderr)
    assert "half way" in Path(log).read_text()
    assert "script.py" in done.stderr  # the log's end: the traceback
    Path(log).unlink()
    Path(log).parent.rmdir()


def test_a_missing_script_is_one_line(tmp_path):
    done = jaxmorph("launch", "--stages", 2, tmp_path / "none.py")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'none.py'}: no such file, expected a Python script\n"


def test_a_stopped_script_keeps_its_logs(tmp_path, monkeypatch):
    def hang(module, arguments, num_ranks, log_dir, on_message, **options):
        (log_dir / "rank_1.log").write_text("waits for ever")
        raise KeyboardInterrupt

    monkeypatch.setattr(script_launch, "run_ranks", hang)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = jaxmorph("launch", "--stages", 2, script(tmp_path, FAILING))
    assert done.returncode == 130
    (log,) = tmp_path.glob("*/rank_1.log")
    assert done.stderr.splitlines()[0] == f"logs: {log.parent}"
