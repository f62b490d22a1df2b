"""What a run does whose disk, directory or terminal is taken away: rows of the table of faults."""

import os
import pty
import signal
import subprocess
import time

import pytest
from four_stages import JAXMORPH, LIMIT_S, arguments_of
from in_this_process import ROOT, Run
from processes import is_running

from jaxmorph.checkpoints.folder import CheckpointFolder

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.one_jax]

TWO = ("parallelism.stages=2", "run.steps=60", "trace.every_steps=0")

# $1: a folder; $2: what is done to it once the run has begun; the rest: the run.
MEANWHILE = """
folder=$1; deed=$2; shift 2
(until [ -s "$folder/out/metrics.jsonl" ]; do sleep 0.1; done; eval "$deed") 2> "$folder/../deed" &
"$@"; code=$?
kill $! 2> /dev/null
[ -d "$folder/out" ] && find "$folder/out" -name "*.new" >&2
exit $code
"""


def run_while(deed, folder, *overrides, within=()):
    """A run's exit code, output and errors; the deed is done after its first step."""
    command = [*JAXMORPH, *arguments_of(folder, *TWO, *overrides)]
    words = [*within, "sh", "-c", MEANWHILE, "sh", str(folder), deed, *command]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_a_full_disk_is_named_and_training_goes_on(tmp_path):
    """A disk that has no room at all: a small one in memory, which only this run sees."""
    own_disk = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    (folder := tmp_path / "disk").mkdir()
    mount = f'mount -t tmpfs -o size=16m tmpfs {folder} && cp {tmp_path}/run.yaml {folder} && "$@"'
    tried = subprocess.run([*own_disk, mount.partition(" && ")[0]], check=False)
    if tried.returncode != 0:
        pytest.skip("file systems can't be mounted here")
    arguments_of(tmp_path)
    code, out, errors = run_while(
        "cat /dev/zero > $folder/filler", folder, "checkpoint.every_steps=20",
        within=[*own_disk, mount, "sh"],
    )  # fmt: skip
    assert code == 1
    assert "checkpoint failed  rank 0: [Errno 28] No space left on device" in out
    assert "\n    59 " in out
    full = "cannot be written: No space left on device"
    assert errors[-1] == f"error: {folder}/out/metrics.jsonl: {full}"
    assert all(line.endswith(f"{full}; the run continues") for line in errors[:-1])


def test_a_removed_directory_is_named_and_training_goes_on(tmp_path):
    (folder := tmp_path / "folder").mkdir()
    code, out, errors = run_while("rm -r $folder/out", folder)
    gone = "cannot be written: No such file or directory"
    assert code == 1
    assert f"files damaged  {folder}/out/metrics.jsonl: {gone}; its lines wait" in out
    assert "\n    59 " in out
    assert errors[-1] == f"error: {folder}/out/metrics.jsonl: {gone}"
    assert not (folder / "out").exists()


def test_a_closed_terminal_ends_in_a_save(tmp_path):
    saves = ("run.steps=100000", "checkpoint.every_steps=null")
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        ["setsid", "--ctty", *JAXMORPH, *arguments_of(tmp_path, TWO[0], *saves)],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
        # Under `nohup` it is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    os.close(theirs)
    metrics, until_s = tmp_path / "out" / "metrics.jsonl", time.monotonic() + LIMIT_S
    try:
        while not (metrics.exists() and metrics.read_bytes()):
            assert run.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.close(ours)
        assert run.wait(LIMIT_S) == 143
    finally:
        run.kill()
    (saved,) = CheckpointFolder(tmp_path / "out" / "checkpoints").steps()
    assert len(Run(metrics.parent).steps) == saved
    (stopped,) = Run(metrics.parent).events("stopped")
    assert stopped["detail"].startswith(f"asked to end after {saved} of 100000 steps")
    assert not is_running(run.pid)
