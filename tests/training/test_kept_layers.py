"""A run's next life is cut as the one before, whatever it would measure."""

import json
from typing import Any

import pytest

from jaxmorph import train
from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import check_config
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.stage.layer_costs import LayerCosts
from jaxmorph.training.carried_over import FILE, chosen_before, keep_choice

HEAVY_HEAD, HEAVY_EMBEDDING = LayerCosts(0.0, 2.0, 5.0), LayerCosts(5.0, 2.0, 0.0)
LAYERS = (range(5), range(5, 8))


def config_of(layers: Any = "auto", stages=2, chunks=1, schedule="zb-h2"):
    return check_config(
        {
            "model": {"preset": "tiny", "width": 16, "num_heads": 2, "num_layers": 8},
            "data": {"sequence_length": 8},
            "parallelism": {"stages": stages, "chunks": chunks, "layers": layers},
            "schedule": {"name": schedule},
            "checkpoint": {"every_steps": 0},
        }
    )


@pytest.mark.parametrize("first_step", [0, 7])
def test_a_life_after_a_failure_keeps_the_cut_that_the_one_before_has_measured(
    tmp_path, monkeypatch, first_step
):
    """With a checkpoint of one stage to go on from, or none at all."""
    manifest = Manifest(7, (range(8),), 256, (), config_of(stages=1))
    monkeypatch.setattr(CheckpointFolder, "manifest", lambda folder, step: manifest)
    measured = [HEAVY_HEAD, HEAVY_EMBEDDING]
    monkeypatch.setattr(train, "measured_on_rank_0", lambda *_: measured.pop(0))
    lives = [
        train._load(config_of(), SoleRank(), tmp_path, first_step, restarts) for restarts in (0, 1)
    ]
    assert [life.cut.layers for life in lives] == [LAYERS, LAYERS]
    assert measured == [HEAVY_EMBEDDING]


def test_only_a_cut_that_was_to_be_chosen_is_kept(tmp_path):
    keep_choice(tmp_path, config_of(layers=[5, 3]), LAYERS)
    assert chosen_before(tmp_path, config_of(), 8) is None
    keep_choice(tmp_path, config_of(), LAYERS)
    assert chosen_before(tmp_path, config_of(), 8) == (5, 3)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [
        (config_of(stages=4), 8),
        (config_of(stages=1), 8),
        (config_of(stages=1, chunks=2, schedule="interleaved"), 8),
        (config_of(), 9),
    ],
)
def test_other_stages_are_cut_anew(tmp_path, config, num_layers):
    keep_choice(tmp_path, config_of(), LAYERS)
    assert chosen_before(tmp_path, config, num_layers) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"stages": 2, "chunks": 1, "layers": [9, -1]})]
)
def test_what_cannot_be_is_cut_anew(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert chosen_before(tmp_path, config_of(), 8) is None
