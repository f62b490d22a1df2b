import pytest

from jaxmorph.errors import UserError
from jaxmorph.report.page.files import read_comparison_files, read_run_files, read_trace


def test_a_run_is_read_with_its_steps_events_and_traces(morphed_run):
    files = read_run_files(morphed_run)
    assert [step.step for step in files.steps] == list(range(40))
    assert (files.steps[22].step_ms, files.steps[22].warmup_forwards) == (120.0, (6, 1))
    assert files.steps[20].link_ms == {"0>1": 30.0, "1>0": 31.0}
    assert [event.kind for event in files.events][1:3] == ["straggler_detected", "plan_changed"]
    assert files.events[1].more["evidence"]["threshold_ms"] == 1.5
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


def test_numbers_that_are_no_numbers_are_unknown_and_lines_without_a_step_left_out(make_run):
    odd = {"step": 3, "step_s": 0.5, "loss": None, "predicted_step_s": None, "bubble_rate": "x"}
    whole = {"step": 1, "step_s": 0.5, "link_ms": {"0>1": None, "1>0": 2}}
    files = read_run_files(make_run([odd, {"step": 0, "step_s": None}, {"loss": 1.0}, [1], whole]))
    first, last = files.steps
    assert (first.step, first.link_ms) == (1, {"1>0": 2.0})
    assert (last.loss, last.predicted_ms, last.bubble_rate, last.link_ms) == (None, None, None, {})
    assert files.num_unreadable == 3


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
