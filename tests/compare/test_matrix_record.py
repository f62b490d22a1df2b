import json
from importlib import import_module
from math import nan

import pytest
from example_round import PLAN, steps

from jaxmorph.compare.blocks import Block, ComparisonMessage
from jaxmorph.compare.comparison import _Results
from jaxmorph.compare.matrix_record import (
    comparison_matrix,
    comparison_notes,
    one_slow_link,
    typical_round,
)
from jaxmorph.compare.provenance import provenance
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare
from jaxmorph.config.sections import Run
from jaxmorph.plain_json import parse
from jaxmorph.report.matrix_table import matrix_markdown
from jaxmorph.report.run_matrix import Matrix

CONDITIONS = [
    {"name": "healthy"},
    {"name": "slow", "links": [{"between": [0, 1], "latency_ms": 30.0}]},
]
COMPARE = Compare.model_validate(
    {
        "systems": ["1f1b", "zb"],
        "conditions": CONDITIONS,
        "steps": 3,
        "repeats": 2,
        "largest_spread": 1.2,
        "reference": {"zb": [390.0, None]},
    }
)
TRACED = Compare.model_validate(
    {
        "systems": ["zb"],
        "conditions": [{"name": "healthy"}, {"name": "A", "trace": {"regime": "A"}}],
        "steps": 3,
        "repeats": 1,
    }
)
FEW = Compare.model_validate({"systems": ["zb"], "conditions": [{"name": "healthy"}]})


def block(*rounds, number=1, system="zb", predicted_ms=390.0, **values) -> Block:
    """A block with some rounds and, if there are any, the plans for them."""
    plans = [
        {"kind": "RoundPlanned", "condition": at, "plan": PLAN | {"predicted_ms": ms}}
        for at, ms in enumerate((predicted_ms, 1110.0))
    ]
    made = Block("made up", system, number, provenance("jaxmorph compare few.yaml"), **values)
    for message in (*plans, *rounds) if rounds else ():
        made = made.with_message(parse(ComparisonMessage, message, "a message"), 1.5)
    return made


def matrix_of(*rounds, compare=COMPARE, notes=None) -> Matrix:
    """The results of `zb`; a second round of a condition is in another block than the first."""
    parts = [[]]
    for each in rounds:
        if any(other["condition"] == each["condition"] for other in parts[-1]):
            parts.append([])
        parts[-1].append(each)
    blocks = [block(*part, number=number) for number, part in enumerate(parts, start=1)]
    return comparison_matrix(compare, "made up", blocks, notes or {})


def test_rounds_of_a_condition_are_one_run():
    matrix = matrix_of(
        steps(0, 400, 402, 404), steps(1, 800, 804, 808), steps(0, 396, 398, 400),
        steps(1, 802, 806, 810), notes={"load": "none"},
    )  # fmt: skip
    run = matrix.runs["zb", "slow"]
    assert run.step_ms is not None
    assert (run.step_ms.median, run.step_ms.n) == (805.0, 6)
    assert (run.step_ms.p10, run.step_ms.p90) == (801.0, 809.0)
    assert run.slowdown == pytest.approx(805 / 400)
    assert (run.bubble_rate, run.loss) == (0.25, 3.0)
    assert run.blocking_stall_rate == (0.0, 0.1)
    assert (run.peak_on_device, run.load) == ((3, 2), (1.5, 1.5))
    assert (run.failed, run.noisy) == (None, None)
    assert run.plan is not None
    assert run.plan.predicted_ms == 1110.0
    assert matrix.runs["zb", "healthy"].reference_ms == 390.0
    assert run.reference_ms is None
    assert ("1f1b", "slow") not in matrix.runs
    assert matrix.runs["zb", "healthy"].events == {"lane_down": 2}
    assert "- zb, healthy: 2 x lane_down\n" in matrix_markdown(matrix)


def test_without_a_healthy_condition_there_is_no_slowdown():
    conditions = [CONDITIONS[1], {"name": "healthy", "trace": {"regime": "A"}}]
    compare = COMPARE.model_copy(update=dict(Compare.model_validate({"conditions": conditions})))
    matrix = matrix_of(*(steps(at, 400, 402, 404) for at in (0, 1)), compare=compare)
    assert [run.slowdown for run in matrix.runs.values()] == [None, None]


def test_a_comparison_says_who_is_informed_and_which_bars_are_met():
    settings = {"systems": ["zb", "adaptive-direct"], "conditions": CONDITIONS}
    bar = {"systems": ["zb"], "over": "healthy", "at_most": 1.5}
    compare = Compare.model_validate(settings | {"bars": [bar], "repeats": 1})
    matrix = matrix_of(steps(0, 400), steps(1, 800), compare=compare)
    assert matrix.informed == ("adaptive-direct",)
    assert [(bar.measured, bar.verdict) for bar in matrix.bars] == [(1.0, "met"), (2.0, "missed")]
    page = matrix_markdown(matrix)
    assert "| slow | zb over its healthy step | 2.000 | at most 1.5 | missed |" in page
    assert "| adaptive-direct (informed) | … | … |" in page
    assert "given the links' delays in advance: adaptive-direct; no other" in page


