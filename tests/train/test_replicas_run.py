"""Runs with replicas of the pipeline: they learn, save, resume and stop as one replica does."""

import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
from in_this_process import Run, jaxmorph, on_each_step, require_same_arrays, states, train
from stopped_run import ask_to_end_with_step

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.report.page.files import read_trace
from jaxmorph.report.run_directory import find_traces
from jaxmorph.runtime.reduction import DirectSum

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.one_jax]

CONFIG = """
run: {steps: 6, seed: 5}
model: {preset: tiny, width: 16, num_layers: 4, num_heads: 2, tied: true, dropout: 0.1}
data: {sequence_length: 8, held_out_fraction: 0.05}
batch: {microbatches: 8, microbatch_size: 1}
schedule: {name: zb-h2}
checkpoint: {every_steps: 3}
evaluation: {every_steps: 3}
trace: {every_steps: 0}
timeouts: {direct_s: 4}
restart_policy: {max_restarts: 0}
"""
REPLICAS = "parallelism={stages: 2, data: 2}"


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def losses(run):
    return [step["loss"] for step in run.steps]


def held_out_losses(run):
    return [step["held_out_loss"] for step in run.steps if "held_out_loss" in step]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), CONFIG)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    return train(tmp_path_factory.mktemp("replicas"), CONFIG, REPLICAS)


@pytest.mark.in_ci
def test_losses_are_those_of_one_replica(alone, replicas):
    close(losses(replicas), losses(alone))
    close(held_out_losses(replicas), held_out_losses(alone))
    assert len(held_out_losses(alone)) == 2


@pytest.mark.in_ci
def test_a_step_records_how_each_replica_ran_it(replicas, alone):
    for step in replicas.steps:
        for each in step["replicas"]:
            assert (each["schedule"], each["routes"]) == ("zb-h2", {"0-1": "direct"})
            assert each["warmup_forwards"] == step["warmup_forwards"]
            assert each["pipeline_s"] > 0
            assert each["predicted_step_s"] > 0
        assert len(step["replicas"]) == 2
    assert "replicas" not in alone.steps[0]


def test_the_last_step_is_traced_in_each_replica(replicas, alone):
    """It is the only one here, and no further step brings what replica 1 has of it."""
    (traced,), (of_one,) = (find_traces(run.out).values() for run in (replicas, alone))
    assert sorted(read_trace(traced)) == ["measured", "planned", "r1 measured", "r1 planned"]
    assert sorted(read_trace(of_one)) == ["measured", "planned"]
    page = replicas.out / "page.html"
    assert jaxmorph("report", replicas.out, "--out", page).returncode == 0
    assert "step 5, r1" in page.read_text()


def test_the_same_run_again_has_the_same_results(replicas, tmp_path):
    delegated = "routes={default: delegated, reduction: delegated, r1:0-1: direct}"
    again = train(tmp_path, CONFIG, REPLICAS, delegated)
    assert again.results() == replicas.results()
    require_same_arrays(states(again.out, 6), states(replicas.out, 6))
    assert held_out_losses(again) == held_out_losses(replicas)
    routes = [each["routes"]["0-1"] for each in again.steps[-1]["replicas"]]
    assert routes == ["delegated", "direct"]


