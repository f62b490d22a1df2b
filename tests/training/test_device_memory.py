"""Caps from free memory, and forecasts against stages that are built."""

import gc
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import jax
import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.placement import Replica
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.stage_functions import StashMemory
from jaxmorph.training.device_memory import (
    WithinDevices,
    budget_in_words,
    free_bytes,
    needs_of_step,
    with_device_budget,
)
from jaxmorph.training.model_factory import build_model
from jaxmorph.training.open_stage import stage_settings


@dataclass
class Exchange:
    """Rank 0 of two, with the other rank's reply."""

    other: tuple[int | None, int]
    rank: int = 0
    sent: list[tuple[int | None, int]] = field(default_factory=list)

    def exchange(self, message):
        self.sent.append(message["value"])
        return [message, {"value": self.other}]


@dataclass(frozen=True)
class Device:
    """A device that reports its memory, or not."""

    statistics: tuple[tuple[str, int], ...] | None
    memories: tuple[str, ...] = ("device", "pinned_host")

    def addressable_memories(self):
        return [SimpleNamespace(kind=kind) for kind in self.memories]

    def memory_stats(self):
        return self.statistics and dict(self.statistics)


def trainer_on(statistics, *memories) -> StageTrainer:
    device = Device(statistics and tuple(statistics.items()), memories or Device.memories)
    own = SimpleNamespace(device=device, stash_memory=StashMemory(30, 60))
    return cast(StageTrainer, own)


def config(**sections) -> Config:
    return Config.model_validate({"parallelism": {"stages": 2}, **sections})


def budget(asked: Config, statistics, other: int | None = 500, least: int = 1):
    exchange = Exchange((other, least))
    made = with_device_budget(asked, cast(Rendezvous, exchange), trainer_on(statistics))
    assert made.for_first_plan == made.for_later_plans
    return made.for_first_plan.schedule.max_stash_bytes, exchange.sent


ENABLED = {"offload": {"enabled": True, "device_memory_fraction": 0.5}}
REPORTED = {"bytes_limit": 1000, "bytes_in_use": 200}


def test_each_stage_is_capped_by_its_free_memory():
    sent = (800, 1)
    assert budget(config(**ENABLED), REPORTED) == ((400, 250), [sent])


@pytest.mark.parametrize("name", ["adaptive", "paper", "initial"])
def test_planned_schedules_keep_the_cap(name):
    asked = config(schedule={"name": name}, offload={"device_memory_fraction": 0.1})
    caps, sent = budget(asked, REPORTED, least=70)
    assert sent == [(800, 60)]
    assert caps == (80, 70)  # a tenth, but never less than one microbatch needs


def test_a_cap_leaves_room_for_the_group_of_one_w():
    asked = config(schedule={"weight_group": 4}, offload={"device_memory_fraction": 0.1})
    assert budget(asked, REPORTED) == ((240, 50), [(800, 240)])


def test_a_budget_from_devices_is_reported():
    asked = config(schedule={"name": "adaptive"}, offload={"device_memory_fraction": 0.5})
    exchange = Exchange((3 << 20, 1))
    made = with_device_budget(asked, cast(Rendezvous, exchange), trainer_on(REPORTED))
    assert budget_in_words(asked, made) == (
        "stashes may take 400 B, 1.5 MiB of what the devices have free"
    )
    capped = config(schedule={"name": "adaptive", "max_stash_bytes": 7})
    for same in (capped, asked):
        assert budget_in_words(same, WithinDevices(same, same)) == ""


def test_later_plans_keep_the_cap():
    adapts = {"schedule": {"name": "zb-h2"}, "adaptation": {"enabled": True}}
    asked = config(**adapts, offload={"device_memory_fraction": 0.5})
    exchange = Exchange((500, 1))
    made = with_device_budget(asked, cast(Rendezvous, exchange), trainer_on(REPORTED))
    assert made.for_first_plan == asked
    assert made.for_later_plans.schedule.name == "zb-h2"
    assert made.for_later_plans.schedule.max_stash_bytes == (400, 250)
    assert budget_in_words(asked, made) == (
        "stashes of new plans may take 400 B, 250 B of what the devices have free"
    )


@pytest.mark.parametrize("silent", [(None, 500), (REPORTED, None)])
@pytest.mark.parametrize("sections", [ENABLED, {}])
def test_unknown_memory_gives_no_cap(sections, silent):
    assert budget(config(**sections), *silent)[0] is None


