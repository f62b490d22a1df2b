"""Comparisons of whole runs: each system's configuration, and the results from its files."""

import json
import math
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from example_step import STEP

from jaxmorph.compare import comparison, whole_runs
from jaxmorph.compare.blocks import Block
from jaxmorph.compare.matrix_record import comparison_matrix
from jaxmorph.compare.provenance import provenance
from jaxmorph.compare.systems import SYSTEMS
from jaxmorph.compare.whole_runs import Progress, read_whole, run_whole, whole_config
from jaxmorph.config import check_config, dump_config, load_config
from jaxmorph.config.compare_section import Compare
from jaxmorph.errors import RunFailedError, RunStoppedError, UserError
from jaxmorph.records import Event, EventKind, RunSummary
from jaxmorph.report.matrix_figure import recovery_figure, save_figure
from jaxmorph.report.matrix_table import (
    WHOLE_COLUMNS,
    matrix_markdown,
    move_rows,
    whole_rows,
)
from jaxmorph.report.page.comparison_page import comparison_page
from jaxmorph.report.page.files import ComparisonFiles
from jaxmorph.report.run_matrix import Matrix, Run
from jaxmorph.runtime.launcher import RankFailedError

CONFIG = check_config(
    {
        "parallelism": {"stages": 4},
        "optimizer": {"warmup_steps": 50},
        "checkpoint": {"every_steps": 5, "dir": "elsewhere"},
        "restart_policy": {"max_restarts": 7},
        "compare": {
            "systems": ["restart", "restart-cold", "adaptive"],
            "conditions": [
                {"name": "healthy"},
                {"name": "cut", "links": [{"between": [2, 3], "cut": True, "from_step": 12}]},
            ],
            "steps": 20,
            "reference": {"restart": [400, 700]},
        },
    }
)
assert CONFIG.compare is not None
COMPARE: Compare = CONFIG.compare
RECOVERY = {
    "restart": 1, "reason": "rank 2 failed", "step": 12, "from_step": 10, "steps_again": 2,
    "cut_off": False, "total_s": 22.5, "phases_s": {"detect": 15.0, "start": 5.5, "replay": 2.0},
}  # fmt: skip
STEP = replace(STEP, step_s=0.5, planned_bubble_rate=None)
SUMMARY = RunSummary((5.0,), 4.0, 0.5, None, None, None, 100.0, Path("run"))
FULL = "rank 1 failed: disk full"


@pytest.mark.parametrize("name", COMPARE.systems)
def test_a_whole_run_has_its_systems_policy(tmp_path, name):
    own = whole_config(CONFIG, SYSTEMS[name], COMPARE.conditions[1], tmp_path / "a")
    (tmp_path / "run.yaml").write_text(dump_config(own))  # as ranks will read it
    assert load_config(tmp_path / "run.yaml") == own
    assert (own.run.steps, own.run.dir, own.compare) == (20, str(tmp_path / "a"), None)
    assert own.optimizer.warmup_steps <= 20
    assert own.emulation.links[0].cut
    assert (own.checkpoint.every_steps, own.checkpoint.dir) == (5, None)
    policy = own.restart_policy
    assert (policy.max_restarts, policy.compilation_cache) == {
        "restart": (7, True), "restart-cold": (7, False), "adaptive": (0, False),
    }[name]  # fmt: skip
    assert own.adapts == (name == "adaptive")


