"""`jaxmorph train` on delegated routes: the same losses, also when sidecars are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from in_this_process import ROOT, Run, train
from processes import children

from jaxmorph.report.draw.trace import read_chrome_trace
from jaxmorph.schedule.bubbles import step_shares
from jaxmorph.schedule.timeline import peak_on_device

LIMIT_S = 150
CONFIG = """
run: {steps: 14, seed: 5}
model: {preset: tiny, width: 32, num_layers: 3, num_heads: 2}
data: {sequence_length: 16}
parallelism: {stages: 3}
batch: {microbatches: 6, microbatch_size: 2}
schedule: {name: zb-h2}
optimizer: {learning_rate: 1e-3}
trace: {every_steps: 0}
"""
PACED = "emulation.accelerator={forward_ms: 12, backward_input_ms: 12, backward_weight_ms: 12}"

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


class Training(Run):
    """A run of CONFIG that a test observes."""

    def __init__(self, folder, *overrides):
        super().__init__(folder / "out")
        (path := folder / "run.yaml").write_text(CONFIG)
        words = ("train", path, f"run.dir={folder / 'out'}", *overrides)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxmorph", *words],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._watchdog = threading.Timer(LIMIT_S, self.process.kill)
        self._watchdog.start()

    def finish(self):
        """Wait for its end; its output and exit code."""
        output, _ = self.process.communicate()
        self._watchdog.cancel()
        return output, self.process.returncode

    def wait_for_step(self, step):
        """Wait until that step is written."""
        metrics = self.out / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") <= step:
            if self.process.poll() is not None:
                pytest.fail(f"it has ended: {self.finish()}")
            time.sleep(0.01)

    def processes(self):
        """The ranks' process ids, and their sidecars'."""
        ranks = children(self.process.pid)
        return ranks, [child for rank in ranks for child in children(rank)]


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    """A run without delegated links, and the sidecars that it had."""
    training = Training(tmp_path_factory.mktemp("direct"))
    training.wait_for_step(0)
    _, sidecars = training.processes()
    return finished(training), sidecars


@pytest.fixture(scope="module")
def delegated(tmp_path_factory):
    return train(tmp_path_factory.mktemp("delegated"), CONFIG, "routes.default=delegated")


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    """Paced, with room for two stashes on each device; stage 0 needs five."""
    folder = tmp_path_factory.mktemp("offloaded")
    capped = ("schedule.max_live=2", "offload.enabled=true", "emulation.host_copy_gbps=0.01")
    return train(folder, CONFIG, "routes.default=delegated", PACED, *capped)


def finished(training):
    output, code = training.finish()
    assert code == 0, output
    return training


def timeline_of(run, step):
    """A step as it was measured."""
    trace = json.loads((run.out / "trace" / f"step_{step}.json").read_text())
    found = read_chrome_trace(trace).items()
    return next(each for name, each in found if name.startswith("measured"))


def waits_of_ready_ops_ms(timeline, stage):
    """How long each op of the last stage waited with its data there and the stage idle."""
    into = [span for span in timeline.transfers if span.stage == stage]
    landed_ms = {span.label.split()[0]: span.end_ms for span in into}
    spans = [span for span in timeline.spans() if span.stage == stage]
    return [
        span.start_ms - max(before.end_ms, landed_ms[f"activation[{span.op.microbatch}]"])
        for before, span in pairwise(spans)
        if span.op.kind == "F"
    ]


def quickest_offload_ms(run, stage):
    """The shortest of all offloads of a stage in the steps that have traces."""
    steps = sorted((run.out / "trace").glob("step_*.json"))
    timelines = [timeline_of(run, int(path.stem.removeprefix("step_"))) for path in steps]
    copies = [copy for timeline in timelines for copy in timeline.copies]
    return min(
        copy.end_ms - copy.start_ms
        for copy in copies
        if copy.stage == stage and copy.kind == "offload"
    )


def test_delegation_changes_no_bit(direct, delegated):
    run, sidecars = direct
    assert delegated.results() == run.results()
    assert len(delegated.results()) == 14
    routes = dict.fromkeys(("0-1", "1-2", "0-2"), "delegated")
    assert delegated.steps[-1]["routes"] == routes
    assert run.steps[-1]["routes"] == {"0-1": "direct", "1-2": "direct"}
    assert sidecars == []  # without delegated links none starts


def test_delegated_messages_hold_no_queue(delegated):
    timeline = timeline_of(delegated, 13)
    labels = {span.label for span in timeline.transfers}
    activations = {f"activation[{m}] {at}>{at + 1}" for m in range(6) for at in range(2)}
    gradients = {f"gradient[{m}] {at + 1}>{at}" for m in range(6) for at in range(2)}
    assert labels == activations | gradients | {"tied[0] 0>2", "tied[0] 2>0"}
    assert not any(span.holds_queue for span in timeline.transfers)
    assert all(span.end_ms >= span.start_ms for span in timeline.transfers)


def test_offload_changes_no_loss_and_keeps_caps(direct, offloaded):
    assert offloaded.results() == direct[0].results()
    lines = offloaded.steps
    assert {tuple(line["peak_live"]) for line in lines} == {(5, 3, 1)}
    assert max(max(line["peak_on_device"]) for line in lines) == 2
    assert len({line["compilations"] for line in lines}) == 1
    timeline = timeline_of(offloaded, 13)
    assert {copy.stage for copy in timeline.copies} == {0, 1}  # stage 2 has no need to
    assert max(peak_on_device(timeline)) == 2
    profile = json.loads((offloaded.out / "profile.json").read_text())
    at_10_mb_per_s = [size / 1e4 for size in profile["stash_bytes"]["after_forward"]]
    # Nothing is quicker than its link; a busy machine makes some copies slower, and never all.
    rounding_ms = 0.001
    assert all(np.array(profile["copies"]["offload_ms"]) >= np.array(at_10_mb_per_s) - rounding_ms)
    for stage in (0, 1):
        assert quickest_offload_ms(offloaded, stage) == pytest.approx(
            at_10_mb_per_s[stage], rel=0.5
        )


@pytest.mark.one_jax
def test_a_slow_delegated_link_blocks_no_ready_op(tmp_path):
    slow = ("emulation.links=[{between: [1, 2], latency_ms: 40}]", PACED, "run.steps=4")
    training = Training(tmp_path, "routes={1-2: delegated}", *slow)
    training.wait_for_step(0)
    ranks, sidecars = training.processes()
    assert (len(ranks), len(sidecars)) == (3, 2)  # the link's own ranks have one
    finished(training)
    profile = json.loads((training.out / "profile.json").read_text())
    assert profile["links"]["1-2"]["forward_latency_ms"] == pytest.approx(40, abs=15)
    timeline = timeline_of(training, 3)
    delegated = [s for s in timeline.transfers if not s.holds_queue]
    assert {s.label.split()[1] for s in delegated} == {"1>2", "2>1"}
    assert min(s.end_ms - s.start_ms for s in delegated) >= 39
    # Stage 0's link is direct: it may wait there. Stage 2 has no queue that anything could hold.
    assert step_shares(timeline)[2].blocking == 0
    assert np.median(waits_of_ready_ops_ms(timeline, 2)) < 5
    predicted_ms = 1e3 * training.steps[-1]["predicted_step_s"]
    ops_ms, messages_ms = 3 * 6 * 12, 2 * 6 * 40
    assert predicted_ms < ops_ms + messages_ms / 2  # not one message after another


@pytest.mark.one_jax
def test_killed_sidecars_are_replaced(tmp_path, delegated):
    several = "routes.default=delegated", "transport.sidecars=2"
    training = Training(tmp_path, *several, PACED)
    for step in (1, 5, 9):
        training.wait_for_step(step)
        _, sidecars = training.processes()
        assert len(sidecars) == 6
        os.kill(sidecars[step % 6], signal.SIGKILL)
    finished(training)
    assert training.results() == delegated.results()
    restarts = training.events("sidecar_restarted")
    assert len(restarts) == 3
    assert all(e["detail"].startswith("rank ") and e["step"] >= 1 for e in restarts)
