"""Who may change an order inside a step, and what a run's ranks are given for it."""

from dataclasses import replace

import pytest

from jaxmorph.comparison.condition_plans import ConditionPlanner
from jaxmorph.comparison.systems import SYSTEMS, system_config
from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile, Spreads
from jaxmorph.planning.intra_step import kept_in_order, reorders, without_effect
from jaxmorph.planning.plan_in_force import agree_on_plan, plan_step
from jaxmorph.program.units import units_of
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.copy_costs import CopyCosts
from jaxmorph.schedule.costs import Link, StageCosts, chain_links
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.online import Preference
from jaxmorph.schedule.ops import OpKind
from jaxmorph.transport.link_emulator import LinkCondition

COSTS = StageCosts.uniform(4, 10.0, 10.0, 10.0)
PROFILE = Profile(COSTS, chain_links([30.0] * 3))
DELEGATED = {"default": "delegated"}


def configured(intra_step="on", **sections):
    return Config.model_validate(
        {
            "parallelism": {"stages": 4},
            "batch": {"microbatches": 8},
            "adaptation": {"intra_step": intra_step},
            **sections,
        }
    )


def leeways(config, **expected):
    in_force = agree_on_plan(config, SoleRank(), PROFILE, 0, **expected)
    return [program.leeway for program in in_force.programs]


def some_leeways(config, **expected):
    """Every rank's, where all have some."""
    found = [leeway for leeway in leeways(config, **expected) if leeway is not None]
    assert len(found) == config.parallelism.stages
    return found


@pytest.mark.parametrize(
    ("intra_step", "schedule", "expected"),
    [
        ("off", "adaptive", False),
        ("on", "adaptive", True),
        ("on", "zb-h2", True),
        ("auto", "adaptive", True),
        ("auto", "zb-h2", False),
    ],
)
def test_auto_keeps_an_order_that_the_configuration_names(intra_step, schedule, expected):
    config = configured(intra_step, schedule={"name": schedule})
    assert reorders(config) is expected
    assert not reorders(kept_in_order(config))


def test_auto_goes_by_the_order_in_force():
    assert reorders(configured("auto", schedule={"name": "zb-h2"}), "adaptive")
    assert not reorders(configured("auto", schedule={"name": "adaptive"}), "zb-h2")
    assert reorders(configured("on", schedule={"name": "zb-h2"}), "zb-h2")
    assert not reorders(configured("off", schedule={"name": "adaptive"}), "adaptive")


def test_a_run_expects_the_quickest_of_the_messages_that_it_has_measured():
    spreads = Spreads(StageCosts.uniform(4, 0.0, 0.0, 0.0), chain_links([10.0, 0.0, 20.0]))
    profile = replace(PROFILE, spreads=spreads)
    programs = agree_on_plan(configured(routes=DELEGATED), SoleRank(), profile, 0).programs
    first_ms = [program.leeway and program.leeway.start_ms[0] for program in programs]
    assert first_ms == pytest.approx([0.0, 10.0 + 10.0, 20.0 + 40.0, 30.0 + 40.0])


def in_vain(config, profile=PROFILE):
    programs = agree_on_plan(config, SoleRank(), profile, 0).programs
    return [*without_effect(config, programs)]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({}, "all links are direct"),
        (
            {"parallelism": {"stages": 4, "chunks": 2}, "schedule": {"name": "interleaved"}},
            "with parallelism.chunks 2 ranks keep their order",
        ),
        ({"parallelism": {"stages": 1}}, "a pipeline of one stage waits for no message"),
    ],
)
def test_what_is_asked_in_vain_is_told_with_the_reason(sections, reason):
    profile = Profile(
        StageCosts.uniform(sections.get("parallelism", {}).get("stages", 4), *[10.0] * 3), {}
    )
    (told,) = in_vain(configured(**sections), profile)
    assert told.startswith(f"adaptation.intra_step: on: {reason}")


def test_what_has_or_may_come_to_have_an_effect_is_not_told():
    assert in_vain(configured(routes=DELEGATED)) == []
    assert in_vain(configured("off")) == in_vain(configured("auto")) == []
    adapting = {"enabled": True, "intra_step": "on"}
    config = configured().model_copy(
        update={"adaptation": configured().adaptation.model_copy(update=adapting)}
    )
    assert in_vain(config) == []


def test_order_is_kept_where_stashes_go_to_host_memory_and_that_is_told():
    config = configured(
        routes=DELEGATED, schedule={"name": "adaptive", "max_live": 3}, offload={"enabled": True}
    )
    profile = replace(PROFILE, copies=CopyCosts.uniform(4, 1.0))
    (told,) = in_vain(config, profile)
    assert "moves stashes to host memory" in told


def test_one_stage_has_nothing_to_adapt_to_and_is_told_so():
    config = Config.model_validate({"adaptation": {"enabled": True}, "parallelism": {"stages": 1}})
    assert [*without_effect(config, ())] == [
        "adaptation.enabled: true: a pipeline of one stage has no links to adapt to"
    ]