def test_a_diverged_loss_is_a_failed_run():
    diverged = steps(0, 396, 398, 400) | {"loss": [5.0, nan, nan]}
    matrix = matrix_of(steps(0, 400, 402, 404), diverged)
    assert matrix.runs["zb", "healthy"].failed == "the loss is not finite in 2 of 6 steps"
    assert matrix.loss_difference is None


def test_results_have_the_contracts_fields():
    (run,) = matrix_of(steps(0, 400, 402, 404)).to_json()["runs"]
    assert run["step_ms"] == {"median": 402.0, "p10": 400.4, "p90": 403.6, "n": 3}
    assert {"system", "condition", "predicted_ms", "bubble_rate", "slowdown", "loss"} <= set(run)
    assert (run["regime"], run["failed"], run["noisy"]) == ("holds queues", None, None)


def test_a_failed_system_keeps_its_finished_rounds():
    healthy = steps(0, 400, 402, 404)
    blocks = [
        block(healthy, steps(1, 800, 801, 802)),
        block(healthy, number=2, failure="rank 1 failed: ended by SIGKILL"),
        block(system="1f1b", failure="rank 0 failed: no memory"),
    ]
    runs = comparison_matrix(COMPARE, "made up", blocks, {}).runs
    assert runs["zb", "healthy"].failed is None
    assert runs["zb", "slow"].failed == ("3 of 6 steps measured: rank 1 failed: ended by SIGKILL")
    assert runs["1f1b", "slow"].step_ms is None
    assert runs["1f1b", "slow"].failed == "0 of 6 steps measured: rank 0 failed: no memory"


def test_blocks_of_a_system_are_one_run():
    first = block(steps(0, 400, 402, 404), steps(1, 800, 804, 808), others_share=0.01)
    second = block(
        steps(0, 410, 412, 414), steps(1, 802, 806, 810) | {"loss": [2.0, 2.0, 2.0]},
        number=2, predicted_ms=400.0, others_share=0.25,
    )  # fmt: skip
    half = comparison_matrix(COMPARE, "made up", [first], {})
    assert [run.blocks_to_come for run in half.runs.values()] == [1, 1]
    assert "| zb | **402.0** (400.4 to 403.6) …<br>" in matrix_markdown(half)
    assert "- zb, slow: blocks still to come: 1\n" in matrix_markdown(half)
    matrix = comparison_matrix(COMPARE, "made up", [second, first], {})
    run = matrix.runs["zb", "healthy"]
    assert run.step_ms is not None
    assert run.plan is not None
    assert (run.step_ms.n, run.step_ms.median, run.block_ms) == (6, 407.0, (402.0, 412.0))
    assert (run.plan.predicted_ms, run.blocks_to_come) == (395.0, 0)
    assert matrix.runs["zb", "slow"].loss == 3.0  # each block begins from the same parameters
    assert run.disturbed == (
        "block 2 beside other work, for which 25% of the processors' time was used"
    )
    page = matrix_markdown(matrix)
    assert "**407.0** (401.0 to 413.0) beside other work<br>blocks 402.0, 412.0<br>" in page
    assert "| zb | 2 | " in page
    assert Matrix.from_json(json.loads(json.dumps(matrix.to_json()))).blocks == matrix.blocks


def test_half_of_a_run_meets_no_bar():
    bar = {"systems": ["zb"], "at_most": 500}
    settings = {"systems": ["zb"], "conditions": CONDITIONS[:1], "steps": 1, "bars": [bar]}
    compare = Compare.model_validate(settings)
    blocks = [block(steps(0, 400), number=number) for number in (1, 2)]
    verdicts = [
        [each.verdict for each in comparison_matrix(compare, "made up", some, {}).bars]
        for some in ([], blocks[:1], blocks)
    ]
    assert verdicts == [["not measured"], ["not measured"], ["met"]]


def test_widely_spread_times_are_noisy():
    matrix = matrix_of(steps(0, 400, 400, 480), steps(0, 400, 500, 500))
    assert matrix.runs["zb", "healthy"].noisy == "p90 / p10 is 1.250, above 1.2"


def test_the_typical_step_is_nearest_to_the_median():
    assert typical_round([block()], 0) is None
    measured = block(steps(0, 500, 510, 520), steps(0, 400, 401, 402), steps(0, 400, 403, 404))
    kept = typical_round([measured], 0)
    assert kept is not None
    assert (kept.timeline_ms, kept.step_ms) == (403.0, (400.0, 403.0, 404.0))


def test_a_traced_condition_keeps_its_last_prediction():
    planned = {"kind": "RoundPlanned", "condition": 1, "plan": PLAN | {"predicted_ms": 900.0}}
    of_both = [steps(condition, 400, 800, 1200) for condition in (0, 1)]
    runs = comparison_matrix(TRACED, "made up", [block(planned, *of_both)], {}).runs
    predicted_ms = [getattr(runs["zb", name].plan, "predicted_ms", 0) for name in ("healthy", "A")]
    assert predicted_ms == [390.0, 900.0]
    assert runs["zb", "healthy"].noisy is not None
    assert runs["zb", "A"].noisy is None
    assert runs["zb", "A"].total_s == pytest.approx(2.4)


