from functools import partial
from pathlib import Path

import pytest

from jaxmorph.config import load_config
from jaxmorph.config.link_sections import LinkTrace
from jaxmorph.emulation import link_trace
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.emulation.link_conditions import LinkCondition, before_step, begun_at
from jaxmorph.emulation.link_settings import (
    emulated_conditions,
    hardware_conditions,
    sum_conditions,
    trace_conditions,
)
from jaxmorph.errors import UserError
from jaxmorph.placement import Layout, Placement
from jaxmorph.training.open_stage import transport_settings
from jaxmorph.transport.plane import TransportSettings

KEY = "emulation.trace"
HEADER = "time_s,links,latency_ms,bandwidth_mbps,jitter_ms,cut\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*overrides):
    Path("x.yaml").write_text("parallelism: {stages: 4}")
    return load_config("x.yaml", overrides)


def test_hardware_is_on_every_link_once_messages_have_a_size():
    assert hardware_conditions(load("emulation.host_copy_gbps=50").emulation, 2) == ()
    config = load("emulation={message_bytes: 1000, host_copy_gbps: 50, wire_mbps: 400000}")
    found = hardware_conditions(config.emulation, 4)
    wire = LinkCondition((2, 3), bandwidth_mbps=400_000.0, message_bytes=1000)
    copies = LinkCondition((2, 3), host_copy_gbps=50.0, route="delegated")
    assert [each for each in found if each.between == (2, 3)] == [wire, copies]
    assert {each.between for each in found} == {(0, 1), (1, 2), (2, 3), (0, 3)}


def test_a_preset_sets_what_is_not_given():
    preset = load("emulation={preset: h800, message_bytes: 1000}").emulation
    assert (preset.host_copy_gbps, preset.wire_mbps) == (63.0, 400_000.0)
    own = load("emulation={preset: h800, message_bytes: 1000, host_copy_gbps: 50}").emulation
    assert (own.host_copy_gbps, own.wire_mbps) == (50.0, 400_000.0)


def test_listed_links_and_a_trace_combine():
    Path("trace.csv").write_text(f"{HEADER}5,1-2,7,,,\n")
    config = load(
        "emulation.links=[{between: [2, 3], latency_ms: 30, to_step: 4, source: 3}]",
        "emulation.trace=trace.csv",
    )
    listed = LinkCondition((2, 3), latency_ms=30.0, to_step=4, source=3)
    traced = LinkCondition((1, 2), latency_ms=7.0, from_s=5.0)
    assert emulated_conditions(config) == (listed, traced)
    assert emulated_conditions(load()) == ()


@pytest.mark.parametrize(
    ("first_step", "holds"), [(0, {1}), (3, {1}), (4, {1, 2}), (6, {1, 2}), (7, {1})]
)
def test_links_are_measured_as_they_were_in_the_step_before(first_step, holds):
    always, later = LinkCondition((0, 1), 5.0), LinkCondition((1, 2), 30.0, from_step=3, to_step=6)
    timed = LinkCondition((2, 3), 7.0, from_s=0.0)
    found = before_step([always, later, timed], first_step)
    assert {each.between[1] for each in found} == holds
    assert all(each.holds(-1, 0.0) for each in found)


def test_a_regime_applies_to_all_neighbour_links():
    found = emulated_conditions(load("emulation.trace={regime: B, seed: 2, duration_s: 5}"))
    drawn = draw_regime("B", Placement(4).links, 5.0, seed=2)
    assert found == tuple(drawn.conditions())


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("5,1-2,x,,,", "trace.csv: line 2: latency_ms: got 'x', expected a number of at least 0"),
        ("5,1-3,7,,,", "trace.csv: got link 1-3, expected one of 0-1, 1-2, 2-3, 0-3"),
    ],
)
def test_a_bad_trace_is_reported_under_its_key(rows, says):
    Path("trace.csv").write_text(f"{HEADER}{rows}\n")
    with pytest.raises(UserError) as caught:
        emulated_conditions(load("emulation.trace=trace.csv"))
    assert str(caught.value) == f"emulation.trace: {says}"


def test_transport_settings_follow_the_configuration():
    where = {"one_loopback": True, "coordinator_host": "127.0.0.1"}
    assert transport_settings(load(), **where) == TransportSettings()
    chosen = "transport={addresses: [10.0.0.1], lanes: 3, chunk_bytes: 8192, checksum: false}"
    assert transport_settings(load(chosen), **where) == TransportSettings(
        addresses=("10.0.0.1",), lanes=3, chunk_bytes=8192, checksum=False
    )


def test_cuts_end_with_a_restart():
    links = "[{between: [1, 2], latency_ms: 9}, {between: [2, 3], cut: true, from_step: 5}]"
    config = load(f"emulation.links={links}")
    slow, cut = emulated_conditions(config)
    assert (slow.cut, cut.cut) == (False, True)
    assert emulated_conditions(config, restarts=1) == (slow,)


