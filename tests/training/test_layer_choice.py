import json
from typing import Any

import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.stage.layer_costs import LayerCosts
from jaxmorph.training import run
from jaxmorph.training.layer_choice import (
    choose_layers,
    choose_placement,
    chosen_before,
    cut_by_costs,
    keep_choice,
)
from jaxmorph.training.run_checkpoints import RunCheckpoints
from jaxmorph.training.run_parts import load_parts


def costs_of(*sums_ms):
    """Embedding, layer and head, each with a third of its time in F, B and W."""
    return LayerCosts(*((sum_ms / 3,) * 3 for sum_ms in sums_ms))


HEAVY_HEAD = costs_of(0.5, 2.0, 5.0)
EQUAL = costs_of(0.0, 3.0, 0.0)
PACED = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}


class Rank(SoleRank):
    """One of several ranks: rank 0's messages are kept for the other ranks."""

    def __init__(self, rank, received=()):
        self.rank, self.num_ranks = rank, 2
        self.sent, self._received = [], list(received)

    def exchange(self, message, detail=b"", addressed=()):
        self.sent.append(message)
        return [message if self.rank == 0 else self._received.pop(0), {}]


def config_of(
    layers: Any = "auto", stages=2, chunks=1, schedule="zb-h2", accelerator=None, tensor=1, **named
):
    return check_config(
        {
            "model": {"preset": "tiny", "width": 16, "num_heads": 2, "num_layers": 8},
            "data": {"sequence_length": 8},
            "parallelism": {"stages": stages, "chunks": chunks, "layers": layers, "tensor": tensor},
            "emulation": {"accelerator": accelerator},
            "schedule": {"name": schedule, **named},
            "checkpoint": {"every_steps": 0},
        }
    )


def not_measured():
    raise AssertionError("nothing needs to be measured")


def counts(choice):
    return [len(layers) for layers in choice.layers]


@pytest.mark.parametrize(
    ("costs", "num_layers", "layers", "reason"),
    [
        (
            HEAVY_HEAD, 8, (5, 3),
            "slowest stage 11 ms a microbatch, 13 ms under the even cut 4 4; "
            "embedding 0.5, a layer 2, the head 5 ms",
        ),
        (costs_of(4.0, 2.0, 6.0), 9, (3, 4, 2), "slowest stage 10 ms"),
        (costs_of(0.0, 2.0, 2.05), 8, (4, 4), "even: slowest stage 10"),  # hardly faster
        (costs_of(0.0, 2.0, 2.25), 8, (5, 3), "slowest stage 10"),
    ],
)  # fmt: skip
def test_stages_with_a_heavy_end_get_fewer_layers(costs, num_layers, layers, reason):
    chosen, why = cut_by_costs(costs, num_layers, len(layers))
    assert chosen == layers
    assert why.startswith(reason)


@pytest.mark.parametrize(
    ("before", "measure", "cut"),
    [(None, lambda: HEAVY_HEAD, [5, 3]), ((6, 2), not_measured, [6, 2])],
)
def test_rank_0_measures_and_all_agree(tmp_path, before, measure, cut):
    if before:
        keep_choice(tmp_path, config_of(), before)
    rank_0 = Rank(0)
    first = choose_layers(config_of(), rank_0, 8, measure, tmp_path)
    second = choose_layers(config_of(), Rank(1, received=rank_0.sent), 8, not_measured)
    assert counts(first) == cut
    assert first == second
    assert (first.reason == "as the run was cut before") is (before is not None)
    assert chosen_before(tmp_path, config_of(), 8) == tuple(cut)
    assert rank_0.sent[0] == {}


@pytest.mark.parametrize(
    ("config", "cut", "reason"),
    [
        (config_of(accelerator=PACED), [4, 4], "even: paced ops last as long"),
        (config_of(chunks=2, schedule="interleaved"), [2, 2, 2, 2], "even: a stage's chunks"),
        (config_of(layers="even"), [4, 4], ""),
        (config_of(layers=[3, 5]), [3, 5], ""),
        (config_of(stages=8), [1] * 8, ""),
        (config_of(stages=1), [8], ""),
    ],
)
def test_nothing_is_measured_without_a_choice(config, cut, reason):
    choice = choose_layers(config, SoleRank(), 8, not_measured)
    assert counts(choice) == cut
    assert choice.reason.startswith(reason)
    assert bool(choice.reason) == bool(reason)


def test_too_many_stages_are_refused_before_measuring():
    with pytest.raises(UserError, match=r"parallelism.stages: got 9, expected between 1 and"):
        choose_layers(config_of(stages=9), SoleRank(), 8, not_measured)


def open_config(**settings):
    """A configuration that leaves the placement open."""
    return config_of("even", schedule="adaptive", placement="auto", **settings)


def model_of(config):
    return load_parts(config).model