def latency(*between_ms: tuple[int, int, float]) -> dict:
    links = [{"between": [low, high], "latency_ms": ms} for low, high, ms in between_ms]
    return {"name": str(between_ms), "links": links}


HEALTHY, SLOW = latency(), latency((1, 2, 10.0))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([HEALTHY, SLOW, latency((1, 2, 60.0))], ("1-2", (0.0, 10.0, 60.0))),
        ([HEALTHY, SLOW], ("", ())),
        ([HEALTHY, latency((1, 2, 60.0)), SLOW], ("", ())),
        ([HEALTHY, SLOW, latency((2, 3, 20.0))], ("", ())),
        ([HEALTHY, latency((1, 2, 1.0)), latency((1, 2, 2.0), (1, 2, 3.0))], ("", ())),
        ([HEALTHY, SLOW, latency((1, 2, 60.0)) | {"trace": "x.csv"}], ("", ())),
    ],
)
def test_one_slow_link_is_found(conditions, expected):
    compare = Compare.model_validate({"conditions": conditions})
    assert one_slow_link(compare.conditions) == expected


def notes_of(compare, **sections):
    config = Config.model_validate(
        {"compare": {"conditions": [{"name": "healthy"}], **compare}, **sections}
    )
    assert config.compare is not None
    return comparison_notes(config, config.compare)


def test_notes_let_a_reader_judge_the_comparison():
    paced = {"forward_ms": 10.0, "backward_input_ms": 9.0, "backward_weight_ms": 8.0}
    compare = {"systems": ["zb", "zb-delegated"], "steps": 5, "repeats": 3, "largest_spread": 1.25}
    notes = notes_of(compare, emulation={"accelerator": paced})
    assert notes["systems"].startswith("zb: zero bubbles while links are healthy; zb-delegated: ")
    for text in ("paced: F 10 ms, B 9 ms, W 8 ms", "'holds queues'", "'overlaps'"):
        assert text in notes["regime"]
    for text in ("3 rounds of 5 steps a condition", "above 1.25"):
        assert text in notes["steps"]
    assert "left aside" not in notes


@pytest.mark.parametrize(("run_steps", "noted"), [(6, "run.steps, "), (Run().steps, "")])
def test_ignored_sections_are_noted(run_steps, noted):
    notes = notes_of(
        {"profiling_steps": 0},
        run={"steps": run_steps},
        parallelism={"stages": 4},
        routes={"2-3": "delegated"},
        schedule={"link_ms": {"2-3": 30}},
        emulation={
            "links": [{"between": [2, 3], "latency_ms": 30}],
            "hosts": [{"between": [0, 1], "latency_ms": 30}],
        },
        data={"held_out_fraction": 0.1},
        evaluation={"every_steps": 5},
        limits={"host_gib": 4},  # which systems keep within
    )
    assert notes["left aside"].startswith(
        f"{noted}routes, schedule.link_ms, emulation.links, emulation.hosts, evaluation: systems "
    )
    assert notes["steps"].startswith("planned and predicted from warm-up; ")


def test_traces_and_whole_runs_are_noted():
    of_regime = {"name": "A", "trace": {"regime": "A", "seed": 3}}
    of_file = {"name": "mine", "trace": {"file": "x.csv", "time_scale": 0.2, "latency_scale": 0.5}}
    notes = notes_of({"conditions": [{"name": "healthy"}, of_regime, of_file]})
    assert notes["traces"].startswith(
        "A: regime A, seed 3; mine: x.csv, times or steps times 0.2, delays times 0.5; a trace st"
    )
    notes = notes_of({"systems": ["restart"], "steps": 40}, checkpoint={"every_steps": 10})
    assert notes["steps"].startswith("each system under each condition is a run of 40 steps")
    assert "restart: 1f1b that restarts" in notes["systems"]


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("compare.comparison.write_report", "report.html"),
        ("report.matrix_figure.matrix_figure", "figure.png"),
        ("compare.comparison.matrix_markdown", "table.md"),
        (None, None),
    ],
)
def test_a_file_that_fails_is_one_line(tmp_path, monkeypatch, broken, name):
    def fail(*_: object) -> None:
        raise ValueError("no such shape\nin line 2")

    import_module("jaxmorph.report.page.comparison_page")  # the page's figure is the whole one
    if broken:
        monkeypatch.setattr(f"jaxmorph.{broken}", fail)
    results = _Results("few", Config(), FEW, tmp_path, {})
    results.keep(block(failure="rank 0 failed: no memory"))
    complaints = [f"could not write {name}: ValueError: no such shape"] if broken else []
    assert results.write() == complaints
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["failed"].endswith("rank 0 failed: no memory")
    written = {"blocks", "results.json", "table.md", "timelines.json", "figure.png", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == written - {name}