def test_steps_times_and_delays_are_scaled(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("step,links,latency_ms,jitter_ms\n15,2-3,30,4\n85,2-3,0,0\n")
    trace = LinkTrace(file=str(path), time_scale=0.2, latency_scale=0.5)
    assert trace_conditions(trace, 4, KEY) == (
        LinkCondition((2, 3), 15.0, jitter_ms=2.0, from_step=3, to_step=17),
        LinkCondition((2, 3), from_step=17),
    )
    path.write_text("time_s,links,latency_ms\n0,0-1,30\n4,0-1,10\n")
    assert trace_conditions(LinkTrace(file=str(path), time_scale=2.0), 4, KEY) == (
        LinkCondition((0, 1), 30.0, from_s=0.0, to_s=8.0),
        LinkCondition((0, 1), 10.0, from_s=8.0),
    )


def test_each_draw_takes_the_next_seed():
    trace = LinkTrace(regime="A", seed=5, duration_s=2.0)
    links = Placement(3).links
    for draw in (0, 2):
        drawn = draw_regime("A", links, 2.0, seed=5 + draw).conditions()
        assert trace_conditions(trace, 3, KEY, draw) == tuple(drawn)


def test_steps_can_be_shifted():
    conditions = (
        LinkCondition((0, 1), 30.0, from_step=0, to_step=4),
        LinkCondition((0, 1), 20.0, from_step=4),
        LinkCondition((1, 2), 10.0, from_s=1.0),
    )
    assert begun_at(conditions, 100) == (
        LinkCondition((0, 1), 30.0, from_step=100, to_step=104),
        LinkCondition((0, 1), 20.0, from_step=104),
        LinkCondition((1, 2), 10.0, from_s=1.0),
    )


def test_too_many_changes_are_refused(monkeypatch):
    monkeypatch.setattr(link_trace, "MOST_CHANGES", 50)
    assert trace_conditions(LinkTrace(regime="A", duration_s=2.0), 3, KEY)
    with pytest.raises(UserError, match=r"^emulation\.trace: got \d+ changes of link"):
        trace_conditions(LinkTrace(regime="A", duration_s=8.0), 3, KEY)


def test_a_pair_of_hosts_is_slow_for_whatever_travels_on_it():
    hosts = "[{between: [1, 5], latency_ms: 30, from_step: 4, cut: true}]"
    config = load("parallelism.data=2", f"emulation.hosts={hosts}")
    first = Layout.first(4, 2)

    def found(layout):
        links = [emulated_conditions(config, 0, layout, replica) for replica in range(2)]
        sums = [sum_conditions(config, layout, stage) for stage in range(4)]
        return links, sums

    slow = partial(LinkCondition, latency_ms=30.0, from_step=4, cut=True)
    assert found(first) == ([(), ()], [(), (slow((0, 1)),), (), ()])
    assert found(first.swapped(1, 6)) == ([(), (slow((1, 2)),)], [()] * 4)
    assert found(first.swapped(5, 6)) == ([(), ()], [()] * 4)
    assert sum_conditions(config, first, 1, restarts=1) == ()


def test_a_link_may_be_slow_in_one_replica():
    links = "[{between: [1, 2], latency_ms: 7, replica: 1}, {between: [0, 1], latency_ms: 3}]"
    config = load("parallelism.data=2", f"emulation.links={links}")
    both, own = LinkCondition((0, 1), latency_ms=3.0), LinkCondition((1, 2), latency_ms=7.0)
    assert emulated_conditions(config.of_replica(0)) == (both,)
    assert set(emulated_conditions(config.of_replica(1))) == {both, own}


def test_a_trace_may_slow_one_replica():
    Path("trace.csv").write_text("step,links,latency_ms\n3,r1:1-2,7\n")
    config = load("parallelism.data=2", "emulation.trace=trace.csv")
    own = LinkCondition((1, 2), latency_ms=7.0, from_step=3)
    assert [emulated_conditions(config, replica=index) for index in range(2)] == [(), (own,)]
    config = load("parallelism.data=2", "emulation.trace={regime: B, seed: 2, duration_s: 5}")
    of_replicas = [emulated_conditions(config, replica=index) for index in range(2)]
    assert of_replicas[0] == tuple(draw_regime("B", Placement(4).links, 5.0, seed=2).conditions())
    firsts = [{each.between: each for each in found[::-1]} for found in of_replicas]
    assert all(firsts[0][link].latency_ms != firsts[1][link].latency_ms for link in firsts[0])


def test_planned_delays_may_be_of_one_replica():
    config = load("parallelism.data=2", "schedule.link_ms={1-2: 5, 'r1:1-2': 9, 'r0:0-1': 3}")
    of_replicas = [config.of_replica(index).schedule.link_ms for index in range(2)]
    assert of_replicas == [{"1-2": 5.0, "0-1": 3.0}, {"1-2": 9.0}]
    with pytest.raises(UserError, match=r"schedule\.link_ms\.r2:1-2: unknown key"):
        load("parallelism.data=2", "schedule.link_ms={'r2:1-2': 9}")