def test_a_v_is_chosen_where_its_step_is_shorter():
    """Two chunks fill and drain the pipeline in half the time; with equal costs it is exact."""
    config, rank_0 = open_config(stages=4), Rank(0)
    first = choose_placement(config, rank_0, model_of(config), lambda: EQUAL)
    # 8 microbatches of F, B and W of 2 ms each; stage 3 begins after 3 F of 2 ms, or of 1 ms.
    reason = "zb-v: steps of 54 ms predicted for adaptive, 51 for zb-v"
    assert first == (config.placed(in_a_v=True), reason)
    second = choose_placement(config, Rank(1, rank_0.sent), model_of(config), not_measured)
    assert second == first


@pytest.mark.parametrize(
    ("config", "costs", "reason"),
    [
        # One rank has both ends.
        (open_config(), costs_of(3.0, 1.0, 6.0), "adaptive: steps of "),
        (open_config(stages=8), EQUAL, "adaptive: zb-v does not fit: parallelism.chunks"),
        (open_config(max_live=1), EQUAL, "adaptive: zb-v does not fit: schedule.max_live"),
        (open_config(tensor=2), None, "adaptive: layers are measured on one device"),
        (open_config(stages=1), None, ""),
    ],
)
def test_one_stage_after_the_other_where_that_is_shorter_or_all_there_is(config, costs, reason):
    measure = not_measured if costs is None else lambda: costs
    placed, why = choose_placement(config, SoleRank(), model_of(config), measure)
    assert placed == config.placed(in_a_v=False)
    assert why.startswith(reason)
    assert bool(why) == bool(reason)


def test_paced_ops_need_no_measurement():
    config = open_config(accelerator=PACED, stages=4)
    placed, _ = choose_placement(config, SoleRank(), model_of(config), not_measured)
    assert placed.schedule.name == "zb-v"


def test_a_run_that_resumes_keeps_the_checkpoint_s_placement(tmp_path, monkeypatch):
    was = open_config(stages=2).placed(in_a_v=True)
    manifest = Manifest(7, tuple(range(at, at + 2) for at in (0, 2, 4, 6)), 256, (), was)
    monkeypatch.setattr(CheckpointFolder, "manifest", lambda folder, step: manifest)
    config = open_config(stages=2)
    checkpoints = RunCheckpoints(config, tmp_path, 7)
    monkeypatch.setattr(run, "measured_on_rank_0", lambda *_: not_measured())
    config = checkpoints.starting_config
    begun = run.load_run(config, SoleRank(), model_of(config), checkpoints)
    assert begun.of_all == was
    assert counts(begun.cut) == [2, 2, 2, 2]


HEAVY_EMBEDDING = costs_of(5.0, 2.0, 0.0)
LAYERS = (range(5), range(5, 8))


@pytest.mark.parametrize("first_step", [0, 7])
def test_a_restart_keeps_the_measured_cut(tmp_path, monkeypatch, first_step):
    """With a checkpoint of one stage to resume from, or none."""
    manifest = Manifest(7, (range(8),), 256, (), config_of(stages=1))
    monkeypatch.setattr(CheckpointFolder, "manifest", lambda folder, step: manifest)
    measured = [HEAVY_HEAD, HEAVY_EMBEDDING]
    monkeypatch.setattr(run, "measured_on_rank_0", lambda *_: measured.pop(0))

    def launch(restarts):
        checkpoints = RunCheckpoints(config_of(), tmp_path, first_step)
        config = checkpoints.starting_config
        parts = load_parts(config)
        return run.load_run(
            config,
            SoleRank(),
            parts.model,
            checkpoints,
            microbatch=parts.microbatch,
            restarts=restarts,
        )

    launches = [launch(restarts) for restarts in (0, 1)]
    assert [launch.cut.layers for launch in launches] == [LAYERS, LAYERS]
    assert measured == [HEAVY_EMBEDDING]


def test_only_a_chosen_cut_is_kept(tmp_path):
    choose_layers(config_of(layers=[5, 3]), SoleRank(), 8, not_measured, tmp_path)
    assert not [*tmp_path.iterdir()]
    choose_layers(config_of(), SoleRank(), 8, lambda: HEAVY_HEAD, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["layers.json"]


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [
        (config_of(stages=4), 8),
        (config_of(stages=1), 8),
        (config_of(stages=1, chunks=2, schedule="interleaved"), 8),
        (config_of(), 9),
    ],
)
def test_other_stages_get_a_new_cut(tmp_path, config, num_layers):
    keep_choice(tmp_path, config_of(), (5, 3))
    assert chosen_before(tmp_path, config, num_layers) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"stages": 2, "chunks": 1, "layers": [9, -1]})]
)
def test_an_unreadable_cut_is_replaced(tmp_path, text):
    (tmp_path / "layers.json").write_text(text)
    assert chosen_before(tmp_path, config_of(), 8) is None