def test_a_run_resumes_with_another_number_of_replicas(alone, replicas, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    shapes = {one: (alone, REPLICAS), two: (replicas, "parallelism={stages: 1, data: 1}")}
    for directory, (run, shape) in shapes.items():
        shutil.copytree(run.out, directory)
        done = jaxmorph("train", "--resume", directory, "run.steps=8", shape)
        assert done.returncode == 0, done.stderr
    assert [len(step.get("replicas", ())) for step in Run(one).steps] == [0] * 6 + [2] * 2
    assert [len(step.get("replicas", ())) for step in Run(two).steps] == [2] * 6 + [0] * 2
    close(losses(Run(one)), losses(Run(two)))


def test_a_run_that_is_asked_to_end_saves_and_resumes(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(CONFIG)
    out = tmp_path / "out"
    paced = "emulation.accelerator={forward_ms: 10, backward_input_ms: 10, backward_weight_ms: 10}"
    words = f"run.dir={out}", REPLICAS, paced, "run.steps=40", "checkpoint.every_steps=40"
    with monkeypatch.context() as patch:
        ask_to_end_with_step(1, patch)
        asked = jaxmorph("train", tmp_path / "run.yaml", *words)
    assert asked.returncode == 128 + signal.SIGTERM, asked.stderr
    assert "of 40 steps, saved: jaxmorph train --resume" in asked.stderr
    (last,) = CheckpointFolder(out / "checkpoints").steps()
    assert 1 < last < 40
    done = jaxmorph("train", "--resume", out, f"run.steps={last + 1}", "emulation={}")
    assert done.returncode == 0, done.stderr
    assert len(Run(out).steps) == last + 1


FAILING = """
import jax
from jaxmorph.models.gpt2 import build
from jaxmorph.runtime.reduction import DirectSum

run, sums = DirectSum.run, []

def run_or_fail(self, gradients, step):
    sums.append(gradients)
    if len(sums) == 3 and jax.process_index() == {rank}:
        raise jax.errors.JaxRuntimeError("UNKNOWN: reset by peer")
    return run(self, gradients, step)

DirectSum.run = run_or_fail
"""


@pytest.mark.in_ci
def test_a_failed_direct_sum_continues_delegated(replicas, tmp_path, monkeypatch):
    (tmp_path / "failing_sum.py").write_text(FAILING.format(rank=3))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(DirectSum, "run", DirectSum.run)  # this process imports the model too
    model = "model.factory=failing_sum"
    found = train(tmp_path, CONFIG, REPLICAS, model, "failover.enabled=true")
    assert found.results() == replicas.results()
    changed = found.events("route_changed")
    assert {event["step"] for event in changed} == {2}
    says = ": gradients are summed over hosts from now on: JaxRuntimeError"
    ranks = {event["detail"].partition(says)[0] for event in changed}
    assert ranks == {"rank 1", "r1: rank 3"}  # the other stage's sum is sound


def test_a_cut_pair_of_hosts_fails_the_direct_sum_over(replicas, tmp_path):
    """Only what it sums: it has no stages of one replica. Its sum waits as long as is allowed."""
    cut = "emulation.hosts=[{between: [1, 3], cut: true, route: direct, from_step: 2}]"
    limit = "timeouts.direct_s=1"
    found = train(tmp_path, CONFIG, REPLICAS, cut, limit, "failover.enabled=true")
    assert found.results() == replicas.results()
    changed = found.events("route_changed")
    assert {event["step"] for event in changed} == {2}
    assert all("emulated: not over after 1 s" in event["detail"] for event in changed)
    assert len(changed) == 2
    assert found.steps[2]["step_s"] > 1.0


def test_the_slow_pair_of_three_replicas_is_found_and_avoided(tmp_path):
    """Sums are timed over each pair of replicas, between two steps."""
    overrides = "parallelism={stages: 2, data: 3}", "run.steps=16", "batch.microbatches=6"
    slow = (
        "emulation={gradient_bytes: 1000, bucket_bytes: 500, "
        "hosts: [{between: [3, 5], latency_ms: 250, from_step: 3}]}"
    )
    plain = train(tmp_path / "plain", CONFIG, *overrides)
    moved = train(tmp_path / "moved", CONFIG, *overrides, "adaptation.remaps=any", slow)
    assert moved.results() == plain.results()
    (remapped,) = moved.events("remapped")
    assert "rank 3 is" in remapped["detail"] or "rank 5 is" in remapped["detail"]
    step_s = [step["step_s"] for step in moved.steps]
    assert min(step_s[remapped["step"] + 2 :]) < min(step_s[3 : remapped["step"]])


def test_failover_and_resume_change_no_bit_on_all_axes(tmp_path):
    mesh = "parallelism={stages: 2, data: 2, tensor: 2}"
    plain = train(tmp_path / "plain", CONFIG, mesh)
    cut = (
        "failover.enabled=true",
        "emulation.links=[{between: [0, 1], replica: 1, cut: true, route: direct, from_step: 2}]",
    )
    failing = train(tmp_path / "failing", CONFIG, mesh, *cut)
    assert failing.results() == plain.results()
    assert [event["link"] for event in failing.events("link_failed")] == ["r1:0-1"]
    again = shutil.copytree(plain.out, tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "step_6")
    done = jaxmorph("train", "--resume", again)
    assert done.returncode == 0, done.stderr
    assert Run(again).results() == plain.results()


def test_offloads_change_no_bit_on_all_axes(tmp_path):
    mesh = "parallelism={stages: 2, data: 2, tensor: 2}"
    plain = train(tmp_path / "plain", CONFIG, mesh, "schedule.name=gpipe")
    offloads = "schedule={name: gpipe, max_live: 2}", "offload.enabled=true"
    found = train(tmp_path / "found", CONFIG, mesh, *offloads)
    assert found.results() == plain.results()
    assert {tuple(step["peak_on_device"]) for step in found.steps} == {(2, 2)}


# 4 s more for a direct sum over the slow pair, and more than 1 s for a delegated one.
SLOW_HOSTS = (
    "emulation={gradient_bytes: 1000, bucket_bytes: 250, "
    "hosts: [{between: [1, 3], latency_ms: 500, from_step: 3}]}"
)


@pytest.mark.parametrize(
    "option",
    [
        pytest.param("optimizer.shard=none", marks=pytest.mark.in_ci),
        "optimizer.shard=data",
        "routes.reduction=delegated",
    ],
)
def test_a_slow_pair_of_hosts_sums_no_gradients_any_more(tmp_path, option):
    """Ranks change places: no step is lost, and no bit of results changes."""
    overrides = REPLICAS, "run.steps=14", option
    plain = train(tmp_path / "plain", CONFIG, *overrides)
    moved = train(tmp_path / "moved", CONFIG, *overrides, "adaptation.remaps=any", SLOW_HOSTS)
    assert moved.results() == plain.results()
    assert held_out_losses(moved) == held_out_losses(plain)
    assert len(moved.events("sum_slow")) == 1
    assert len(moved.events("reopened")) == 1
    (remapped,) = moved.events("remapped")
    assert [step["step"] for step in moved.steps] == [*range(14)]
    step_s = [step["step_s"] for step in moved.steps]
    assert min(step_s[remapped["step"] + 2 :]) < min(step_s[3 : remapped["step"]])


def test_ranks_go_back_once_the_pair_is_as_fast_as_before(tmp_path):
    overrides = REPLICAS, "run.steps=120"
    plain = train(tmp_path / "plain", CONFIG, *overrides)
    passing = SLOW_HOSTS.replace("from_step: 3", "from_step: 3, to_step: 8")
    again = "adaptation={remaps: any, recheck_steps: 4}"
    # The time for two ranks to compile their stages beside training.
    long = "emulation.accelerator={forward_ms: 5, backward_input_ms: 5, backward_weight_ms: 5}"
    moved = train(tmp_path / "moved", CONFIG, *overrides, passing, again, long)
    assert moved.results() == plain.results()
    there, back = moved.events("remapped")
    assert "no pair of hosts is slow any more" in back["detail"]
    places = [re.findall(r"rank (\d) is (r\d stage \d)", each["detail"]) for each in (there, back)]
    assert len({rank for rank, _ in places[0]}) == 2
    assert {rank for rank, _ in places[0]} == {rank for rank, _ in places[1]}
    assert {place for _, place in places[0]} == {place for _, place in places[1]}
    assert places[0] != places[1]


def test_a_slow_pair_that_becomes_a_link_is_adapted_to(tmp_path):
    """No other layout may be taken, so that replica delegates the link, and the other one none."""
    overrides = REPLICAS, "run.steps=16", "batch.microbatches=16"
    long = "emulation.accelerator={forward_ms: 12, backward_input_ms: 12, backward_weight_ms: 12}"
    plain = train(tmp_path / "plain", CONFIG, *overrides, long)
    adapts = "adaptation={enabled: true, remaps: pipeline, delegates: any, worth: 0.1}"
    slow = SLOW_HOSTS.replace("500", "40").replace("gradient_bytes: 1000", "gradient_bytes: 4000")
    moved = train(tmp_path / "moved", CONFIG, *overrides, slow, long, adapts)
    assert moved.results() == plain.results()
    assert len(moved.events("remapped")) == len(moved.events("reopened")) == 1
    routes = [each["routes"]["0-1"] for each in moved.steps[-1]["replicas"]]
    assert sorted(routes) == ["delegated", "direct"]


SCRIPT = """
import json, sys
from pathlib import Path
import jaxmorph
from jaxmorph.models.gpt2 import build
import numpy as np

model = build(preset="tiny", width=16, num_layers=4, num_heads=2, vocab_size=32, sequence_length=8)
folder, data = Path(sys.argv[1]), int(sys.argv[2])
config = {
    "parallelism": {"data": data, "tensor": data},
    "data": {"sequence_length": 8},
    "batch": {"microbatches": 4, "microbatch_size": 2},
}
tokens = np.random.default_rng(0).integers(32, size=(8, 9))
batch = tokens[:, :-1], tokens[:, 1:]
with jaxmorph.Trainer(model, config) as trainer:
    losses = [trainer.step(batch).loss for _ in range(3)]
    losses.append(trainer.evaluate(batch))
    (folder / f"{data}_{trainer.rank}.json").write_text(json.dumps(losses))
"""


def test_a_script_has_replicas_of_stages_of_two_devices(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for ranks, data in ((1, 1), (4, 2)):
        done = jaxmorph("launch", "--stages", ranks, tmp_path / "script.py", tmp_path, data)
        assert done.returncode == 0, done.stderr
    alone, *others = (
        json.loads((tmp_path / name).read_text())
        for name in ("1_0.json", *(f"2_{rank}.json" for rank in range(4)))
    )
    for each in others:
        np.testing.assert_allclose(each, alone, rtol=2e-5)


MOVING = """
import json, sys
from pathlib import Path
import jax, numpy as np
import jaxmorph
from jaxmorph.models.gpt2 import build

model = build(preset="tiny", width=16, num_layers=4, num_heads=2, vocab_size=32, sequence_length=8)
out, is_slow = Path(sys.argv[1]), sys.argv[2] == "slow"
config = {
    "run": {"seed": 5, "dir": str(out)},
    "parallelism": {"stages": 2, "data": 2, "layers": "auto"},
    "data": {"sequence_length": 8},
    "batch": {"microbatches": 8, "microbatch_size": 1},
    "schedule": {"name": "zb-h2"},
}
if is_slow:
    hosts = [{"between": [1, 3], "latency_ms": 500, "from_step": 3}]
    config["adaptation"] = {"remaps": "any"}
    config["emulation"] = {"gradient_bytes": 1000, "bucket_bytes": 250, "hosts": hosts}

def batch(step):
    tokens = np.random.default_rng(step).integers(32, size=(8, 9))
    return tokens[:, :-1], tokens[:, 1:]

with jaxmorph.Trainer(model, config) as trainer:
    found, first = [], trainer.layers
    while trainer.next_step < 14:
        step = trainer.step(batch(trainer.next_step))
        found += [step.loss, step.grad_norm]
        assert trainer.plan is not None
        if step.step == 10:
            found.append(trainer.evaluate(batch(0)))
    moved = trainer.layers != first
    size = sum(leaf.size for leaf in jax.tree.leaves(trainer.params))
    (out / f"{trainer.rank}.json").write_text(json.dumps([found, moved, size]))
"""


def test_ranks_of_a_script_change_places(tmp_path):
    (tmp_path / "script.py").write_text(MOVING)
    results = {}
    for what in ("plain", "slow"):
        out = tmp_path / what
        done = jaxmorph("launch", "--stages", 4, tmp_path / "script.py", out, what)
        assert done.returncode == 0, done.stderr
        results[what] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]
    metrics, has_moved, sizes = zip(*results["slow"], strict=True)
    plain, never, sizes_before = zip(*results["plain"], strict=True)
    assert metrics == plain
    assert has_moved.count(True) == 2
    assert not any(never)
    assert sorted(sizes) == sorted(sizes_before)
    run = Run(tmp_path / "slow")
    assert [len(run.events(kind)) for kind in ("sum_slow", "remapped", "reopened")] == [1, 1, 1]
    assert [step["step"] for step in run.steps] == [*range(14)]


PACED = "emulation.accelerator={forward_ms: 5, backward_input_ms: 5, backward_weight_ms: 5}"


@pytest.mark.parametrize(
    ("number", "routes"), [(signal.SIGKILL, "direct"), (signal.SIGSTOP, "delegated")]
)
def test_a_rank_that_fails_is_named_by_its_number_in_the_run(tmp_path, monkeypatch, number, routes):
    """The first stage of replica 1, for which its other stages and its peers wait."""

    def send_signal(step, ranks):
        if step == 4:
            os.kill(ranks[2].process.pid, number)

    on_each_step(monkeypatch, send_signal)
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = jaxmorph(
        "train", tmp_path / "run.yaml", f"run.dir={tmp_path / 'out'}", REPLICAS, PACED,
        "run.steps=200", f"routes={{default: {routes}, reduction: {routes}}}",
        "timeouts={step_s: 4}", "checkpoint.every_steps=0", "evaluation={}",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 2 failed: ")


def train_again(out, *overrides):
    done = jaxmorph("train", "--resume", out, *overrides)
    assert done.returncode == 0, done.stderr
    return Run(out)


SLOW = "emulation.links=[{between: [0, 1], latency_ms: 40, from_step: 5, replica: 1}]"


def test_each_replica_plans_for_its_own_links(replicas, tmp_path):
    long = "emulation.accelerator={forward_ms: 12, backward_input_ms: 12, backward_weight_ms: 12}"
    overrides = "run.steps=14", REPLICAS, long, "batch.microbatches=16"
    plain = train(tmp_path / "plain", CONFIG, *overrides)
    adapts = "adaptation={enabled: true, worth: 0.25}"
    found = train(tmp_path / "found", CONFIG, *overrides, SLOW, adapts)
    assert found.results() == plain.results()
    require_same_arrays(states(found.out, 12), states(plain.out, 12))
    changed = found.events("plan_changed", "straggler_detected", "route_changed")
    assert {event["kind"] for event in changed} >= {"plan_changed", "straggler_detected"}
    assert {event["link"] for event in changed if event["link"]} == {"r1:0-1"}
    assert all("r1:" in event["detail"] for event in changed if not event["link"])
    first, second = zip(*(step["replicas"] for step in found.steps), strict=True)
    assert {each["schedule"] for each in first} == {"zb-h2"}
    assert (second[0]["schedule"], second[-1]["schedule"]) == ("zb-h2", "adaptive")
    assert {each["routes"]["0-1"] for each in first} == {"direct"}
    assert not (found.out / "links.json").exists()
    replayed = jaxmorph("replay", found.out)
    assert replayed.stdout.splitlines()[-1].endswith("decisions: the same as in the run")
    assert "straggler_detected    r1:0-1 " in replayed.stdout
    out = tmp_path / "replayed"
    other = jaxmorph("replay", found.out, "adaptation.worth=0.95", "--out", out)
    assert "; simulated from step" in other.stdout, other.stderr
    steps = Run(out).steps
    assert {step["replicas"][1]["schedule"] for step in steps} == {"zb-h2"}
    assert [step["loss"] for step in steps] == losses(found)
    assert not Run(out).events("plan_changed")
    again = train_again(found.out, "run.steps=16")
    (known,) = again.events("links_known")
    assert known["detail"].startswith("r1: ")
    assert [each["routes"]["0-1"] for each in again.steps[-1]["replicas"]] == [
        "direct", "delegated",
    ]  # fmt: skip
