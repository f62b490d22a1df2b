import json
import re

import pytest

from jaxmorph.report.page.files import read_run_files
from jaxmorph.report.page.run_page import MOST_DRAWN, result_sentence, run_page

EVIDENCE = {"samples_ms": [30.5, 31.0], "baseline_ms": 0.5, "spread_ms": 0.1, "threshold_ms": 1.5}


@pytest.fixture
def page_of(parse):
    """The parsed page of a run directory."""
    return lambda path: parse(run_page(read_run_files(path)))


def test_a_morphed_run_fills_every_section(morphed_page):
    assert morphed_page.texts("h1") == ["Run made"]
    assert morphed_page.texts("p", "result") == [
        "40 steps, median 110.0 ms; 1 morph; steps took as long as predicted."
    ]
    assert morphed_page.rows("Plans in force") == [
        ["zb-h2", "3 1", "direct", "22", "0", "21", "100.0 ms", "100.0 ms"],
        ["zb-h2", "6 1", "delegated", "18", "22", "39", "120.0 ms", "120.0 ms"],
    ]
    assert "Link 0-1, ms" in morphed_page.texts("figcaption")
    assert morphed_page.rows("Transfers by direction") == [
        ["0 to 1", "40", "0.50 ms", "15.25 ms", "30.00 ms"],
        ["1 to 0", "40", "0.60 ms", "15.80 ms", "31.00 ms"],
    ]
    assert "steps: 40" in morphed_page.texts("pre")[0]
    assert "Failures" not in morphed_page.source


def test_a_change_is_marked_and_shown_before_during_and_after(morphed_page):
    assert morphed_page.values("xlink:href").count("#change-1") == 4  # number and box, in two plots
    assert "change-1" in morphed_page.values("id")
    assert "Change 1: step 20, new plan from step 22" in morphed_page.texts("summary")
    during = "step 20, during, planned: 76.0 ms, 2 stages; step 20, during, measured: 300.0 ms, 2"
    assert any(during in label for label in morphed_page.values("aria-label"))
    rows = morphed_page.rows("Shares of the steps, means of their stages")
    assert [row[:2] for row in rows] == [
        ["step 18, before", "100.0 ms"],
        ["step 20, during", "300.0 ms"],
        ["step 23, after", "120.0 ms"],
    ]
    for row in rows:
        shares = [float(cell.removesuffix(" %")) for cell in row[2:]]
        assert sum(shares) == pytest.approx(100.0, abs=0.5)
    assert float(rows[1][-1].removesuffix(" %")) > 60.0  # between the last op and the barrier
    assert len(morphed_page.rows("Shares of the steps by stage")) == 6


def test_decisions_show_their_evidence(morphed_page):
    rows = morphed_page.rows("Decisions with their evidence")
    assert [row[2] for row in rows] == [
        "plan adopted", "straggler detected (change 1)", "plan changed (change 1)",
    ]  # fmt: skip
    assert rows[1][:2] == ["20", "2.2 s"]
    assert rows[1][3:] == [
        "0-1",
        "0 to 1: 31 ms, <b>healthy</b> 0.5",
        "samples 30.5, 31.0 ms; baseline 0.50 ms; threshold 1.50 ms; spread 0.10 ms",
    ]
    assert [row[2] for row in morphed_page.rows("Other events")] == ["checkpoint saved"]


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([], "No step has been recorded yet."),
        ([{"step": 0, "step_s": 0.412}], "1 of 40 steps so far, median 412.0 ms; no morph."),
        (
            [{"step": at, "step_s": 0.509, "predicted_step_s": 0.5} for at in range(40)],
            "40 steps, median 509.0 ms; no morph; steps took 1.8 % longer than predicted.",
        ),
    ],
)
def test_the_sentence_fits_the_recorded_steps(make_run, steps, sentence):
    assert result_sentence(read_run_files(make_run(steps))) == sentence


def _evidence_row(page_of, make_run, evidence):
    event = {"time_s": 1.0, "step": 22, "kind": "plan_changed", "evidence": evidence}
    page = page_of(make_run([{"step": 0, "step_s": 0.1}], [event]))
    return page, page.rows("Decisions with their evidence")[0][5]


