import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmorph.config import Config, load_config
from jaxmorph.errors import UserError
from jaxmorph.reporting import Event, StepRecord, open_run_directory
from jaxmorph.reporting.run_directory import reopen_run_directory


def config_for(path: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(path)}})


def record(**changes) -> StepRecord:
    values = {
        "step": 0, "loss": 5.5, "grad_norm": 1.25, "step_s": 0.4, "tokens_per_s": 5120.0,
        "schedule": "zb-h2", "warmup_forwards": (3, 2, 1), "routes": {"0-1": "direct"},
        "predicted_step_s": 0.39, "bubble_rate": 0.12, "peak_live": (3, 2, 1), "compilations": 0,
        "planned_bubble_rate": 0.11,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


def lines(path: Path) -> list[dict]:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_fresh_directory_holds_the_config_that_loads_back(tmp_path):
    config = config_for(tmp_path / "deep" / "run")
    with open_run_directory(config) as directory:
        assert directory.path == tmp_path / "deep" / "run"
        assert load_config(directory.path / "config.yaml") == config


def test_a_second_run_goes_beside_the_first_and_touches_nothing(tmp_path):
    config = config_for(tmp_path / "demo")
    paths = []
    for step in range(3):
        with open_run_directory(config) as directory:
            directory.write_step(record(step=step))
            paths.append(directory.path)
    assert [path.name for path in paths] == ["demo", "demo-2", "demo-3"]
    assert [lines(path / "metrics.jsonl")[0]["step"] for path in paths] == [0, 1, 2]


def test_an_empty_directory_is_used_and_a_file_in_the_way_is_passed_by(tmp_path):
    (tmp_path / "empty").mkdir()
    with open_run_directory(config_for(tmp_path / "empty")) as directory:
        assert directory.path.name == "empty"
    (tmp_path / "file").write_text("precious")
    with open_run_directory(config_for(tmp_path / "file")) as directory:
        assert directory.path.name == "file-2"
    assert (tmp_path / "file").read_text() == "precious"


def test_a_place_where_nothing_can_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match=r"^run.dir: \S+/file/run: cannot write \S+: Not a dir"):
        open_run_directory(config_for(tmp_path / "file" / "run"))


