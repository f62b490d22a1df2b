"""Plans keep within a limit on host memory, and say what it costs; no rank is started."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.link_state import LinkHealth
from jaxmorph.control.offload_planning import offloaded_bytes
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.control.verdicts import Evidence, Verdict
from jaxmorph.copies.backends import PayloadShape
from jaxmorph.errors import UserError
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.program.slots_needed import HostRoom, slots_needed
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import CopyCosts, LinkDelay, StageCosts, StashBytes, chain_links
from jaxmorph.training.host_memory import agree_on_host_room, forecast, host_room, room_in_words
from jaxmorph.training.plan_in_force import agree_on_plan, plan_step
from jaxmorph.training.planning_client import Begin, RunToPlan
from jaxmorph.training.planning_process import CandidatePlanner

GIB, MIB = 2**30, 2**20


def config(stages, microbatches, host_gib=None, **sections) -> Config:
    return Config.model_validate(
        {
            "parallelism": {"stages": stages},
            "batch": {"microbatches": microbatches},
            "limits": {"host_gib": host_gib},
            "checkpoint": {"every_steps": 0},
            **sections,
        }
    )


def payloads(stages, shape):
    message = PayloadShape(shape, jnp.dtype(jnp.bfloat16))
    ends = [(at, at + 1) for at in range(stages - 1)]
    down = {Channel(Payload.ACTIVATION, lower, upper): message for lower, upper in ends}
    return down | {Channel(Payload.GRADIENT, upper, lower): message for lower, upper in ends}


def room_of(asked: Config, shape=(16, 1024, 2048), copies=None) -> HostRoom:
    stages = asked.parallelism.stages
    links = possible_links(stages)
    return host_room(asked, payloads(stages, shape), links, copies or [0] * stages)


def slow_in_the_middle(stages, latency_ms) -> Profile:
    middle = Link(stages // 2 - 1, stages // 2)
    links = chain_links([1.0] * (stages - 1)) | {middle: LinkDelay(latency_ms, latency_ms)}
    return Profile(StageCosts.uniform(stages, 10.0, 10.0, 10.0), links)


def most_taken(plan, profile, room):
    needed = slots_needed(lower_step(plan.schedule, profile, plan.routes))
    stages = plan.schedule.num_stages
    return [max(room.taken_bytes(slots, stages)) for slots in (needed, room.slots_that_fit(needed))]


def test_sixteen_stages_keep_within_four_gib_a_rank():
    """All links delegated, one of them slow; messages of 64 MiB, 256 microbatches."""
    asked = config(16, 256, host_gib=4, routes={"default": "delegated"})
    profile, room = slow_in_the_middle(16, 60.0), room_of(asked)
    assert set(room.slot_bytes.values()) == {64 * MIB}
    free, limited = (plan_step(asked, profile, 0, each) for each in (None, room))
    assert most_taken(free, profile, room)[0] > 4 * GIB
    assert most_taken(limited, profile, room)[1] <= 4 * GIB
    assert limited.predicted_step_s <= 1.01 * free.predicted_step_s


def test_the_cost_of_few_slots_is_predicted_and_told():
    asked = config(4, 24, host_gib=0.6, routes={"default": "delegated"})
    profile, room = slow_in_the_middle(4, 60.0), room_of(asked)
    free, limited = (plan_step(asked, profile, 0, each) for each in (None, room))
    assert limited.predicted_step_s > 1.01 * free.predicted_step_s
    assert "with 614.4 MiB a rank for slots" in limited.reason
    assert f"{1e3 * free.predicted_step_s:.1f} with " in limited.reason
    in_force = agree_on_plan(asked, SoleRank(), profile, 0, room)
    assert in_force.scarce
    assert in_force.slots == room.slots_that_fit(in_force.slots)
    simulated = in_force.simulate(profile).makespan_ms
    assert simulated == pytest.approx(1e3 * in_force.plan.predicted_step_s)
    assert simulated > replace(in_force, scarce={}).simulate(profile).makespan_ms
    assert room_in_words(in_force, room).startswith(
        "within limits.host_gib a rank has at most 512.0 MiB of slots, where its plan would use "
    )


def test_evaluations_take_no_slots_that_training_steps_need():
    asked = config(4, 24, host_gib=0.6, routes={"default": "delegated"})
    profile, room = slow_in_the_middle(4, 60.0), room_of(asked)
    trains = agree_on_plan(asked, SoleRank(), profile, 0, room)
    both = trains.with_slots_to_evaluate().with_slots_that_fit(room)
    assert both.scarce == trains.scarce
    assert all(both.slots[channel] >= slots for channel, slots in trains.slots.items())
    assert both.slots != trains.with_slots_to_evaluate().slots  # they don't fit
    assert max(room.taken_bytes(both.slots, 4)) <= 0.6 * GIB
    assert room_in_words(both, room) == room_in_words(trains, room)


def test_without_a_limit_plans_are_the_same():
    asked = config(4, 24, routes={"default": "delegated"})
    profile, room = slow_in_the_middle(4, 60.0), room_of(asked)
    assert room.rank_bytes is None
    free, unlimited = (agree_on_plan(asked, SoleRank(), profile, 0, each) for each in (None, room))
    assert free == unlimited
    assert not free.scarce
    assert room_in_words(free, room) == ""


def test_a_forecast_tells_what_there_would_be_without_the_limit():
    profile = slow_in_the_middle(4, 60.0)
    asked = config(4, 24, 0.6, adaptation={"enabled": True})
    found = forecast(asked, profile, 0, room_of(asked), [5] * 4)
    assert max(own.slots for own in found.ranks) <= 0.6 * GIB
    assert max(own.slots for own in found.unlimited) > 0.6 * GIB
    assert {own.checkpoint for own in found.ranks} == {5}
    assert found.step_ratio > 1.0
    enough = forecast(asked, profile, 0, replace(room_of(asked), rank_bytes=None), [5] * 4)
    assert (enough.ranks, enough.step_ratio) == (enough.unlimited, 1.0)


def test_a_limit_in_which_nothing_fits_is_a_users_mistake():
    with pytest.raises(
        UserError, match=r"^limits.host_gib: got 0.4, expected at least 0.5: rank 1"
    ):
        room_of(config(4, 24, 0.4))  # four ends of two slots of 64 MiB
    copies = [0, 0, GIB // 4, 0]
    says = "rank 2 takes 512.0 MiB for the fewest slots of its links and 256.0 MiB for a checkpoint"
    with pytest.raises(UserError, match=says):
        room_of(config(4, 24, 0.7), copies=copies)
    assert room_of(config(4, 24, 0.75), copies=copies).short_bytes()[2] == 0


def test_a_schedule_that_would_wait_for_ever_is_refused_or_replaced():
    sections: dict[str, Any] = {"routes": {"default": "delegated"}}
    profile = slow_in_the_middle(8, 300.0)
    fixed = config(8, 64, 0.5, schedule={"name": "paper"}, **sections)
    with pytest.raises(UserError, match=r"^limits.host_gib: leaves 512.0 MiB for slots, expected"):
        plan_step(fixed, profile, 0, room_of(fixed))
    asked = config(8, 64, 0.5, **sections)
    room = room_of(asked)
    made = agree_on_plan(asked, SoleRank(), profile, 0, room)
    assert np.isfinite(made.simulate(profile).makespan_ms)
    assert made.plan.schedule != plan_step(asked, profile).schedule


def test_candidates_of_a_run_keep_within_the_limit():
    asked = config(4, 24, 0.6, schedule={"name": "zb-h2"})
    room, none, some = room_of(asked), chain_links((0.0,) * 3), chain_links((1.0,) * 3)
    usual: UsualLinks = {"direct": none, "delegated": some}
    profile = Profile(StageCosts.uniform(4, 10.0, 10.0, 10.0), none)
    home = plan_step(asked, profile, 0, room)
    slow = [
        Verdict(*ends, LinkHealth.SLOW, 60.0, 0.0, 6, Evidence((60.0,), 0.0, 0.0, 5.0), "slow")
        for ends in ((1, 2), (2, 1))
    ]
    best, taken = {}, {}
    for limit in (None, room):
        run = RunToPlan(asked, 0, home, profile, usual, limit)
        planner = CandidatePlanner(Begin(run, home))
        steps_ms = [each.step_ms for each in planner.make_candidates(profile, slow).candidates]
        best[limit is None] = min(steps_ms)
        chosen = planner.choose(steps_ms.index(min(steps_ms)))
        taken[limit is None] = max(room.taken_bytes(room.slots_wanted(chosen.slots), 4))
        assert bool(chosen.scarce) == (limit is not None)
    assert taken[False] <= 0.6 * GIB < taken[True]
    assert best[False] >= best[True]


def test_stashes_leave_less_room_for_slots():
    sections: dict[str, Any] = {"schedule": {"max_live": 4}, "offload": {"enabled": True}}
    asked = config(4, 24, 2.0, routes={"default": "delegated"}, **sections)
    room, sizes = room_of(asked), StashBytes((40 * MIB,) * 4, (0,) * 4)
    copies = CopyCosts.uniform(4, 1.0)
    profile = replace(slow_in_the_middle(4, 60.0), stash_bytes=sizes, copies=copies)
    made = agree_on_plan(asked, SoleRank(), profile, 0, room)
    assert made.plan.offloading is not None
    (away, *_) = offloaded_bytes(made.programs, profile)
    assert away >= 40 * MIB
    assert room.taken_bytes(made.slots, 4)[0] <= 2 * GIB - away
    assert room.stash_bytes is not None
    assert away <= room.stash_bytes[0] == (2 * GIB - 256 * MIB) // 2  # two ends of two slots
    tight = replace(room, stash_bytes=(39 * MIB,) * 4)
    assert plan_step(asked, profile, 0, tight).offloading is None


class Exchange:
    """Rank 0 of two, with the other rank's numbers."""

    rank = 0

    def __init__(self, *other):
        self._other = other

    def exchange(self, message):
        return [message, {"value": self._other}]


