from typing import get_args

import pytest
from pydantic import ValidationError

from jaxmorph.config import Config, check_config, per_stage
from jaxmorph.config.link_sections import Routes, Transport
from jaxmorph.config.sections import PLANNED_SCHEDULES, Model, Schedule, ScheduleName
from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, V_SCHEDULES
from jaxmorph.schedule.planner import INTERLEAVED, SCHEDULE_NAMES
from jaxmorph.transport.wire import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES


def test_every_schedule_that_can_be_planned_can_be_configured():
    assert get_args(ScheduleName) == SCHEDULE_NAMES


def test_chunks_that_can_be_configured_can_be_sent():
    for chunk_bytes in (4096, MAX_CHUNK_BYTES):
        assert Transport(chunk_bytes=chunk_bytes).chunk_bytes >= MIN_CHUNK_BYTES
    with pytest.raises(ValueError, match="less than or equal to 16777216"):
        Transport(chunk_bytes=MAX_CHUNK_BYTES + 1)


def test_per_stage_repeats_a_number_and_keeps_a_list():
    assert per_stage(2.5, 3) == (2.5, 2.5, 2.5)
    assert per_stage((1.0, 2.0), 2) == (1.0, 2.0)


def test_a_cap_is_none_or_one_for_each_stage():
    assert Schedule().max_live_per_stage(3) is None
    assert Schedule(max_live=4).max_live_per_stage(2) == (4, 4)
    assert Schedule(max_live=(4, 2)).max_live_per_stage(2) == (4, 2)


def test_a_link_without_a_route_of_its_own_takes_the_default():
    routes = Routes.model_validate({"default": "delegated", "1-2": "direct"})
    assert routes.by_link == {"1-2": "direct"}
    assert routes.of_links([Link(0, 1), Link(1, 2)]) == {
        Link(0, 1): "delegated",
        Link(1, 2): "direct",
    }


TWO_REPLICAS = {
    "parallelism": {"stages": 3, "data": 2},
    "batch": {"microbatches": 6},
    "routes": {"0-1": "delegated", "r1:0-1": "direct", "r1:1-2": "delegated"},
    "emulation": {
        "accelerator": {"forward_ms": 1, "backward_input_ms": 2, "backward_weight_ms": 3},
        "links": [
            {"between": [0, 1], "latency_ms": 5},
            {"between": [1, 2], "latency_ms": 7, "replica": 1},
        ],
    },
}


def test_a_replica_sees_only_its_own_links():
    config = check_config(TWO_REPLICAS)
    first, second = (config.of_replica(index) for index in range(2))
    assert first.routes.by_link == {"0-1": "delegated"}
    assert second.routes.by_link == {"0-1": "direct", "1-2": "delegated"}
    assert [link.latency_ms for link in first.emulation.links] == [5]
    assert [(link.latency_ms, link.replica) for link in second.emulation.links] == [
        (5, None),
        (7, None),
    ]
    assert first.emulation.accelerator == config.emulation.accelerator
    alone = check_config({})
    assert alone.of_replica(0) is alone


def test_replicas_divide_the_microbatches_of_a_step():
    config = check_config(TWO_REPLICAS)
    assert (config.microbatches, config.parallelism.num_ranks) == (3, 6)
    assert config.tokens_per_step == check_config({"batch": {"microbatches": 6}}).tokens_per_step
    assert config.longest_backlog_s == pytest.approx(0.018)


def test_the_sum_over_replicas_fails_over_without_links_too():
    config = {"parallelism": {"data": 2}, "failover": {"enabled": True}}
    both = check_config(config)
    assert (both.fails_over, both.reduction_fails_over) == (False, True)
    assert both.direct_timeout_s == both.failover_timeout_s
    assert not check_config({"failover": {"enabled": True}}).reduction_fails_over
    assert not check_config({"parallelism": {"data": 2}}).reduction_fails_over


def run(schedule="adaptive", stages=4, **adaptation):
    sections = {"schedule": {"name": schedule}, "parallelism": {"stages": stages}}
    return check_config({**sections, "adaptation": adaptation})


@pytest.mark.parametrize(("schedule", "by_default", "if_asked"), [
    *((name, True, True) for name in PLANNED_SCHEDULES),
    ("zb-h1", False, True), ("zb-h2", False, True), ("1f1b", False, None), ("gpipe", False, None),
])  # fmt: skip
def test_a_run_adapts_if_its_schedule_is_planned_or_it_is_asked_to(schedule, by_default, if_asked):
    assert run(schedule).adapts == run(schedule, enabled="auto").adapts == by_default
    assert not run(schedule, enabled=False).adapts
    if if_asked is not None:
        assert run(schedule, enabled=True).adapts == if_asked


def test_a_run_without_links_never_adapts():
    assert not run(stages=1).adapts
    assert not run(enabled=True, stages=1).adapts


