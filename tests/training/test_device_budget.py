"""A device that tells its memory bounds the stash where the configuration doesn't."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.stage.stage_functions import StashMemory
from jaxmorph.training.device_budget import (
    WithinDevices,
    budget_in_words,
    free_bytes,
    with_device_budget,
)


@dataclass
class Meeting:
    """Rank 0 of two; the other has told its part before."""

    other: dict[str, Any]
    rank: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)

    def exchange(self, message):
        self.told.append(message["value"])
        return [message, {"value": self.other}]


@dataclass(frozen=True)
class Device:
    """One that tells, or doesn't."""

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
    meeting = Meeting({"free_bytes": other, "least_bytes": least})
    made = with_device_budget(asked, cast(Rendezvous, meeting), trainer_on(statistics))
    assert made.first == made.new
    return made.first.schedule.max_stash_bytes, meeting.told


ENABLED = {"offload": {"enabled": True, "device_memory_fraction": 0.5}}
TELLS = {"bytes_limit": 1000, "bytes_in_use": 200}


def test_each_stage_gets_a_fraction_of_its_free_memory():
    told = {"free_bytes": 800, "least_bytes": 1}
    assert budget(config(**ENABLED), TELLS) == ((400, 250), [told])


@pytest.mark.parametrize("name", ["adaptive", "paper", "initial"])
def test_a_planned_schedule_keeps_to_it_without_offload(name):
    asked = config(schedule={"name": name}, offload={"device_memory_fraction": 0.1})
    caps, told = budget(asked, TELLS, least=70)
    assert told == [{"free_bytes": 800, "least_bytes": 60}]
    assert caps == (80, 70)  # a tenth, but never less than one microbatch needs


def test_a_budget_that_the_devices_have_set_is_told():
    asked = config(schedule={"name": "adaptive"}, offload={"device_memory_fraction": 0.5})
    meeting = Meeting({"free_bytes": 3 << 20, "least_bytes": 1})
    made = with_device_budget(asked, cast(Rendezvous, meeting), trainer_on(TELLS))
    assert budget_in_words(asked, made) == (
        "stashes may take 400 B, 1.5 MiB of what the devices have free"
    )
    capped = config(schedule={"name": "adaptive", "max_stash_bytes": 7})
    for same in (capped, asked):
        assert budget_in_words(same, WithinDevices(same, same)) == ""


def test_plans_replacing_a_fixed_schedule_keep_to_it():
    adapts = {"schedule": {"name": "zb-h2"}, "adaptation": {"enabled": True}}
    asked = config(**adapts, offload={"device_memory_fraction": 0.5})
    meeting = Meeting({"free_bytes": 500, "least_bytes": 1})
    made = with_device_budget(asked, cast(Rendezvous, meeting), trainer_on(TELLS))
    assert made.first == asked
    assert made.new.schedule.name == "zb-h2"
    assert made.new.schedule.max_stash_bytes == (400, 250)
    assert budget_in_words(asked, made) == (
        "stashes of new plans may take 400 B, 250 B of what the devices have free"
    )


@pytest.mark.parametrize("silent", [(None, 500), (TELLS, None)])
@pytest.mark.parametrize("sections", [ENABLED, {}])
def test_a_device_that_does_not_tell_gives_no_cap(sections, silent):
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
def test_nobody_asks_where_a_cap_exists_or_helps_nothing(sections):
    asked = config(**sections)
    assert budget(asked, TELLS) == (asked.schedule.max_stash_bytes, [])


def test_a_device_without_host_memory_is_refused():
    meeting = cast(Rendezvous, Meeting({}))
    says = r"^offload.enabled: got true, .* device of rank 0 has the memories device, and no pinned"
    with pytest.raises(UserError, match=says):
        with_device_budget(config(**ENABLED), meeting, trainer_on(TELLS, "device"))
    fixed = config(schedule={"name": "zb-h2"})
    with_device_budget(fixed, meeting, trainer_on(TELLS, "device"))


def test_what_is_free_is_what_jax_may_take_and_has_not():
    assert free_bytes(Device((("bytes_limit", 100), ("bytes_in_use", 30)))) == 70
    assert free_bytes(Device((("bytes_limit", 100),))) == 100
    assert free_bytes(Device((("bytes_in_use", 30),))) is None
    assert free_bytes(Device(None)) is None
