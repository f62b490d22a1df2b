"""What stages are said to keep on their devices, against stages that are built."""

import gc
from contextlib import closing
from dataclasses import astuple, replace

import jax
import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.ops import Op
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import cut_layers
from jaxmorph.training.device_needs import needs_of_step
from jaxmorph.training.model_factory import build_model
from jaxmorph.training.open_stage import stage_settings

VOCABULARY = 16


def config_of(
    stages, chunks=1, layers: str | list[int] = "even", stash="full", compute="float32", **schedule
):
    return Config.model_validate(
        {
            "model": {"width": 16, "num_heads": 2, "num_layers": 4 if layers == "even" else 6},
            "data": {"sequence_length": 8},
            "batch": {"microbatches": 4, "microbatch_size": 2},
            "parallelism": {"stages": stages, "chunks": chunks, "layers": layers},
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
    ("config", "rank"),
    [
        (config_of(2), 0),
        pytest.param(
            config_of(2, compute="bfloat16", stash="recompute"), 1, marks=pytest.mark.long
        ),
        pytest.param(config_of(2, chunks=2, compute="bfloat16"), 0, marks=pytest.mark.long),
    ],
    ids=["float32", "bfloat16-recompute", "bfloat16-chunks"],
)
def test_it_is_what_a_stage_holds_once_it_is_built(config, rank):
    model = build_model(config, VOCABULARY)
    needs = needs_of_step(config, model).stages[rank]
    before = live_bytes()
    with closing(built(config, model, rank)) as trainer:
        assert live_bytes() - before == needs.state_bytes
        assert trainer.stash_memory == needs.stash


def test_stashes_are_those_of_the_planned_order():
    config = config_of(2)
    needs = needs_of_step(config, build_model(config, VOCABULARY))
    first, last = (stage.stash for stage in needs.stages)
    # On the first stage: F0 F1 B0 F2 B1 W0 ...; on the last: F0 B0 F1 B1 W0 F2 ...
    assert needs.plan.schedule.peak_live("W") == (2, 2)
    assert needs.stash_bytes == (
        max(2 * first.after_forward_bytes, sum(astuple(first))),
        max(sum(astuple(last)), 2 * last.after_backward_input_bytes),
    )
    assert needs.message_bytes == 2 * 8 * 16 * 4


def test_each_chunk_counts_with_what_it_keeps_itself():
    few, many = (
        needs_of_step(config, build_model(config, VOCABULARY)).stages[0]
        for config in (config_of(2, chunks=2, layers=cut) for cut in ([1, 1, 1, 3], [3, 1, 1, 1]))
    )
    twice_the_first = [Op.parse(word) for word in ["F0", "F1", "BW0", "1.F0", "BW1", "1.BW0"]]
    for stage in (few, many):
        assert stage.peak_stash_bytes(twice_the_first) == max(
            2 * stage.stashes[0].after_forward_bytes,
            stage.stash.after_forward_bytes,
        )
    assert few.peak_stash_bytes(twice_the_first) < many.peak_stash_bytes(twice_the_first)


def test_more_microbatches_under_way_keep_more_and_one_stage_sends_nothing():
    some, all_ = (
        needs_of_step(config, build_model(config, VOCABULARY))
        for config in (config_of(1), config_of(1, name="gpipe"))
    )
    (stage,) = some.stages
    assert all_.stash_bytes == (4 * stage.stash.after_forward_bytes,)
    assert some.stash_bytes == (max(astuple(stage.stash)),)
    assert some.message_bytes == 0


def test_a_plan_keeps_within_what_a_device_has_free_beside_the_state():
    config = config_of(2, name="adaptive")
    model = build_model(config, VOCABULARY)
    unbounded = needs_of_step(config, model)
    state_bytes = max(stage.state_bytes for stage in unbounded.stages)
    room = 2 * max(max(astuple(stage.stash)) for stage in unbounded.stages)
    assert max(unbounded.stash_bytes) > room
    bounded = needs_of_step(config, model, device_bytes=state_bytes + int(room / 0.8) + 1)
    assert bounded.stash_bytes < unbounded.stash_bytes
    assert bounded.stash_bytes[0] <= room
    fixed = config_of(2)
    assert needs_of_step(fixed, model, device_bytes=1).plan == needs_of_step(fixed, model).plan


def test_a_cap_that_cannot_be_kept_is_a_users_mistake():
    config = config_of(2, max_stash_bytes=1000)
    with pytest.raises(UserError, match=r"schedule\.max_stash_bytes\[0\]: got 1,000 bytes"):
        needs_of_step(config, build_model(config, VOCABULARY))
