from pathlib import Path

import pytest

from jaxmorph.config import load_config
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.emulation.link_settings import emulated_conditions, transport_settings, untimed
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import pipeline_links
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.plane import TransportSettings

HEADER = "time_s,between,latency_ms,bandwidth_mbps,jitter_ms,cut\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*overrides):
    Path("x.yaml").write_text("parallelism: {stages: 4}")
    return load_config("x.yaml", overrides)


def test_links_of_the_file_and_of_its_trace_are_emulated_together():
    Path("trace.csv").write_text(f"{HEADER}5,1-2,7,,,\n")
    config = load(
        "emulation.links=[{between: [2, 3], latency_ms: 30, to_step: 4, source: 3}]",
        "emulation.trace=trace.csv",
    )
    listed = LinkCondition((2, 3), latency_ms=30.0, to_step=4, source=3)
    traced = LinkCondition((1, 2), latency_ms=7.0, from_s=5.0)
    assert emulated_conditions(config) == (listed, traced)
    assert untimed([listed, traced]) == (listed,)
    assert emulated_conditions(load()) == ()


def test_a_trace_of_a_regime_is_emulated_on_all_links_between_neighbours():
    found = emulated_conditions(load("emulation.trace={regime: B, seed: 2, duration_s: 5}"))
    drawn = draw_regime("B", pipeline_links(4), 5.0, seed=2)
    assert found == tuple(drawn.conditions())


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("5,1-2,x,,,", "trace.csv: line 2: latency_ms: got 'x', expected a number of at least 0"),
        ("5,1-3,7,,,", "trace.csv: got link 1-3, expected one of 0-1, 1-2, 2-3, 0-3"),
    ],
)
def test_a_wrong_trace_is_told_under_its_key(rows, says):
    Path("trace.csv").write_text(f"{HEADER}{rows}\n")
    with pytest.raises(UserError) as caught:
        emulated_conditions(load("emulation.trace=trace.csv"))
    assert str(caught.value) == f"emulation.trace: {says}"


def test_the_data_plane_is_told_what_the_file_says_and_finds_out_the_rest():
    where = {"one_loopback": True, "coordinator_host": "127.0.0.1"}
    assert transport_settings(load(), **where) == TransportSettings()
    chosen = "transport={addresses: [10.0.0.1], lanes: 3, chunk_bytes: 8192, checksum: false}"
    assert transport_settings(load(chosen), **where) == TransportSettings(
        addresses=("10.0.0.1",), lanes=3, chunk_bytes=8192, checksum=False
    )


def test_ranks_that_are_started_again_meet_no_cut():
    links = "[{between: [1, 2], latency_ms: 9}, {between: [2, 3], cut: true, from_step: 5}]"
    config = load(f"emulation.links={links}")
    slow, cut = emulated_conditions(config)
    assert (slow.cut, cut.cut) == (False, True)
    assert emulated_conditions(config, restarts=1) == (slow,)
