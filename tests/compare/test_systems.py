import pytest

from jaxmorph.compare.comparison import _place
from jaxmorph.compare.systems import SYSTEMS, route_choices, system_config
from jaxmorph.config import Config
from jaxmorph.config.compare_section import SYSTEM_NAMES
from jaxmorph.records import Link
from jaxmorph.training.plan_in_force import plan_step, unmeasured_profile

CONFIG = Config.model_validate(
    {
        "run": {"steps": 7},
        "parallelism": {"stages": 4},
        "batch": {"microbatches": 8},
        "optimizer": {"warmup_steps": 5},
        "routes": {"0-1": "delegated"},
        "schedule": {"link_ms": {"1-2": 9}},
        "emulation": {"links": [{"between": [1, 2], "latency_ms": 9.0}]},
        "compare": {"conditions": [{"name": "healthy"}], "steps": 3, "warmup_steps": 0},
    }
)


def test_configuration_and_table_name_the_same_systems():
    assert set(SYSTEMS) == set(SYSTEM_NAMES)
    assert all(name == system.name for name, system in SYSTEMS.items())


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_system_sets_schedule_and_routes(system):
    own = system_config(CONFIG, system)
    assert own.schedule.name == system.schedule
    assert (own.routes.default, own.routes.by_link) == (system.route, {})
    assert (own.emulation.links, own.schedule.link_ms) == ((), None)
    assert own.run.steps == 11  # of a block, and the warm-up of the rate fits into it
    assert own.optimizer.warmup_steps == 5
    made = plan_step(own, unmeasured_profile(own))
    assert made.schedule.num_chunks == (2 if system.name in ("interleaved", "zb-v") else 1)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_only_a_detecting_system_enables_adaptation(system):
    asked = CONFIG.adaptation.model_copy(update={"enabled": True})
    own = system_config(CONFIG.model_copy(update={"adaptation": asked}), system)
    assert own.adapts == system.detects


def test_a_detecting_system_keeps_configured_adaptation():
    asked = CONFIG.adaptation.model_copy(update={"delegates": "any"})
    config = CONFIG.model_copy(update={"adaptation": asked})
    own = system_config(config, SYSTEMS["adaptive"])
    assert (own.adaptation.enabled, own.adaptation.delegates) == (True, "any")


def test_a_capped_system_defaults_to_twice_1f1b():
    held = {name: system_config(CONFIG, system) for name, system in SYSTEMS.items()}
    caps = {name: own.schedule.max_live for name, own in held.items()}
    assert {name for name, cap in caps.items() if cap} == {"adaptive-capped", "adaptive-offload"}
    assert caps["adaptive-capped"] == caps["adaptive-offload"] == 7
    assert [name for name, own in held.items() if own.offload.enabled] == ["adaptive-offload"]
    named = CONFIG.schedule.model_copy(update={"max_stash_bytes": 99})
    own = system_config(
        CONFIG.model_copy(update={"schedule": named}), SYSTEMS["adaptive-offload"]
    ).schedule
    assert (own.max_live, own.max_stash_bytes) == (None, 99)


def delegated(system: str, *slow: Link) -> list[set[str]]:
    """The delegated links of each choice that a system has."""
    own = system_config(CONFIG, SYSTEMS[system])
    links = [Link(stage, stage + 1) for stage in range(3)]
    return [
        {str(link) for link, route in choice.routes.of_links(links).items() if route != "direct"}
        for choice in route_choices(own, SYSTEMS[system], slow)
    ]


def test_only_a_rerouting_system_chooses_routes():
    assert delegated("zb", Link(2, 3)) == [set()]
    assert delegated("zb-delegated", Link(2, 3)) == [{"0-1", "1-2", "2-3"}]
    assert delegated("adaptive-direct", Link(2, 3)) == [set()]
    assert delegated("adaptive", Link(2, 3)) == [set()]  # it gets no slow link in advance
    assert delegated("adaptive-informed") == [set(), {"0-1", "1-2", "2-3"}]
    assert delegated("adaptive-informed", Link(2, 3)) == [{"2-3"}, {"0-1", "1-2", "2-3"}]


def test_restarting_systems_do_not_fail_over():
    config = Config.model_validate({"parallelism": {"stages": 2}, "failover": {"enabled": True}})
    restarting = {
        name for name, system in SYSTEMS.items() if not system_config(config, system).fails_over
    }
    assert restarting == {"restart", "restart-cold", "restart-zb"}


@pytest.mark.parametrize("timeouts", [{"step_s": 60, "direct_s": 15}, {"step_s": 60}])
def test_all_systems_give_a_path_up_after_the_same_time(timeouts):
    config = Config.model_validate({"parallelism": {"stages": 2}, "timeouts": timeouts})
    for name in ("adaptive", "restart", "restart-cold", "restart-zb"):
        assert system_config(config, SYSTEMS[name]).direct_timeout_s == 15


def test_a_comparison_says_how_long_it_may_take():
    assert _place(1, 2, 4, []) == "block 1 of 2; 4 left"
    assert _place(2, 2, 2, [200.0, 100.0]) == "block 2 of 2; 2 left, about 5:00"
