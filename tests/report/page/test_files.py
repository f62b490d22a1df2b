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


def test_invalid_lines_are_skipped_but_unknown_numbers_stay(make_run):
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


def test_a_new_run_has_no_steps(make_run):
    path = make_run([])
    (path / "metrics.jsonl").unlink()
    files = read_run_files(path)
    assert (files.steps, files.events, files.traces) == ((), (), {})


def test_an_unreadable_configuration_is_shown_as_text(make_run):
    path = make_run([])
    (path / "config.yaml").write_text("future: {key: 1}\n")
    files = read_run_files(path)
    assert files.config is None
    assert files.config_text == "future: {key: 1}\n"


def test_a_truncated_trace_has_no_timelines(morphed_run):
    path = read_run_files(morphed_run).traces[10]
    path.write_text(path.read_text()[:-40])
    assert read_trace(path) == {}


@pytest.mark.parametrize("text", ["{}", "[1", '{"runs": [{}]}'])
def test_invalid_results_are_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"results.json: got .*, expected what"):
        read_comparison_files(tmp_path)
