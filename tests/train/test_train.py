"""`jaxmorph train` as a user runs it: its files, results, errors and interruption."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import fields

import pytest
from four_stages import CONFIG, JAXMORPH, LIMIT_S, arguments_of
from in_this_process import ROOT, Run, jaxmorph, read_lines
from in_this_process import train as train_config
from processes import children, is_running
from stopped_run import require_close

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.config import load_config
from jaxmorph.control.profiler import Profile
from jaxmorph.records import Link, StepRecord

METRICS = {item.name for item in fields(StepRecord) if not item.metadata} | {
    "link_ms",
    "tflops_per_device",
    "crc32",
}

pytestmark = pytest.mark.multiprocess


def train(folder, *overrides):
    return train_config(folder, CONFIG, *overrides)


def test_metrics_have_a_line_for_each_step(four_stages):
    _, out = four_stages
    metrics = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(20))
    assert all(set(line) == METRICS for line in metrics)
    work = {round(line["tflops_per_device"] * line["step_s"], 12) for line in metrics}
    assert len(work) == 1  # as much in each step
    assert metrics[-1]["routes"] == {"0-1": "direct", "1-2": "direct", "2-3": "direct"}
    assert metrics[-1]["warmup_forwards"] == [7, 5, 3, 1]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert set(metrics[-1]["link_ms"]) == {"0>1", "1>0", "1>2", "2>1", "2>3", "3>2"}


def test_nothing_compiles_once_training_has_begun(four_stages):
    _, out = four_stages
    (compilations,) = {line["compilations"] for line in read_lines(out / "metrics.jsonl")}
    assert compilations > 4 * 5  # the counter does count


def test_the_run_directory_holds_config_traces_and_picture(four_stages):
    said, out = four_stages
    assert load_config(out / "config.yaml").parallelism.stages == 4
    assert sorted(path.name for path in (out / "trace").iterdir()) == [
        "step_0.json", "step_10.json", "step_19.json",
    ]  # fmt: skip
    events = json.loads((out / "trace" / "step_19.json").read_text())["traceEvents"]
    ops = [event for event in events if event.get("cat") != "transfer" and event["ph"] == "X"]
    assert len(ops) == 2 * 4 * 24  # planned and measured, stages, ops
    assert (out / "planned_and_measured.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "planned_and_measured.png") in said
    profile = Profile.from_json(json.loads((out / "profile.json").read_text()))
    assert min(profile.costs.forward_ms) > 0
    assert Link(2, 3) in profile.links


ONE_STAGE = ("parallelism.stages=1", "schedule.name=1f1b")


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), *ONE_STAGE)


def test_the_losses_are_those_of_one_stage(four_stages, one_stage):
    require_close(one_stage.out, four_stages[1])


@pytest.mark.long
@pytest.mark.one_jax
def test_the_losses_of_interleaved_chunks_are_those_of_one_stage(one_stage, tmp_path):
    run = train(tmp_path, "schedule.name=interleaved", "parallelism={stages: 2, chunks: 2}")
    require_close(one_stage.out, run.out)
    assert {line["schedule"] for line in run.steps} == {"interleaved"}


@pytest.mark.long
@pytest.mark.one_jax
def test_a_costly_head_gets_fewer_layers(tmp_path, four_stages):
    few = ("run.steps=4", "optimizer.warmup_steps=0", "data.vocab_size=8192")
    alone = train(tmp_path / "alone", *ONE_STAGE, *few)
    auto = train(tmp_path / "auto", "parallelism={stages: 2, layers: auto}", *few)
    require_close(alone.out, auto.out)
    (event,) = auto.events("layers_cut")
    assert event["detail"].startswith("3 1: slowest stage ")
    assert "under the even cut 2 2" in event["detail"]
    assert "2, layers 3 1 (slowest stage " in auto.shown
    assert Run(four_stages[1]).events("layers_cut") == []


@pytest.mark.long
@pytest.mark.one_jax
def test_a_cap_in_bytes_holds_and_changes_no_bit(four_stages, tmp_path):
    """A planned schedule, with at most three live microbatches on each stage."""
    _, out = four_stages
    stash = Profile.from_json(json.loads((out / "profile.json").read_text())).stash_bytes
    assert stash is not None
    caps = [3 * size for size in stash.after_forward]
    assert min(caps) > 0
    capped = ("schedule.name=adaptive", f"schedule.max_stash_bytes={caps}")
    first, second = Run(out), train(tmp_path, *capped)
    assert first.steps[-1]["schedule"] != second.steps[-1]["schedule"]
    assert first.results() == second.results()
    assert max(first.steps[-1]["peak_live"]) == 7
    assert max(second.steps[-1]["peak_live"]) <= 3


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("parallelism.stages=5", "got 5, expected between 1 and the model's 4 layers"),
        (
            "parallelism={stages: 2, chunks: 4}",
            "parallelism.chunks: got 4, expected 1, or schedule.name interleaved: zb-h2 runs",
        ),
        ("parallelism.layers=[1,1,1,2]", "got [1, 1, 1, 2], expected 4 positive counts"),
        ("model.preset=huge", "got 'huge', expected one of tiny, "),
        (
            "model.weights=nowhere",
            "nowhere: no such file or folder, expected a folder with mod",
        ),
        ("model.factory=models.none", "got 'models.none', expected gpt2, llama, or a module"),
        ("data.path=nowhere.txt", "nowhere.txt: no such file"),
        ("batch.microbatchs=3", "unknown key; did you mean 'microbatches'?"),
        ("adaptation.intra_step=auto", "got 'auto', expected 'off': changing the order inside a "),
        (
            "schedule.max_live=6",
            "zb-h2 holds 7 microbatches until B on stage 0, expected at most 6",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path, override, line):
    done = jaxmorph(*arguments_of(tmp_path, override))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {override} (command line): {line}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.num_heads=3", "model.width: got 32, expected a multiple of num_heads"),
        ("batch.microbatch_size=1000000", "data.path: the Python standard library's sources: got "),
    ],
)
def test_a_late_mistake_names_file_and_key(tmp_path, override, line):
    done = jaxmorph(*arguments_of(tmp_path, override))
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def start_training(folder, *overrides, stdout=subprocess.DEVNULL, steps=1):
    """A long run, once its first steps are written; and its ranks' process ids."""
    run = subprocess.Popen(
        [*JAXMORPH, *arguments_of(folder, "run.steps=100000", *overrides)],
        cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True,
        # A shell's background job ignores Ctrl-C, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    metrics = folder / "out" / "metrics.jsonl"
    deadline_s = time.monotonic() + LIMIT_S
    while run.poll() is None and not (
        metrics.exists() and metrics.read_text().count("\n") >= steps
    ):
        if time.monotonic() > deadline_s:
            run.kill()
            pytest.fail("too few steps within the limit")
        time.sleep(0.05)
    return run, children(run.pid)


def finish(run):
    watchdog = threading.Timer(60, run.kill)
    watchdog.start()
    _, stderr = run.communicate()
    watchdog.cancel()
    return stderr


SAVES = "checkpoint.every_steps=null"  # by minutes, after the last step, and when asked to end


@pytest.fixture(scope="module")
def asked_to_end(tmp_path_factory):
    """A run whose output nobody reads, and of which one rank gets SIGTERM."""
    folder = tmp_path_factory.mktemp("asked")
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    two = ("parallelism.stages=2", SAVES)
    run, ranks = start_training(folder, *two, stdout=writing, steps=100)
    os.kill(ranks[1], signal.SIGTERM)
    stderr = finish(run)
    os.close(reading)
    os.close(writing)
    return folder, run.returncode, stderr, ranks


def test_a_stopped_reader_and_a_signal_to_a_rank_end_in_a_save(asked_to_end):
    folder, code, stderr, ranks = asked_to_end
    assert code == 143, stderr
    (saved,) = CheckpointFolder(folder / "out" / "checkpoints").steps()
    assert saved >= 100
    assert f"asked to end after {saved} of 100000 steps, saved: jaxmorph train --re" in stderr
    assert len(read_lines(folder / "out" / "metrics.jsonl")) == saved
    assert not any(map(is_running, ranks))


@pytest.mark.long
@pytest.mark.one_jax
def test_a_closed_reader_and_ctrl_c_end_in_a_save(asked_to_end, tmp_path):
    """The same command goes on from the checkpoint."""
    shutil.copytree(asked_to_end[0] / "out", tmp_path / "out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    (before,) = CheckpointFolder(tmp_path / "out" / "checkpoints").steps()
    reading, writing = os.pipe()
    os.close(reading)
    two = ("parallelism.stages=2", SAVES, "--resume", "auto")
    run, ranks = start_training(tmp_path, *two, stdout=writing, steps=before + 5)
    run.send_signal(signal.SIGINT)
    stderr = finish(run)
    os.close(writing)
    assert run.returncode == 130, stderr
    assert "standard output was closed: the run continues" in stderr
    saved = max(CheckpointFolder(tmp_path / "out" / "checkpoints").steps())
    assert f"asked to end after {saved} of 100000 steps, saved" in stderr
    assert [line["step"] for line in read_lines(metrics)] == list(range(saved))
    assert not any(map(is_running, ranks))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def start_tasks_of_open_mpi(folder, num_tasks, *overrides, of_task=lambda rank: {}):
    """The run's own command, once per task, with the environment that mpirun gives each."""
    two_stages = ("run.steps=3", "parallelism={stages: 2, layers: even}")
    again = ("--resume", "auto")  # the documented command of a job
    command = [*JAXMORPH, *arguments_of(folder, *two_stages, SAVES, *overrides), *again]
    # Open MPI's job ids are multiples of 4096; the port of the coordinator is derived from it.
    job = os.getpid() << 12
    return [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {
                "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1",
                "OMPI_COMM_WORLD_SIZE": str(num_tasks),
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            } | of_task(rank),
        )
        for rank in range(num_tasks)
    ]  # fmt: skip


def finished(task):
    """The output, the errors and the exit code of a task."""
    watchdog = threading.Timer(LIMIT_S, task.kill)
    watchdog.start()
    out, err = task.communicate()
    watchdog.cancel()
    return out, err, task.returncode


def test_tasks_of_a_cluster_job_are_ranks_of_one_run(tmp_path):
    tasks = start_tasks_of_open_mpi(tmp_path, 2)
    (out, _, first), (silent, _, second) = map(finished, tasks)
    assert (first, second) == (0, 0)
    assert "2, layers 2 2" in out
    assert "layers" not in silent
    assert len(read_lines(tmp_path / "out" / "metrics.jsonl")) == 3
    saved = CheckpointFolder(tmp_path / "out" / "checkpoints")
    assert saved.steps() == (3,)
    assert saved.manifest(3).layers == (range(2), range(2, 4))


@pytest.mark.long
@pytest.mark.one_jax
def test_a_task_with_another_secret_ends_at_once(tmp_path):
    """It has joined JAX by then, which would wait for the others when Python ends."""

    def secret_of(rank):
        path = tmp_path / f"secret_{rank}"
        path.write_text(64 * str(rank))
        path.chmod(0o600)
        return {"JAXMORPH_SECRET_FILE": str(path)}

    waits_s = "timeouts.start_s=20"
    first, second = start_tasks_of_open_mpi(tmp_path, 2, waits_s, of_task=secret_of)
    _, refused, code = finished(second)
    assert first.poll() is None  # rank 0 still waits for one with the right secret
    assert code == 2
    assert refused.startswith("error: --launch: rank 1: ")
    assert "expected one file for all ranks" in refused
    assert refused.count("\n") == 1
    _, late, code = finished(first)
    assert code == 1
    last = late.splitlines()[-1]
    assert "ranks [1] did not come to" in last
    assert "connections were refused: another secret" in last


@pytest.mark.long
@pytest.mark.one_jax
def test_a_taken_coordinators_port_is_one_line(tmp_path):
    """JAX derives it from the job's number, and serves there without looking."""
    port = (1 << 16) - (1 << 12) + os.getpid() % (1 << 12)
    with socket.create_server(("127.0.0.1", port)):
        _, stderr, code = finished(*start_tasks_of_open_mpi(tmp_path, 1))
    assert code == 2
    assert f"error: --launch: got the coordinator's port {port}, on which" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.one_jax
def test_a_job_of_the_wrong_size_is_refused(tmp_path):
    _, stderr, code = finished(*start_tasks_of_open_mpi(tmp_path, 1))
    assert code == 2
    assert "parallelism.stages: got 2, expected the job's number of tasks, 1" in stderr