def written(path, num_steps, recoveries=(), held_up_s=()):
    path.mkdir(parents=True)
    steps = [replace(STEP, step=n, loss=5.0 - n).metrics() for n in range(num_steps)]
    kinds = (EventKind.RANK_FAILED, EventKind.PLAN_ADOPTED, EventKind.RESTARTED)
    events = [
        *(Event(0.0, 0, kind) for kind in kinds),
        *(
            Event(0.0, step, EventKind.LINK_FAILED, evidence={"held_up_s": each_s})
            for step, each_s in held_up_s
        ),
    ]
    event_lines = [event.line() for event in events]
    for name, lines in (("metrics.jsonl", steps), ("events.jsonl", event_lines)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    (path / "recovery.json").write_text(json.dumps({"goodput": 0.4, "recoveries": [*recoveries]}))
    return path


@pytest.fixture
def matrix(tmp_path):
    """A system that was restarted, one that failed, and one still to come."""
    blocks: list[Block] = []
    for system, totals_s in (("restart", (10.0, 32.5)), ("restart-cold", (11.0, None))):
        for number, total_s in enumerate(totals_s, start=1):
            name = COMPARE.conditions[number - 1].name
            path = written(tmp_path / f"{system}-{name}", 20, [RECOVERY] if name == "cut" else [])
            failure = None if total_s else "rank 2 failed: in vain"
            run = read_whole(system, name, path, total_s, failure)
            source = provenance("jaxmorph compare few.yaml")
            blocks.append(Block("few", system, number, source, run=run))
    return comparison_matrix(COMPARE, "few", blocks, {"load": "2.0"})


def test_a_whole_run_is_compared_with_its_healthy_one(matrix):
    run = matrix.runs["restart", "cut"]
    assert (run.total_s, run.goodput) == (32.5, 0.4)
    healthy = matrix.runs["restart", "healthy"]
    assert run.slowdown == pytest.approx(500.0 / healthy.step_ms.median)
    assert run.reference_s == 14.0  # the paper's, or another published one
    assert run.step_ms is not None
    assert (run.step_ms.median, run.step_ms.n, run.loss) == (500.0, 20, -14.0)
    assert run.events == {"rank_failed": 1, "restarted": 1}
    failed = matrix.runs["restart-cold", "cut"]
    assert failed.failed == "20 steps done: rank 2 failed: in vain"
    assert failed.slowdown is None
    assert failed.reference_s is None
    assert ("adaptive", "cut") not in matrix.runs


def test_results_keep_recoveries(matrix):
    again = Matrix.from_json(json.loads(json.dumps(matrix.to_json())))
    assert again.runs["restart", "cut"].recoveries == (RECOVERY,)
    assert again.has_whole_runs


def test_the_table_shows_the_cost_of_failures(matrix):
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in matrix_markdown(matrix).splitlines()
        if line.startswith("|")
    ]
    heads = next(row for row in rows if "goodput" in row)
    cells = {
        (row[0], row[1]): dict(zip(heads, row, strict=True))
        for row in rows
        if len(row) == len(heads)
    }
    cut = cells["restart", "cut"]
    assert (cut["total s"], cut["more s"], cut["goodput"], cut["restarts"], cut["lost s"]) == (
        "32.5 (14)", "+22.5", "40.0%", "1", "22.5",
    )  # fmt: skip
    assert (cut["detect"], cut["compile"], cut["replay"]) == ("15.00", "0.00", "2.00")
    assert cells["restart", "healthy"]["more s"] == "-"
    assert cells["restart-cold", "cut"]["total s"] == "FAILED"


def test_a_whole_run_that_diverged_has_failed(tmp_path):
    path = written(tmp_path / "diverged", 20)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    wrong = json.dumps(replace(STEP, step=19, loss=math.nan).metrics() | {"loss": None})
    (path / "metrics.jsonl").write_text("".join(lines[:19]) + wrong + "\n")
    run = read_whole("adaptive", "cut", path, 21.0, None)
    assert run.failed == "the loss is not finite in 1 of 1 steps"
    skipped = json.dumps(replace(STEP, step=7, loss=math.nan).metrics() | {"loss": None}) + "\n"
    (path / "metrics.jsonl").write_text("".join([*lines[:7], skipped, *lines[8:]]))
    assert read_whole("adaptive", "cut", path, 21.0, None).failed is None


