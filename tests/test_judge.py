"""Committed results, their configurations and the pages that state their numbers agree.

Each planted lie, in a copy of the files, is a contradiction.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import judge
from benchmarks.judgements import FOLDER, benchmark_bars, judgements
from benchmarks.result_pages import Results, pages, read_results, with_results
from benchmarks.results import ROOT, Bar
from jaxmorph.config import load_config
from jaxmorph.config.compare_section import SYSTEM_NAMES

NAMES = sorted(path.parent.name for path in (ROOT / FOLDER).glob("*/results.json"))


def problems(root: Path = ROOT) -> list[str]:
    return judge.problems(read_results(root))


def test_nothing_contradicts_the_committed_results():
    assert problems() == []


def test_no_result_is_older_than_its_configuration():
    assert not any(each.outdated_by for each in judgements().values())


def test_every_measured_comparison_has_a_result():
    with_section = {path.stem for path in (ROOT / "configs").glob("*.yaml")
                    if "\ncompare:" in path.read_text(encoding="utf-8")}  # fmt: skip
    assert judgements().keys() == with_section == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_bar_is_on_systems_that_are_compared(name):
    compare = load_config(ROOT / "configs" / f"{name}.yaml").compare
    assert compare is not None
    named = {system for bar in compare.bars for system in (*bar.systems, bar.over)}
    assert named & {*SYSTEM_NAMES} <= {*compare.systems}


@pytest.fixture
def copy(tmp_path):
    """A copy of configurations, results and pages."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def plant(root: Path, file: str, truth: str, lie: str) -> None:
    """Put a lie in the place of what stands in a file once."""
    text = (root / file).read_text(encoding="utf-8")
    assert text.count(truth) == 1, f"{file}: {truth!r} is there {text.count(truth)} times"
    (root / file).write_text(text.replace(truth, lie), encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "truth", "lie"),
    [
        ("README.md", "| adaptive | 673 | 751 | 732 |", "| adaptive | 673 | 751 | 722 |"),
        ("docs/explanation/measurements.md", "-->287.5<!-- end -->", "-->297.5<!-- end -->"),
        ("docs/tutorial/first-comparison.md", "| zb | 395 (397) |", "| zb | 395 (387) |"),
        ("docs/explanation/measurements.md", "median_ms .1f -->15.9<!", "median_ms .1f -->12.9<!"),
        (
            "docs/explanation/measurements.md",
            "| 5.7 | 3.2 | 2 | 1 | 0 |",
            "| 5.7 | 3.2 | 3 | 0 | 0 |",
        ),
        ("docs/explanation/measurements.md", "healthy: 0.975", "healthy: 1.075"),
        ("docs/explanation/restarts.md", "| 209.2 | +15.4 |", "| 199.2 | +5.4 |"),
        ("docs/explanation/memory.md", "60 ms -->1.01<!-- end -->", "60 ms -->1.00<!-- end -->"),
    ],
)
def test_a_page_states_what_its_result_holds(copy, page, truth, lie):
    plant(copy, page, truth, lie)
    (found,) = problems(copy)
    assert found.startswith(f"{page}:")
    assert "not what its result gives" in found


def test_a_results_table_is_that_of_its_runs(copy):
    table = "docs/results/hol/table.md"
    (truth,) = re.findall(r"^\| adaptive-informed \| \*\*.*?\*\*", (copy / table).read_text(), re.M)
    plant(copy, table, truth, "| adaptive-informed | **1.0**")
    assert problems(copy) == [
        f"{table}: not the table of results.json; make reference writes it again"
    ]


@pytest.mark.parametrize(
    ("truth", "lie"),
    [
        ("  steps: 8\n", "  steps: 80\n"),
        ("latency_ms: 30", "latency_ms: 20"),
        ("{forward_ms: 10,", "{forward_ms: 11,"),
    ],
)
def test_a_changed_configuration_makes_a_result_older(copy, truth, lie):
    plant(copy, "configs/hol.yaml", truth, lie)
    hol = judgements(copy)["hol"]
    assert hol.outdated_by == ("what it measures has changed",)
    assert "older than its configuration: what it measures has changed" in hol.headline
    assert any("measurements.md" in problem for problem in problems(copy))


def test_a_changed_trace_makes_a_result_older(copy):
    trace = copy / "configs" / "traces" / "adaptra-table3.csv"
    trace.write_text(trace.read_text(encoding="utf-8").replace("\n", "\n\n", 1), encoding="utf-8")
    assert judgements(copy)["table3"].outdated_by == ("what it measures has changed",)


def test_a_new_system_makes_a_result_older(copy):
    plant(copy, "configs/hol.yaml", "[1f1b, zb, zb-", "[1f1b, zb, zb-v, zb-")
    assert judgements(copy)["hol"].outdated_by == ("no runs of zb-v",)


@pytest.mark.parametrize(
    ("truth", "lie", "says"),
    [
        ("at_most: 1.12", "at_most: 1.2", "was at most 1.12, and is at most 1.2 without a new"),
        ("at_least: 2}", "at_least: 1.5}", "was at least 2, and is at least 1.5 without a new"),
        ("      over: lower bound\n", "", "the bar (at most 1.04) is gone"),
        ("value: waiting, at_most: 0.01", "value: waiting, at_least: 0", "(at most 0.01) is gone"),
    ],
)
def test_a_bar_is_not_loosened_without_a_new_result(copy, truth, lie, says):
    plant(copy, "configs/hol.yaml", truth, lie)
    assert any(each.startswith("hol: 2-3 30 ms: ") and says in each for each in problems(copy))