def test_a_step_is_one_line_with_exactly_the_metrics(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        directory.write_step(record())
        [line] = lines(directory.path / "metrics.jsonl")  # before closing: nothing is held back
    assert list(line.items()) == [
        ("step", 0),
        ("loss", 5.5),
        ("grad_norm", 1.25),
        ("step_s", 0.4),
        ("tokens_per_s", 5120.0),
        ("schedule", "zb-h2"),
        ("warmup_forwards", [3, 2, 1]),
        ("routes", {"0-1": "direct"}),
        ("predicted_step_s", 0.39),
        ("bubble_rate", 0.12),
        ("peak_live", [3, 2, 1]),
        ("compilations", 0),
        ("skipped", False),
    ]


def test_a_step_that_was_evaluated_has_its_held_out_loss_too(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        directory.write_step(record(held_out_loss=5.75))
        directory.write_step(record(held_out_loss=float("nan")))
        found, diverged = lines(directory.path / "metrics.jsonl")
    assert found["held_out_loss"] == 5.75
    assert diverged["held_out_loss"] is None
    assert len(found) == 14


def test_numbers_that_are_not_finite_or_not_pythons_are_still_json(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        directory.write_step(
            record(loss=float("nan"), grad_norm=np.float32("inf"), step=np.int64(3))
        )
        [line] = lines(directory.path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["step"]) == (None, None, 3)


def test_events_have_their_own_file(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        directory.write_event(Event(1.5, 4, "route_changed", "2-3", "slow"))
        directory.write_event(Event(2.5, 5, "checkpoint_saved"))
        directory.write_event(Event(3.5, 6, "plan_changed", evidence={"samples_ms": [31.0]}))
        *events, last = lines(directory.path / "events.jsonl")
    assert last["evidence"] == {"samples_ms": [31.0]}
    assert events == [
        {"time_s": 1.5, "step": 4, "kind": "route_changed", "link": "2-3", "detail": "slow"},
        {"time_s": 2.5, "step": 5, "kind": "checkpoint_saved", "link": None, "detail": ""},
    ]


def test_a_trace_has_a_place_to_go(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        path = directory.trace_path(20)
        path.write_text("{}")
    assert path == tmp_path / "run" / "trace" / "step_20.json"


def test_a_profile_takes_the_place_of_the_one_before(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        for latency_ms in (1.5, 2.5):
            directory.write_profile({"links": {"0-1": {"forward_latency_ms": latency_ms}}})
        names = sorted(path.name for path in directory.path.iterdir())
    assert lines(tmp_path / "run" / "profile.json") == [
        {"links": {"0-1": {"forward_latency_ms": 2.5}}}
    ]
    assert names == ["config.yaml", "events.jsonl", "metrics.jsonl", "profile.json"]


def stopped_run(path: Path) -> Config:
    """A run that was killed in its fourth step, when it had a checkpoint after two."""
    config = config_for(path)
    with open_run_directory(config) as directory:
        for step in range(3):
            directory.write_step(record(step=step, loss=1.0))
        directory.write_event(Event(0.0, 0, "plan_adopted"))
        directory.write_event(Event(0.2, 1, "checkpoint_saved"))
        directory.write_event(Event(0.3, 2, "step_skipped"))
        directory.write_event(Event(0.0, 2, "resumed"))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    return config


def test_a_run_that_goes_on_has_each_step_once_and_loses_nothing_else(tmp_path):
    config = stopped_run(tmp_path / "run")
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 500})})
    with reopen_run_directory(tmp_path / "run", longer, 2) as directory:
        directory.write_step(record(step=2, loss=2.0))
        directory.write_event(Event(0.1, 2, "resumed"))
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in metrics] == [(0, 1.0), (1, 1.0), (2, 2.0)]
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [(event["kind"], event["time_s"]) for event in events] == [
        ("plan_adopted", 0.0), ("checkpoint_saved", 0.2), ("resumed", 0.0), ("resumed", 0.1),
    ]  # fmt: skip
    assert load_config(tmp_path / "run" / "config.yaml").run.steps == 500


def test_a_run_that_cannot_be_written_to_is_told_of(tmp_path):
    config = stopped_run(tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run" / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"^--resume: \S+/run: cannot write: Is a directory"):
        reopen_run_directory(tmp_path / "run", config, 2)


def test_a_run_that_cannot_write_for_tensorboard_goes_on_with_nothing_changed(
    tmp_path, monkeypatch
):
    stopped_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    wanted = {"run": {"dir": str(tmp_path / "run")}, "metrics": {"tensorboard": True}}
    with pytest.raises(UserError, match=r"tensorboardX is not installed"):
        reopen_run_directory(tmp_path / "run", Config.model_validate(wanted), 2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_that_goes_back_forgets_what_it_will_do_again_but_not_why(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        for step in range(6):
            directory.write_step(record(step=step, loss=float(step)))
        for step, kind in (
            (1, "plan_adopted"), (4, "plan_changed"), (5, "link_failed"), (5, "rank_failed"),
        ):  # fmt: skip
            directory.write_event(Event(1.0, step, kind))
        directory.go_back(4)
        directory.write_event(Event(2.0, 4, "resumed"))
        directory.write_step(record(step=4, loss=44.0))
        told = lines(directory.path / "metrics.jsonl")
        events = lines(directory.path / "events.jsonl")
    assert [line["loss"] for line in told] == [0.0, 1.0, 2.0, 3.0, 44.0]
    kinds = [event["kind"] for event in events]
    assert kinds == ["plan_adopted", "link_failed", "rank_failed", "resumed"]


def test_what_failures_cost_takes_the_place_of_what_was_there(tmp_path):
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        for goodput in (0.5, 0.75):
            directory.write_recovery({"goodput": goodput, "recoveries": []})
    told = json.loads((tmp_path / "run" / "recovery.json").read_text())
    assert told == {"goodput": 0.75, "recoveries": []}