def test_the_table_shows_stalls_of_failed_paths(matrix, tmp_path):
    held_up_s = ((6, 2.0), (6, 1.9), (11, 0.01))  # one card with both its links, then one link
    delegated = written(tmp_path / "delegated", 20, held_up_s=held_up_s)
    run = read_whole("adaptive", "cut", delegated, 21.0, None)
    assert run.held_up_s == pytest.approx(2.01)
    assert run.events["link_failed"] == 3
    with_it = replace(matrix, runs=dict(matrix.runs) | {(run.system, run.condition): run})
    (cells,) = (row for row in whole_rows(with_it) if row[0] == run.system)
    assert dict(zip(WHOLE_COLUMNS, cells, strict=True))["held up s"] == "2.01"
    calm = next(row for row in whole_rows(matrix) if row[0] == "restart")
    assert dict(zip(WHOLE_COLUMNS, calm, strict=True))["held up s"] == "0.00"


def test_the_table_shows_what_moves_of_ranks_cost(matrix, tmp_path):
    path = written(tmp_path / "moved", 20)
    phases_s = [{"exchange": 2.5, "open": 4.25}, {"exchange": 1.0, "open": 3.0}]
    reopened = (
        Event(1.0, step, EventKind.REOPENED, evidence={"phases_s": each})
        for step, each in zip((8, 15), phases_s, strict=True)
    )
    lines = (json.dumps(event.line()) + "\n" for event in reopened)
    (path / "events.jsonl").write_text("".join(lines))
    run = read_whole("adaptive", "cut", path, 21.0, None)
    assert [*run.moves] == phases_s
    assert [*move_rows(matrix)] == []
    with_it = replace(matrix, runs=dict(matrix.runs) | {(run.system, run.condition): run})
    assert [*move_rows(with_it)] == [["adaptive", "cut", "2", "2.50 1.00", "4.25 3.00"]]
    again = Matrix.from_json(json.loads(json.dumps(with_it.to_json())))
    assert [*move_rows(again)] == [*move_rows(with_it)]
    assert "| adaptive | cut | 2 | 2.50 1.00 | 4.25 3.00 |" in matrix_markdown(with_it)


def test_the_page_has_the_table_of_whole_runs(matrix, tmp_path):
    page = comparison_page(ComparisonFiles(matrix, {}))
    assert page.count("<th") > len(WHOLE_COLUMNS)
    for cell in ("+22.5", "FAILED", "40.0%", "Whole runs, from the start of the first step"):
        assert cell in page
    healthy = {key: run for key, run in matrix.runs.items() if key[1] == "healthy"}
    calm = Matrix("calm", matrix.systems, ("healthy",), healthy)
    for each in (matrix, calm):
        save_figure(tmp_path / "a.png", recovery_figure, each)
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_progress_shows_failures():
    shown: list[str] = []
    progress = Progress(shown.append, "restart, cut")
    progress.event(Event(1.0, 12, "checkpoint_saved", detail="step_10"))
    progress.event(Event(1.0, 12, "rank_failed", detail="rank 2 failed: link 2-3 is cut"))
    assert shown == ["restart, cut: rank failed: rank 2 failed: link 2-3 is cut"]


