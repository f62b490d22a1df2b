import re
from pathlib import Path

import pytest

from jaxmorph.emulation import link_trace
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.emulation.link_trace import read_link_trace
from jaxmorph.placement import Replica
from jaxmorph.records import Link

ROOT = Path(__file__).parents[2]


def test_a_regime_is_written_and_summarized(run, tmp_path):
    path = tmp_path / "c.csv"
    options = ("--seed", 3, "--duration-s", 60, "--links", "1-2 0-1", "--out", path)
    code, out, err = run("trace", "C", *options)
    assert (code, err) == (0, "")
    drawn = draw_regime("C", (Link(1, 2), Link(0, 1)), 60.0, seed=3)
    assert read_link_trace(path) == drawn.conditions()
    assert out.startswith(f"wrote {path}: {len(drawn.changes)} changes of 2 links; delays above 0 ")


def test_each_replica_has_its_own_delays(run, tmp_path):
    path = tmp_path / "a.csv"
    options = ("--seed", 3, "--duration-s", 20, "--links", "0-1", "--replicas", 2, "--out", path)
    code, out, _ = run("trace", "A", *options)
    assert code == 0
    assert "changes of 2 links" in out
    for index in range(2):
        own = draw_regime("A", (Link(0, 1),), 20.0, seed=3, replica=index)
        assert read_link_trace(path, Replica(index, 2)) == own.conditions()


@pytest.mark.parametrize("replicas", [2, 3])
def test_each_replica_has_its_own_events(run, replicas):
    code, out, _ = run("trace", "events", "--steps", 300, "--replicas", replicas)
    rows = [row.split(",") for row in out.splitlines()[1:]]
    assert code == 0
    assert [int(step) for step, *_ in rows] == sorted(int(step) for step, *_ in rows)
    own = [[row for row in rows if row[1].startswith(f"r{index}:")] for index in range(replicas)]
    assert all(own)
    assert own[0][0][0] != own[1][0][0]


def test_events_are_printed_by_step(run):
    code, out, _ = run("trace", "events", "--stages", 8, "--steps", 300, "--seed", 1)
    header, *rows = out.splitlines()
    assert (code, header) == (0, "step,links,latency_ms")
    assert len(rows) >= 4
    assert all(int(row.split(",")[0]) <= 300 for row in rows)


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_traces_of_onsets_are_drawn_from_their_seeds(run, stages, seed):
    options = ("--stages", stages, "--steps", 84, "--seed", seed)
    code, out, _ = run("trace", "short-events", *options)
    assert code == 0
    assert out == (ROOT / f"configs/traces/onset{stages}_{seed}.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["D"], "REGIME: got 'D', expected one of A, B, C, bursty, events"),
        (["A", "--links", "0-1 0-1"], "--links: got '0-1 0-1', expected each link once, such as"),
        (["A", "--links", "1-0"], "--links: got '1-0', expected a link such as 2-3"),
        (["A", "--stages", "4", "--links", "6-7"], "--links: got link 6-7, expected one of 0-1,"),
        (["A", "--duration-s", "nan"], "--duration-s: got nan, expected a number from 0.1 to"),
        (["A", "--duration-s", "1e6"], "--duration-s: got 1e+06, expected a number from 0.1 to"),
        (["A", "--out", "nowhere/x.csv"], "--out: nowhere/x.csv: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(expect_mistake, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    expect_mistake(says, "trace", *arguments)


def test_without_stages_any_links_may_be_drawn(run):
    code, out, _ = run("trace", "A", "--links", "6-7", "--duration-s", 1)
    assert (code, {row.split(",")[1] for row in out.splitlines()[1:]}) == (0, {"6-7"})


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(["A", "--duration-s", 8], "--duration-s"), (["events", "--steps", 9000], "--steps")],
)
def test_too_many_changes_are_refused(run, tmp_path, monkeypatch, arguments, option):
    monkeypatch.setattr(link_trace, "MOST_CHANGES", 50)
    path = tmp_path / "long.csv"
    code, _, err = run("trace", *arguments, "--out", path)
    assert (code, path.exists()) == (2, False)
    assert re.match(rf"error: {option}: got \d+ changes of link \d-\d, expected at most 50: ", err)
