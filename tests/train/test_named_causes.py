"""What the user reads when a rank or a link of a run fails: the rank or the link that has failed.

The rows of the table in docs/how-to/recover.md that need whole runs.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from in_this_process import ROOT, jaxmorph, on_each_step

CONFIG = """
run: {steps: 60, seed: 5}
model: {preset: tiny, width: 16, num_layers: 3, num_heads: 2, tied: false}
data: {sequence_length: 8}
parallelism: {stages: 3}
batch: {microbatches: 4, microbatch_size: 1}
schedule: {name: zb-h2}
emulation: {accelerator: {forward_ms: 5, backward_input_ms: 5, backward_weight_ms: 5}}
timeouts: {step_s: 4}
trace: {every_steps: 0}
restart_policy: {max_restarts: 0}
"""
CUT = "emulation.links=[{between: [1, 2], cut: true, from_step: 6}]"

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs with overrides, in which rank 1 may get a signal; the exit code and the errors."""

    def train(*overrides, number=None):
        def send_signal(step, ranks):
            if step == 6 and number is not None:
                os.kill(ranks[1].process.pid, number)

        on_each_step(monkeypatch, send_signal)
        (tmp_path / "run.yaml").write_text(CONFIG)
        done = jaxmorph("train", tmp_path / "run.yaml", f"run.dir={tmp_path / 'out'}", *overrides)
        return done.returncode, done.stderr

    return train


def test_a_stopped_rank_is_named(train):
    """One neighbour waits for it on a direct link, the other one on a delegated link."""
    code, said = train("routes={default: direct, 1-2: delegated}", number=signal.SIGSTOP)
    assert code == 1
    assert said.startswith("error: rank 1 failed: ")


@pytest.fixture
def interruptible():
    """Ranks that take SIGINT even where a shell started the tests as a background job.

    Such a job inherits SIGINT as ignored, and ranks leave ignored signals alone.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_rank_ends_the_run_with_a_save(train):
    # Long ops: reports of steps may be seconds late on a busy machine, and the run over by then.
    long = "emulation.accelerator={forward_ms: 25, backward_input_ms: 25, backward_weight_ms: 25}"
    two = "parallelism.stages=2"
    code, said = train("routes.default=delegated", two, long, number=signal.SIGINT)
    assert code == 143, said
    assert re.search(r"asked to end after ([7-9]|1[0-9]) of 60 steps, saved: ", said)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("python", "JaxRuntimeError: INTERNAL: .*: ZeroDivisionError: integer division or modulo"),
        ("memory", "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating [0-9]+ bytes"),
    ],
)
def test_a_models_own_error_is_named(train, monkeypatch, fault, says):
    folders = [str(Path(__file__).parent), str(ROOT / "docs" / "examples")]
    monkeypatch.setattr("sys.path", [*sys.path, folders[1]])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    model = f"model={{factory: failing_model, preset: tiny, fault: {fault}}}"
    code, said = train(model, "parallelism.stages=2")
    assert code == 1
    assert re.match(f"error: rank 1 failed: {says}", said)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["routes.default=direct"], "link 1-2 is cut, still after"),
        (["routes.default=delegated"], "on the delegated link 1-2"),
        (["failover.enabled=true", "timeouts.direct_s=1"], "link 1-2 carries nothing"),
    ],
)
def test_a_link_that_is_cut_on_all_its_routes_is_named(train, overrides, says):
    """Ranks that wait for an end of the link may be the first to fail: they name it too."""
    code, said = train(*overrides, CUT)
    assert code == 1
    before, named, _ = said.splitlines()[0].partition(says)
    assert named
    assert " did not come to it" not in before