def test_compared_plans_are_evidence(make_run, page_of):
    kept = {"schedule": "zb-h2", "warmup_forwards": [3, 1], "predicted_ms": 300.04}
    better = {
        "schedule": "adaptive", "warmup_forwards": [6, 1], "predicted_ms": 120.0,
        "routes": {"0-1": "delegated"},
    }  # fmt: skip
    evidence = {"from": kept, "to": better, "candidates": [better], "verdicts": [EVIDENCE]}
    page, _ = _evidence_row(page_of, make_run, evidence)
    assert page.texts("li")[-2:] == [
        "in force: zb-h2 3 1: 300.0 ms", "or: adaptive 6 1, delegated: 120.0 ms",
    ]  # fmt: skip
    assert "adaptive 6 1, delegated: 120.0 ms" in page.texts("b")


def test_other_evidence_is_text(make_run, page_of):
    evidence = {"took_ms": [0.5, 1.25], "is_late": False}
    _, cell = _evidence_row(page_of, make_run, evidence)
    assert cell == "evidence: took_ms 0.5 1.25, is_late False"


def test_invalid_samples_are_left_out(make_run, page_of):
    evidence = {"samples_ms": [float("nan"), "1", None, 2.0], "threshold_ms": float("inf")}
    assert _evidence_row(page_of, make_run, evidence)[1] == "samples 2.0 ms"


def test_the_page_loads_nothing(morphed_page):
    source = morphed_page.source
    assert not re.findall(r"https?:|//[a-z]|@import|<script|<link|<img|src=", source)
    needed = {*re.findall(r"(?:url\(|xlink:href=\")#([^)\"]*)", source)}
    assert needed <= {*re.findall(r'id="([^"]*)"', source)}