def test_a_stricter_bar_needs_no_new_result(copy):
    plant(copy, "configs/hol.yaml", "at_most: 1.12", "at_most: 1.11")
    assert problems(copy) == []


def test_a_recorded_ratio_is_that_of_the_runs(copy):
    results = copy / FOLDER / "hol" / "results.json"
    data = json.loads(results.read_text(encoding="utf-8"))
    truth, data["bars"][0]["measured"] = data["bars"][0]["measured"], 3.0
    results.write_text(json.dumps(data), encoding="utf-8")
    says = f"recorded as 3.0, but the runs give {truth}"
    assert any(says in each for each in problems(copy))


OF_ALONE = (
    "per core of alone: jaxmorph, 1f1b / torch pipelining, 1F1B",
    "per core of alone: jaxmorph, zb-h2 / torch pipelining, ZB1P",
)


def test_each_miss_has_a_reason_and_no_other_bar(copy):
    reasons = "docs/results/misses.yaml"
    plant(copy, reasons, "    figure21: [zb-delegated over zb]", "    hol: [zb, zbb]")
    plant(copy, reasons, "    speed/start_up: [", "    speed/start_up: [no bar, ")
    plant(copy, reasons, "speed/peers_4_stages:", "speed/peers_unpinned:")
    found = [each for each in problems(copy) if each.startswith(reasons)]
    assert found == [
        f"{reasons}: figure21: zb-delegated over zb is missed, and no reason is given",
        *(f"{reasons}: speed/peers_4_stages: {claim} is missed, and no reason is given"
          for claim in OF_ALONE),
        f"{reasons}: hol: zb is not missed, but a reason is given",
        f"{reasons}: hol: zbb is not missed, but a reason is given",
        *(f"{reasons}: speed/peers_unpinned: {claim} is not missed, but a reason is given"
          for claim in OF_ALONE),
        f"{reasons}: speed/start_up: no bar is not missed, but a reason is given",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("<!-- steps of holl -->", "no result of this name"),
        ("<!-- steps of hol: zbb -->", "the result has no zbb, healthy"),
        ("<!-- steps of hol: zb; ill -->", "the result has no zb, ill"),
        ("<!-- value of rank0/after: median .1f -->", "after.json has no such number: KeyError"),
        ("<!-- value of figure19/results: runs.0.total_s .1f -->", "which may change: name them"),
        ("<!-- value of figure19/results: runs(zb; ill).total_s .1f -->", "no such number: ValueE"),
        ("<!-- value of rank0/later: median_ms .1f -->", "later.json has no such number: FileNot"),
        ("<!-- steps of hol --><!-- misses -->", "a marker has no <!-- end -->"),
        ("<!-- spets of hol -->", "the result has no 1f1b, healthy"),
    ],
)
def test_a_marker_names_what_a_result_has(marker, says):
    with pytest.raises(ValueError, match=says):
        with_results(f"{marker}<!-- end -->", Results(judgements(), {}, {}, ROOT))


def test_pages_have_numbers_by_markers():
    marked = [page for page in pages(ROOT) if "<!-- end -->" in page.read_text(encoding="utf-8")]
    assert {page.name for page in marked} >= {"README.md", "measurements.md", "restarts.md"}


def test_a_bar_without_a_lower_limit_has_none():
    assert Bar("excess", -0.1, at_most=1.0).holds
    assert Bar("excess", -0.1, at_most=1.0).limits == "at most 1"
    assert not Bar("ratio", -0.1, at_least=0.5).holds


@pytest.mark.parametrize("lie", [{"failed": "19 of 20 steps done"}, {"blocks_to_come": 1}])
def test_a_run_that_is_not_complete_meets_no_bar(copy, lie):
    results = copy / FOLDER / "hol" / "results.json"
    data = json.loads(results.read_text(encoding="utf-8"))
    for run in data["runs"]:
        run |= lie
    for bar in data["bars"]:
        bar["measured"] = None
    results.write_text(json.dumps(data), encoding="utf-8")
    bars = judgements(copy)["hol"].bars
    found = [each for each in problems(copy) if each.endswith("is not measured")]
    assert found == [f"hol: {bar.condition}: {bar.claim} is not measured" for bar in bars]


def test_the_judge_prints_every_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["judge"])
    assert judge.main() == 1  # some are missed
    printed = capsys.readouterr().out
    judged = judgements()
    assert all(str(bar) in printed for each in judged.values() for bar in each.bars)
    assert all(str(bar) in printed for bars in benchmark_bars().values() for bar in bars)
    assert "older than" not in printed


def test_the_judge_takes_a_folder_of_runs(copy, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["judge", str(copy / FOLDER / "..")])
    assert judge.main() == 1  # there are none
    (copy / "runs").mkdir()
    shutil.copytree(copy / FOLDER / "memory", copy / "runs" / "memory")
    monkeypatch.setattr("sys.argv", ["judge", str(copy / "runs")])
    assert judge.main() == 0
    assert capsys.readouterr().out.endswith("7 met\n")
