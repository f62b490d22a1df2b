import math

import pytest

from jaxmorph.errors import UserError
from jaxmorph.report.page.files import read_comparison_files, read_run_files, read_trace


def test_a_run_is_read_with_its_steps_events_and_traces(morphed_run):
    files = read_run_files(morphed_run)
    assert [step.step for step in files.steps] == list(range(40))
    assert (files.steps[22].step_s, files.steps[22].warmup_forwards) == (0.12, (6, 1))
    assert files.steps[20].link_ms == {"0>1": 30.0, "1>0": 31.0}
    assert [event.kind for event in files.events][1:3] == ["straggler_detected", "plan_changed"]
    assert (files.events[1].evidence or {})["threshold_ms"] == 1.5
    assert list(files.traces)[:2] == [0, 10]
    assert set(read_trace(files.traces[10])) == {"planned", "measured"}
    assert files.num_unreadable == 0


def test_a_line_that_was_cut_off_is_left_out_and_counted(morphed_run):
    for name in ("metrics.jsonl", "events.jsonl"):
        text = (morphed_run / name).read_text()
        (morphed_run / name).write_text(text[:-30])
    files = read_run_files(morphed_run)
    assert (files.steps[-1].step, files.events[-1].kind) == (38, "plan_changed")
    assert files.num_unreadable == 2


def test_unknown_numbers_stay_and_lines_that_are_no_steps_are_left_out(make_run):
    unknown = {"step": 3, "step_s": 0.5, "later": "version"}
    known = {"step": 1, "step_s": 0.5, "link_ms": {"0>1": None, "1>0": 2}}
    no_number, no_step = {"step": 5, "step_s": 0.5, "bubble_rate": "x"}, {"loss": 1.0}
    steps = [unknown, {"step": 0, "step_s": None}, no_step, no_number, [1], known]
    files = read_run_files(make_run(steps))
    first, last = files.steps
    assert first.link_ms is not None
    assert (first.step, first.link_ms["1>0"]) == (1, 2.0)
    assert math.isnan(first.link_ms["0>1"])
    assert math.isnan(last.loss)
    assert (last.predicted_step_s, last.bubble_rate, last.link_ms) == (None, None, None)
    assert files.num_unreadable == 4


def test_a_run_that_has_just_begun_has_no_steps(make_run):
    path = make_run([])
    (path / "metrics.jsonl").unlink()
    files = read_run_files(path)
    assert (files.steps, files.events, files.traces) == ((), (), {})


def test_a_configuration_of_another_version_is_text_alone(make_run):
    path = make_run([])
    (path / "config.yaml").write_text("future: {key: 1}\n")
    files = read_run_files(path)
    assert files.config is None
    assert files.config_text == "future: {key: 1}\n"


def test_a_trace_that_is_cut_off_is_no_timelines(morphed_run):
    path = read_run_files(morphed_run).traces[10]
    path.write_text(path.read_text()[:-40])
    assert read_trace(path) == {}


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a run directory, with a config"):
        read_run_files(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1", '{"runs": [{}]}'])
def test_results_that_are_no_comparison_are_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"results.json: got .*, expected what"):
        read_comparison_files(tmp_path)