@pytest.mark.parametrize(
    "sections",
    [
        {"schedule": {"name": "zb-h2"}},
        {"schedule": {"max_live": 3}},
        {**ENABLED, "schedule": {"max_live": 3}},
        {**ENABLED, "schedule": {"max_stash_bytes": 7}},
    ],
)
def test_memory_is_not_queried_without_need(sections):
    asked = config(**sections)
    assert budget(asked, REPORTED) == (asked.schedule.max_stash_bytes, [])


def test_a_device_without_host_memory_is_refused():
    exchange = cast(Rendezvous, Exchange((None, 1)))
    says = r"^offload.enabled: got true, .* device of rank 0 has no pinned_host memory"
    with pytest.raises(UserError, match=says):
        with_device_budget(config(**ENABLED), exchange, trainer_on(REPORTED, "device"))
    fixed = config(schedule={"name": "zb-h2"})
    with_device_budget(fixed, exchange, trainer_on(REPORTED, "device"))


def test_free_memory_is_limit_minus_use():
    assert free_bytes(Device((("bytes_limit", 100), ("bytes_in_use", 30)))) == 70
    assert free_bytes(Device((("bytes_limit", 100),))) == 100
    assert free_bytes(Device((("bytes_in_use", 30),))) is None
    assert free_bytes(Device(None)) is None


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
    replica = Replica(0, cut.data)
    settings = replace(stage_settings(config, layers, rank, replica=replica), direct=frozenset())
    return StageTrainer(model, settings, rank, alone=stage_submesh(make_mesh(1), 0))


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        pytest.param(config_of(2), 0, marks=[pytest.mark.long, pytest.mark.in_ci]),
        pytest.param(
            config_of(2, compute="bfloat16", stash="recompute"), 1, marks=pytest.mark.long
        ),
        pytest.param(config_of(2, chunks=2, compute="bfloat16"), 0, marks=pytest.mark.long),
    ],
    ids=["float32", "bfloat16-recompute", "bfloat16-chunks"],
)
def test_forecast_equals_a_built_stage(config, rank):
    model = build_model(config, VOCABULARY)
    needs = needs_of_step(config, model).stages[rank]
    before = live_bytes()
    with closing(built(config, model, rank)) as trainer:
        assert live_bytes() - before == needs.state_bytes
        assert trainer.stash_memory == needs.stash


def test_a_divided_optimizer_is_forecast_as_it_is_built():
    whole = config_of(1)
    divided = whole.model_copy(
        update={
            "parallelism": whole.parallelism.model_copy(update={"data": 2}),
            "optimizer": whole.optimizer.model_copy(update={"shard": "data"}),
        }
    )
    model = build_model(whole, VOCABULARY)
    (needs,), (undivided,) = (needs_of_step(each, model).stages for each in (divided, whole))
    assert needs.optimizer_bytes < 0.51 * undivided.optimizer_bytes
    with closing(built(divided, model, 0)) as trainer:
        state = jax.tree.leaves([part["optimizer"] for part in trainer.state])
        assert sum(leaf.nbytes for leaf in state) == needs.optimizer_bytes


def test_stashes_follow_the_planned_order():
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


def test_a_group_of_w_has_a_layers_gradients_of_all_its_microbatches():
    model = build_model(config_of(1), VOCABULARY)
    (single,), (grouped,) = (
        needs_of_step(config_of(1, weight_group=group), model).stages for group in (1, 4)
    )
    assert grouped.layers == single.layers
    of_a_layer = sum(4 * leaf.size for leaf in jax.tree.leaves(model.init_layer(jax.random.key(0))))
    assert grouped.temporary_bytes == single.temporary_bytes + 3 * of_a_layer


def test_each_chunk_counts_its_own_stash():
    few, many = (
        needs_of_step(config, build_model(config, VOCABULARY)).stages[0]
        for config in (config_of(2, chunks=2, layers=cut) for cut in ([1, 1, 1, 3], [3, 1, 1, 1]))
    )
    twice_the_first = [Op.parse(word) for word in ["F0", "F1", "BW0", "1.F0", "BW1", "1.BW0"]]
    for stage in (few, many):
        assert stage.peak_stash_bytes(twice_the_first) == max(
            2 * stage.stashes[0].after_forward_bytes, stage.stash.after_forward_bytes
        )
    assert few.peak_stash_bytes(twice_the_first) < many.peak_stash_bytes(twice_the_first)


def test_more_live_microbatches_need_more_memory():
    some, all_ = (
        needs_of_step(config, build_model(config, VOCABULARY))
        for config in (config_of(1), config_of(1, name="gpipe"))
    )
    (stage,) = some.stages
    assert all_.stash_bytes == (4 * stage.stash.after_forward_bytes,)
    assert some.stash_bytes == (max(astuple(stage.stash)),)
    assert some.message_bytes == 0


def test_a_plan_fits_beside_the_state():
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