def test_all_text_is_escaped(make_run, parse):
    attack = '</title><script>alert("1")</script>'
    steps = [
        {
            "step": step, "step_s": 0.1, "schedule": attack + str(step // 2),
            "routes": {attack: attack}, "link_ms": {attack: 1.0, "\ud800$": 2.0},
        }
        for step in range(4)
    ]  # fmt: skip
    event = {"step": 1, "kind": f"plan_{attack}", "link": attack, "detail": attack}
    extra = [event | {"evidence": each} for each in ({attack: attack}, EVIDENCE)]
    path = make_run(steps, [*extra, event | {"kind": attack}])
    (path / "config.yaml").write_text(f"x: {attack}\n")
    source = run_page(read_run_files(path))
    assert "<script" not in source
    assert source.count("</title>") == 1
    assert attack in parse(source).texts("pre")[0]


def test_without_changes_two_steps_are_shown(make_run, page_of):
    steps = [{"step": step, "step_s": 0.1} for step in range(40)]
    page = page_of(make_run(steps, traced=[0, 20, 39]))
    rows = page.rows("Shares of the steps, means of their stages")
    assert [row[0] for row in rows] == ["step 20", "step 39"]


@pytest.mark.parametrize("count", [0, 1, 10])
def test_short_runs_have_a_page(make_run, page_of, count):
    page = page_of(make_run([{"step": step, "step_s": 0.1} for step in range(count)]))
    assert ("steps" in page.values("id")) == (count > 0)
    assert "No step of this run was traced." in page.texts("p", "note")


def test_an_outlier_does_not_flatten_the_plot(make_run, page_of):
    steps = [{"step": at, "step_s": 9.0 if at == 77 else 0.4} for at in range(200)]
    page = page_of(make_run(steps))
    says = page.texts("figcaption")[0]
    assert says.endswith("Cut off at the upper edge: 1 longer, up to 9,000.0 ms.")
    heights = re.findall(r"\b\d,?\d00\b", page.texts("svg", "chart")[0])
    assert "9,000" not in heights


def test_a_truncated_line_is_reported(make_run, page_of):
    run = make_run([{"step": 0, "step_s": 0.1}])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time_s": 3')
    assert any("1 line is incomplete" in text for text in page_of(run).texts("p"))


@pytest.mark.long
def test_a_long_run_has_a_small_page(make_run):
    steps = [
        {"step": step, "step_s": 0.1 + 0.001 * (step % 7), "loss": 4.0, "predicted_step_s": 0.1}
        | {"link_ms": {f"{a}>{a + 1}": 1.0 + step % 3 for a in range(7)}}
        | {"schedule": "ab"[step // 20 % 2]}
        for step in range(2_500)
    ]
    events = [
        {"time_s": 0.1 * step, "step": step, "kind": kind, "detail": "x" * 100}
        for step in range(0, 2_500, 5)
        for kind in ("straggler_detected", "lane_down")
    ]
    traced = sorted({at + by for at in range(20, 2_500, 100) for by in (-2, 0, 1)})
    source = run_page(read_run_files(make_run(steps, events, traced, num_stages=4)))
    assert len(source) < 1_500_000
    assert source.count('class="change"') <= MOST_DRAWN


def restarted(step, lengths_s, **extra):
    evidence = {"step": step, "from_step": step - 1, "phases_s": lengths_s, "cut_off": False}
    evidence |= extra
    return {"time_s": 1.0, "step": step - 1, "kind": "restarted", "evidence": evidence}


def test_each_replica_has_its_plan_and_times(make_run, page_of, morphed_page):
    def of_step(*pipelines_s):
        return [
            {
                "schedule": "zb-h2", "warmup_forwards": [3, 1], "routes": {"0-1": route},
                "predicted_step_s": 0.09, "pipeline_s": pipeline_s,
            }
            for route, pipeline_s in zip(("direct", "delegated"), pipelines_s, strict=True)
        ]  # fmt: skip

    step_s = ((0.1, 0.2), (0.2, 0.3), (0.12, 0.4))
    lines = [
        {"step": step, "step_s": 0.5, "replicas": of_step(*each)}
        for step, each in enumerate(step_s)
    ]
    assert page_of(make_run(lines)).rows("Replicas") == [
        ["r0", "zb-h2", "3 1", "direct", "120.0 ms", "90.0 ms"],
        ["r1", "zb-h2", "3 1", "delegated", "300.0 ms", "90.0 ms"],
    ]
    assert "Replicas: " not in " ".join(morphed_page.texts("summary"))


def test_the_speed_of_devices_is_shown(make_run, page_of, morphed_page):
    lines = [
        {"step": step, "step_s": 0.5, "tflops_per_device": 400.0 + step, "mfu": 0.4 + step / 10}
        for step in range(3)
    ]
    page = page_of(make_run(lines))
    assert {"401", "50.0 %"} <= {*page.texts("dd")}
    assert "median MFU" not in morphed_page.texts("dt")


def test_failures_have_a_table_of_costs(make_run, page_of):
    first = {"detect": 0.25, "tear_down": 1.0, "back_off": 1.0, "start": 4.0}
    second = first | {"compile": 2.0, "restore": 0.5, "plan": 3.0, "replay": 0.75}
    events = [
        restarted(7, first, reason="rank 1 failed: <b>", cut_off=True),
        restarted(9, second, reason="rank 2 failed"),
    ]
    run = make_run([{"step": 0, "step_s": 0.1, "tokens_per_s": 12345.0}], events)
    (run / "recovery.json").write_text(json.dumps({"goodput": 0.625}))
    page = page_of(run)
    rows = page.rows("Cost of failures, seconds")
    assert rows[0] == [
        "7", "rank 1 failed: <b> (interrupted)", "6", "0.25", "1.00", "1.00", "4.00", "-", "-", "-",
        "-", "6.25",
    ]  # fmt: skip
    assert rows[1][-1] == "12.50"
    assert rows[2][1:] == [
        "all 2", "", "0.50", "2.00", "2.00", "8.00", "2.00", "0.50", "3.00", "0.75", "18.75",
    ]  # fmt: skip
    assert {"62.5 %", "12,345"} <= {*page.texts("dd")}
