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
from jaxmorph.training.layer_choice import choose_layers, chosen_before, cut_by_costs, keep_choice
from jaxmorph.training.run_checkpoints import RunCheckpoints
from jaxmorph.training.run_parts import load_parts

HEAVY_HEAD = LayerCosts(embed_ms=0.5, layer_ms=2.0, head_ms=5.0)
PACED = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}


class Rank(SoleRank):
    """One of several ranks: rank 0's messages are kept for the other ranks."""

    def __init__(self, rank, received=()):
        self.rank, self.num_ranks = rank, 2
        self.sent, self._received = [], list(received)

    def exchange(self, message, detail=b"", addressed=()):
        self.sent.append(message)
        return [message if self.rank == 0 else self._received.pop(0), {}]


def config_of(layers: Any = "auto", stages=2, chunks=1, schedule="zb-h2", accelerator=None):
    return check_config(
        {
            "model": {"preset": "tiny", "width": 16, "num_heads": 2, "num_layers": 8},
            "data": {"sequence_length": 8},
            "parallelism": {"stages": stages, "chunks": chunks, "layers": layers},
            "emulation": {"accelerator": accelerator},
            "schedule": {"name": schedule},
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
        (LayerCosts(4.0, 2.0, 6.0), 9, (3, 4, 2), "slowest stage 10 ms"),
        (LayerCosts(0.0, 2.0, 2.05), 8, (4, 4), "even: slowest stage 10"),  # hardly faster
        (LayerCosts(0.0, 2.0, 2.25), 8, (5, 3), "slowest stage 10"),
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
def test_rank_0_measures_and_all_agree(before, measure, cut):
    rank_0 = Rank(0)
    first = choose_layers(config_of(), rank_0, 8, measure, before)
    second = choose_layers(config_of(), Rank(1, received=rank_0.sent), 8, not_measured)
    assert counts(first) == cut
    assert first == second
    assert (first.reason == "as the run was cut before") is (before is not None)
    assert before or rank_0.sent[0] == {}


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


HEAVY_EMBEDDING = LayerCosts(5.0, 2.0, 0.0)
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
    keep_choice(tmp_path, config_of(layers=[5, 3]), LAYERS)
    assert chosen_before(tmp_path, config_of(), 8) is None
    keep_choice(tmp_path, config_of(), LAYERS)
    assert chosen_before(tmp_path, config_of(), 8) == (5, 3)
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
    keep_choice(tmp_path, config_of(), LAYERS)
    assert chosen_before(tmp_path, config, num_layers) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"stages": 2, "chunks": 1, "layers": [9, -1]})]
)
def test_an_unreadable_cut_is_replaced(tmp_path, text):
    (tmp_path / "layers.json").write_text(text)
    assert chosen_before(tmp_path, config_of(), 8) is None
