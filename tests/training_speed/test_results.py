import os

import numpy as np
import pytest

from benchmarks.training_speed.contenders import (
    OF_JAX,
    OF_TORCH,
    PLAIN,
    STAGE,
    STAGES_1F1B,
    TORCH,
    TORCH_1F1B,
)
from benchmarks.training_speed.results import bars, speeds
from benchmarks.training_speed.turns import Turn
from benchmarks.training_speed.worker import WorkerOptions, confine
from benchmarks.training_speed.workload import Workload, read_batches, write_batches

SECONDS = {
    PLAIN: (1.0, 2.0, 1.0),
    STAGE: (1.0, 2.5, 1.25),  # the machine was busy in the second round: ratios 1, 0.8, 0.8
    STAGES_1F1B: (0.5, 1.5625, 0.625),
    TORCH: (4.0, 4.0, 4.0),
    TORCH_1F1B: (2.5, 2.5, 2.5),
}
RAN = [each for each in (*OF_JAX, *OF_TORCH) if each.name in SECONDS]


def turns(seconds, last_loss=2.0):
    return [Turn(each, each / 2, (3.0, last_loss)) for each in seconds]


def all_turns():
    return {name: turns(seconds) for name, seconds in SECONDS.items()}


def test_speeds_are_medians_and_ratios_are_of_the_same_round():
    found = {row.name: row for row in speeds(RAN, all_turns(), tokens=1000)}
    assert found[STAGE].tokens_per_s == 800
    assert found[STAGE].of_alone is None
    assert found[STAGE].cpu_us == pytest.approx(625)
    assert found[STAGES_1F1B].tokens_per_s == 1600
    assert found[STAGES_1F1B].of_alone == pytest.approx(1.0)
    assert found[TORCH_1F1B].of_alone == pytest.approx(0.8)


def test_bars_hold_one_stage_against_the_plain_loop_and_two_against_torchs_two():
    found = {bar.claim: bar for bar in bars(RAN, all_turns())}
    plain = found[f"{STAGE} / {PLAIN}"]
    assert (plain.value, plain.holds) == (0.8, False)
    pipelines = found[f"per core of alone: {STAGES_1F1B} / {TORCH_1F1B}"]
    assert (pipelines.value, pipelines.holds) == (pytest.approx(1.25), True)
    assert len(found) == 3


def test_without_torch_nothing_is_held_against_it():
    own = {name: own for name, own in all_turns().items() if "torch" not in name}
    ran = [each for each in RAN if each.name in own]
    assert [bar.holds for bar in bars(ran, own)] == [False, True]


def test_a_contender_that_trains_something_else_is_noticed():
    told = {**all_turns(), TORCH: turns(SECONDS[TORCH], last_loss=2.1)}
    *_, losses = bars(RAN, told)
    assert losses.value == pytest.approx(0.1)
    assert not losses.holds


def test_options_survive_the_command_line(tmp_path):
    options = WorkerOptions(
        "socket", Workload(width=64), tmp_path / "b", (3, 5), "1F1B", tmp_path / "p", 1, 2, tmp_path
    )
    assert WorkerOptions.parse(options.words()) == options
    assert options.own_cores == (5,)


@pytest.mark.parametrize(("rank", "cores"), [(0, (3, 7)), (1, (5,))])
def test_threads_are_as_many_as_a_process_has_cores_whatever_its_launcher_says(
    rank, cores, monkeypatch, tmp_path
):
    confined = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *told: confined.append(told), raising=False)
    monkeypatch.setenv("NPROC", "16")
    options = WorkerOptions(
        "", Workload(), tmp_path, (3, 5, 7), "", tmp_path, rank, num_ranks=2, meeting=tmp_path
    )
    confine(options)
    assert confined == [(0, cores)]
    assert os.environ["NPROC"] == str(len(cores))


def test_targets_are_the_tokens_that_follow(tmp_path):
    workload = Workload(sequence_length=16, microbatches=3)
    write_batches(tmp_path / "batches.npy", workload, num_steps=2)
    batches = [*read_batches(tmp_path / "batches.npy")]
    assert len(batches) == 2
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (3, 2, 16)
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens[..., 1:], targets[..., :-1])
    assert not np.array_equal(batches[0][0], batches[1][0])