def agreed(asked: Config, state_bytes, platform="cpu", pool_bytes=None) -> HostRoom:
    device = SimpleNamespace(platform=platform)
    stage = SimpleNamespace(state=[SimpleNamespace(nbytes=state_bytes)], device=device)
    rendezvous = cast(Rendezvous, Exchange(7, pool_bytes))
    links = possible_links(2)
    return agree_on_host_room(
        asked, rendezvous, cast(StageTrainer, stage), payloads(2, (4,)), links
    )


def test_ranks_agree_on_what_a_checkpoint_leaves():
    saves = config(2, 4, 1.0, checkpoint={})
    assert agreed(saves, 100).rank_bytes == (GIB - 100, GIB - 7)
    assert agreed(config(2, 4, 1.0), 100).rank_bytes == (GIB, GIB - 7)
    assert agreed(config(2, 4), 100).rank_bytes is None


def test_a_state_beyond_the_pool_of_pinned_memory_is_refused(monkeypatch):
    saves, large = config(2, 4, checkpoint={}), 88 * GIB
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    says = (
        r"^checkpoint.every_steps: a save copies 88.00 GiB of rank 0's state .* at most 64.00 GiB"
    )
    with pytest.raises(UserError, match=says):
        agreed(saves, large, "gpu", pool_bytes=64 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "128")
    assert agreed(saves, large, "gpu", pool_bytes=64 * GIB).stash_bytes == (40 * GIB, 64 * GIB - 7)
    assert agreed(saves, large).stash_bytes is None  # a CPU's has no limit
