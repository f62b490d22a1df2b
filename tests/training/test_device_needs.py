"""What stages are said to keep on their devices, against stages that are built."""

import gc
from contextlib import closing
from dataclasses import replace

import jax
import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import cut_layers
from jaxmorph.training.device_needs import needs_of_step
from jaxmorph.training.model_factory import build_model
from jaxmorph.training.stage_settings import stage_settings

VOCABULARY = 16


def config_of(stages, chunks=1, stash="full", compute="float32", **schedule):
    return Config.model_validate(
        {
            "model": {"width": 16, "num_heads": 2, "num_layers": 4},
            "data": {"sequence_length": 8},
            "batch": {"microbatches": 4, "microbatch_size": 2},
            "parallelism": {"stages": stages, "chunks": chunks},
            "schedule": {"name": "interleaved" if chunks > 1 else "zb-h1", **schedule},
            "precision": {"compute": compute},
            "stash": stash,
        }
    )


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def built(config, model, rank):
    """A rank's stage, by itself."""
    cut = config.parallelism
    layers = cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)
    settings = replace(stage_settings(config, layers, rank), direct=frozenset())
    return StageTrainer(model, settings, rank, alone=stage_submesh(make_mesh(1), 0))


@pytest.mark.parametrize(
    "config",
    [
        config_of(2),
        config_of(2, compute="bfloat16", stash="recompute"),
        config_of(2, chunks=2, compute="bfloat16"),
    ],
    ids=["float32", "bfloat16-recompute", "bfloat16-chunks"],
)
def test_it_is_what_a_stage_holds_once_it_is_built(config):
    model = build_model(config, VOCABULARY)
    for rank, needs in enumerate(needs_of_step(config, model).stages):
        before = live_bytes()
        with closing(built(config, model, rank)) as trainer:
            assert live_bytes() - before == needs.state_bytes
            assert trainer.stash_memory == needs.stash
        del trainer


def test_stashes_are_those_of_the_planned_order():
    config = config_of(2)
    needs = needs_of_step(config, build_model(config, VOCABULARY))
    first, last = needs.stages
    # ZB-H1 on two stages: one microbatch runs ahead of the last stage, and W comes right after B.
    assert needs.plan.schedule.peak_live("B") == (2, 1)
    assert needs.stash_bytes[0] >= 2 * first.stash.after_forward_bytes
    assert needs.stash_bytes[1] >= last.stash.after_backward_input_bytes
    assert needs.message_bytes == 2 * 8 * 16 * 4


def test_more_microbatches_under_way_keep_more_and_one_stage_sends_nothing():
    some, all_ = (
        needs_of_step(config, build_model(config, VOCABULARY))
        for config in (config_of(1, max_live=1), config_of(1, name="gpipe"))
    )
    (stage,) = some.stages
    assert all_.stash_bytes == (4 * stage.stash.after_forward_bytes,)
    assert some.stash_bytes < all_.stash_bytes
    assert some.message_bytes == 0


def test_a_cap_that_cannot_be_kept_is_a_users_mistake():
    config = config_of(2, max_stash_bytes=1000)
    with pytest.raises(UserError, match=r"schedule\.max_stash_bytes\[0\]: got 1,000 bytes"):
        needs_of_step(config, build_model(config, VOCABULARY))