class Runs:
    """A double of `run_here`: a run of eight steps with a given end.

    Attributes:
        ends: By what each run ends, one after another; the others come to their ends.
        asked_to_end: Whether those that come to their ends were asked to.
        caches: What JAX would have taken for its cache in each of them.
    """

    def __init__(self, *ends):
        self.ends, self.asked_to_end, self.caches = [*ends], False, []

    def __call__(self, start, reporter):
        self.caches.append(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
        written(Path(start.config.run.dir), 8)
        reporter.finish(SUMMARY)
        end = self.ends.pop(0) if self.ends else None
        if end is not None:
            raise end
        return self.asked_to_end


@pytest.fixture
def runs(monkeypatch):
    stand_in = Runs()
    monkeypatch.setattr(whole_runs, "run_here", stand_in)
    return stand_in


def run_as(name, directory, put=lambda run: None):
    run_whole(CONFIG, SYSTEMS[name], COMPARE.conditions[0], directory, lambda line: None, put)


@pytest.mark.parametrize("end", [None, RunFailedError("rank 1 failed"), KeyboardInterrupt()])
def test_a_cold_restart_hides_the_cache(runs, tmp_path, monkeypatch, end):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/warm")
    for name in COMPARE.systems:
        runs.ends = [end]
        with suppress(KeyboardInterrupt):
            run_as(name, tmp_path / name)
        assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/warm"
    assert runs.caches == ["/warm", None, "/warm"]


@pytest.mark.parametrize(
    ("end", "raised", "failed"),
    [
        (RunStoppedError("saved"), pytest.raises(RunStoppedError, match="saved"), "asked to end"),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt), "interrupted"),
        *(
            (kind(FULL, asked_to_end=True), pytest.raises(RunStoppedError, match="disk full"), FULL)
            for kind in (RankFailedError, RunFailedError)
        ),
        *((kind(FULL), nullcontext(), FULL) for kind in (RankFailedError, RunFailedError)),
        (None, pytest.raises(RunStoppedError, match="restart, healthy: asked to end in its"), None),
    ],
)
def test_a_stopped_run_ends_the_comparison(runs, tmp_path, end, raised, failed):
    put: list[Run] = []
    runs.ends, runs.asked_to_end = [end], end is None
    with raised:
        run_as("restart", tmp_path / "a", put.append)
    (run,) = put
    assert run.failed == (failed and f"8 steps done: {failed}")
    assert (run.total_s is None) == (failed is not None)
    assert run.step_ms is not None
    assert run.step_ms.n == 8


def test_a_stopped_comparison_writes_its_results(runs, tmp_path, monkeypatch):
    runs.ends = [None, None, RunStoppedError("asked to end after 8 of 20 steps, saved")]
    monkeypatch.setattr(comparison, "check_run", lambda config: None)
    (tmp_path / "few.yaml").write_text(dump_config(CONFIG))
    with pytest.raises(RunStoppedError) as raised:
        comparison.run_comparison([str(tmp_path / "few.yaml"), f"run.dir={tmp_path / 'out'}"])
    assert str(raised.value) == (
        "adaptive, healthy: asked to end after 8 of 20 steps, saved; the comparison has ended "
        "with it, and its results so far are written"
    )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["provenance"]["command"].startswith("jaxmorph compare ")
    found = results["runs"]
    assert [len(each["load"]) for each in found] == [1, 1, 1]
    assert [(each["system"], each["condition"], each["failed"]) for each in found] == [
        ("restart", "healthy", None),
        ("restart-cold", "healthy", None),
        ("adaptive", "healthy", "8 steps done: asked to end"),
    ]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), UserError("checkpoint.dir: no room")])
def test_a_resumed_comparison_makes_the_runs_that_were_not_finished(
    runs, tmp_path, monkeypatch, end
):
    monkeypatch.setattr(comparison, "check_run", lambda config: None)
    (tmp_path / "few.yaml").write_text(dump_config(CONFIG))
    runs.ends = [None, RunFailedError("rank 1 failed"), end]
    given = [str(tmp_path / "few.yaml"), f"run.dir={tmp_path / 'out'}"], "auto"
    with pytest.raises(type(end)):
        comparison.run_comparison(*given)
    block = json.loads((tmp_path / "out" / "blocks" / "adaptive-1.json").read_text())
    assert block["failure"] == (str(end) or "8 steps done: interrupted")
    assert len(runs.caches) == 3
    assert comparison.run_comparison(*given) == 1  # a run that failed by itself is a result
    assert len(runs.caches) == 3 + 4
    found = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    failed = {(run["system"], run["condition"]): run["failed"] for run in found}
    assert len(failed) == 6
    assert {key: why for key, why in failed.items() if why} == {
        ("restart-cold", "healthy"): "8 steps done: rank 1 failed"
    }
    folders = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert {"adaptive-1", "adaptive-1-again-1"} <= folders
    assert len(folders) == 7