def test_with_several_chunks_no_order_is_changed():
    cut = {"stages": 4, "chunks": 2}
    assert not reorders(configured(parallelism=cut, schedule={"name": "interleaved"}))


def test_ranks_have_leeway_where_a_link_is_delegated_and_none_when_it_is_off():
    assert leeways(configured("off", routes=DELEGATED)) == [None] * 4
    assert leeways(configured()) == [None] * 4  # all direct
    one = leeways(configured(routes={"1-2": "delegated"}))
    assert [leeway is not None for leeway in one] == [False, True, True, False]
    assert None not in leeways(configured(routes=DELEGATED))


def test_the_caps_of_the_run_are_those_of_its_ranks():
    schedule = {"name": "adaptive", "max_live": [5, 4, 3, 2], "live_until": "W"}
    memory = [
        leeway.memory for leeway in some_leeways(configured(routes=DELEGATED, schedule=schedule))
    ]
    assert memory == [(1, 1, cap) for cap in (5, 4, 3, 2)]
    schedule = {"name": "adaptive", "max_stash_bytes": 70}
    profile = Profile(COSTS, {}, StashBytes((10,) * 4, (7,) * 4))
    config = configured(routes=DELEGATED, schedule=schedule)
    programs = agree_on_plan(config, SoleRank(), profile, 0).programs
    assert [program.leeway and program.leeway.memory for program in programs] == [(10, 7, 70)] * 4


def test_what_is_late_is_told_by_what_is_expected_and_not_by_what_is_planned_for():
    config = configured(routes=DELEGATED)
    quick = some_leeways(config, expected=Profile(COSTS, {}))
    slow = some_leeways(config)
    assert quick[3].start_ms[0] == 30.0
    assert slow[3].start_ms[0] == 120.0


def test_a_plan_on_delegated_routes_has_gradients_first_at_no_more_than_half_a_percent():
    uneven = StageCosts((9.0, 9.0, 10.0, 8.0), (10.0, 11.0, 10.0, 9.0), (6.0, 5.0, 6.0, 7.0))
    profile = Profile(uneven, chain_links([33.0, 41.0, 27.0]))
    kept, changed = (
        plan_step(configured(intra_step, routes=DELEGATED), profile) for intra_step in ("off", "on")
    )
    assert changed.predicted_step_s <= 1.005 * kept.predicted_step_s
    assert _weights_before_last_gradient(changed) <= _weights_before_last_gradient(kept)
    routes = {"1-2": "delegated"}
    kept, changed = (
        plan_step(configured(intra_step, routes=routes), profile) for intra_step in ("off", "on")
    )
    assert changed.schedule == kept.schedule


def _weights_before_last_gradient(made):
    """How many W all stages run before their last B."""
    kinds = [[op.kind for op in order] for order in made.schedule.orders]
    lasts = [len(row) - 1 - row[::-1].index(OpKind.B) for row in kinds]
    return sum(row[:last].count(OpKind.W) for row, last in zip(kinds, lasts, strict=True))


def test_what_ranks_prefer_once_something_was_late_follows_their_memory():
    free = some_leeways(configured(routes=DELEGATED))
    assert {leeway.preference for leeway in free} == {Preference.GRADIENTS}
    capped = {"name": "adaptive", "max_live": [8, 7, 3, 1]}
    preferences = [
        leeway.preference for leeway in some_leeways(configured(routes=DELEGATED, schedule=capped))
    ]
    assert preferences == [Preference.GRADIENTS, *[Preference.WEIGHTS_LAST] * 3]
    until_weight = capped | {"live_until": "W"}
    preferences = [
        leeway.preference
        for leeway in some_leeways(configured(routes=DELEGATED, schedule=until_weight))
    ]
    assert preferences == [Preference.GRADIENTS, *[Preference.PLAN] * 3]


def test_only_a_system_that_adapts_changes_its_order_in_a_comparison():
    config = configured(compare={"conditions": [{"name": "healthy"}]})
    changes = {name: reorders(system_config(config, system)) for name, system in SYSTEMS.items()}
    assert {name for name, does in changes.items() if does} == {
        name for name, system in SYSTEMS.items() if system.adapts or system.detects
    }


def test_under_a_jitter_ranks_expect_the_quicker_messages():
    config = configured(compare={"conditions": [{"name": "healthy"}]})
    system = SYSTEMS["adaptive"]
    healthy = Profile(COSTS, {})
    planner = ConditionPlanner(
        system_config(config, system), system, SoleRank(), healthy, 0, message_bytes=0
    )
    slow = tuple(LinkCondition((at, at + 1), latency_ms=30.0, jitter_ms=10.0) for at in range(3))
    in_force, _ = planner.make(slow)
    program = in_force.programs[3]
    assert set(in_force.plan.routes.values()) == {"delegated"}
    assert Link(0, 1) in in_force.plan.routes
    assert units_of(program).movable == frozenset(OpKind)
    assert program.leeway is not None
    assert program.leeway.start_ms[0] == pytest.approx(3 * 10.0 + 3 * 10.0)  # 30 - 2 * 10 each