def test_fixed_schedules_are_those_that_are_not_planned():
    fixed = {*FIXED_SCHEDULES, INTERLEAVED, *V_SCHEDULES}
    assert set(SCHEDULE_NAMES) - fixed == set(PLANNED_SCHEDULES)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-eager", "interleaved"])
def test_schedules_with_whole_backwards_cannot_adapt(schedule):
    run(schedule)
    with pytest.raises(UserError) as caught:
        run(schedule, enabled=True)
    assert str(caught.value) == (
        "config: adaptation.enabled: got true, expected auto, false, or a schedule.name that can "
        "be replaced while a run lasts: adaptive, initial, paper, zb-h1, zb-h2"
    )


def test_order_inside_a_step_can_only_be_off():
    assert run(intra_step="off").adaptation.intra_step == "off"
    for value in ("on", "auto"):
        with pytest.raises(UserError) as caught:
            run(intra_step=value)
        assert str(caught.value) == (
            f"config: adaptation.intra_step: got '{value}', expected 'off': changing the order "
            "inside a step was removed because it gained nothing in real runs, see "
            "docs/explanation/adaptation.md"
        )


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"offload": {"device_memory_fraction": 0}}, "got 0, expected a number above 0, at most 1"),
        ({"offload": {"enabled": "yes"}}, "got 'yes', expected true or false"),
        *[
            ({"adaptation": {"worth": worth}}, f"adaptation.worth: got {worth}")
            for worth in (1.0, -0.1)
        ],
        ({"adaptation": {"dwell_steps": 0}}, "adaptation.dwell_steps: got 0"),
        ({"adaptation": {"delegates": "all"}}, "adaptation.delegates: got 'all'"),
        ({"adaptation": {"failback_steps": 0}}, "adaptation.failback_steps: got 0"),
        (
            {"timeouts": {"step_s": 30.0, "direct_s": 40.0}},
            r"timeouts.direct_s: got 40.*, expected null, or at most timeouts.step_s, which is 30",
        ),
        ({"emulation": {"host_copy_gbps": 0}}, "got 0, expected a number above 0"),
    ],
)
def test_values_out_of_range_are_refused(section, says):
    with pytest.raises(UserError, match=says):
        check_config(section)


def test_other_model_keys_are_the_factorys_options():
    model = Model.model_validate({"weights": "some/where", "width": 64, "tied": False})
    assert model.weights == "some/where"
    assert model.options == {"width": 64, "tied": False}
    assert Model().weights is None


@pytest.mark.parametrize("wrong", ["", 3, True])
def test_weights_are_a_path_or_null(wrong):
    with pytest.raises(ValidationError):
        Model.model_validate({"weights": wrong})


def config(**sections):
    return check_config({"parallelism": {"stages": 2}, **sections}, "a test")


def test_links_fail_over_if_that_or_adaptation_is_asked_for():
    cases = [("auto", False), ("auto", "auto"), ("auto", True), (True, False), (False, True)]
    configs = [
        config(failover={"enabled": failover}, adaptation={"enabled": adapts})
        for failover, adapts in cases
    ]
    assert [each.fails_over for each in configs] == [False, False, True, True, False]
    one_stage = Config.model_validate({"failover": {"enabled": True}})
    assert not one_stage.fails_over


@pytest.mark.parametrize(
    ("fails_over", "direct_s", "expected_s"),
    [(True, 5.0, 5.0), (False, 5.0, 30.0), (True, None, 7.5)],
)
def test_failover_gives_direct_transfers_their_own_deadline(fails_over, direct_s, expected_s):
    timeouts = {"step_s": 30.0, "direct_s": direct_s}
    for stages in (2, 64):
        parallelism = {"stages": stages}
        made = config(failover={"enabled": fails_over}, timeouts=timeouts, parallelism=parallelism)
        assert made.direct_timeout_s == expected_s


def paced(microbatches, **timeouts):
    accelerator = {
        "forward_ms": [10.0, 40.0],
        "backward_input_ms": 30.0,
        "backward_weight_ms": 30.0,
    }
    return config(
        batch={"microbatches": microbatches},
        emulation={"accelerator": accelerator},
        failover={"enabled": True},
        timeouts={"step_s": 30.0, **timeouts},
    )


def test_a_direct_deadline_is_longer_than_the_ops_of_a_step():
    assert paced(8).direct_timeout_s == 7.5
    assert paced(100).direct_timeout_s == pytest.approx(10.0)
    assert paced(100, direct_s=10.0).direct_timeout_s == 10.0
    with pytest.raises(UserError, match=r"timeouts.direct_s: got 9.*, expected at least 10, as a"):
        paced(100, direct_s=9.0)
    with pytest.raises(UserError, match=r"timeouts.step_s: got 30.*, expected at least 50, as a"):
        paced(500)
