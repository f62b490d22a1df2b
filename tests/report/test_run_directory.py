import errno
import json
import os
import random
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxmorph.config import Config, load_config
from jaxmorph.errors import UserError
from jaxmorph.messages import LinksChanged
from jaxmorph.records import Event, EventKind, StepRecord
from jaxmorph.report.run_directory import (
    RunLines,
    claim_run_directory,
    open_run_directory,
    read_records,
    reopen_run_directory,
    replace_file,
)


def config_for(path: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(path)}})


@pytest.fixture
def directory(tmp_path):
    """A run's directory, open."""
    with open_run_directory(config_for(tmp_path / "run")) as opened:
        yield opened


def lines(path: Path) -> list[dict]:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def values(path: Path) -> list[dict]:
    """Lines without their checksums, which each has at its end."""
    found = lines(path)
    assert all([*line][-1] == "crc32" for line in found)
    return [{key: value for key, value in line.items() if key != "crc32"} for line in found]


def test_a_new_directory_holds_the_configuration(tmp_path):
    config = config_for(tmp_path / "deep" / "run")
    with open_run_directory(config) as directory:
        assert directory.path == tmp_path / "deep" / "run"
        assert load_config(directory.path / "config.yaml") == config


def test_a_second_run_gets_its_own_directory(tmp_path, step):
    paths = []
    for number in range(3):
        with open_run_directory(config_for(tmp_path / "demo")) as directory:
            directory.write_step(replace(step, step=number))
            paths.append(directory.path)
    assert [path.name for path in paths] == ["demo", "demo-2", "demo-3"]
    assert [lines(path / "metrics.jsonl")[0]["step"] for path in paths] == [0, 1, 2]


def test_empty_directories_are_used_but_files_skipped(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    for wanted, got in (("empty", "empty"), ("file", "file-2")):
        with open_run_directory(config_for(tmp_path / wanted)) as directory:
            assert directory.path.name == got
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(UserError, match=r"^run.dir: \S+/file/run: cannot write \S+: Not a dir"):
        open_run_directory(config_for(tmp_path / "file" / "run"))


def test_a_step_is_one_line_with_exactly_the_metrics(directory, step):
    directory.write_step(step)
    directory.write_step(replace(step, held_out_loss=5.75))
    directory.write_step(replace(step, held_out_loss=float("nan")))
    # Before closing: every line is flushed.
    line, evaluated, diverged = values(directory.path / "metrics.jsonl")
    assert list(line.items()) == [
        ("step", 0),
        ("loss", 5.0),
        ("grad_norm", 1.5),
        ("step_s", 0.4),
        ("tokens_per_s", 10_240.0),
        ("schedule", "zb-h2"),
        ("warmup_forwards", [3, 1]),
        ("routes", {"0-1": "direct"}),
        ("predicted_step_s", 0.39),
        ("bubble_rate", 0.125),
        ("peak_live", [3, 1]),
        ("compilations", 0),
        ("skipped", False),
    ]
    assert {**evaluated, "held_out_loss": None} == diverged == line | {"held_out_loss": None}
    assert evaluated["held_out_loss"] == 5.75


def test_odd_numbers_become_valid_json(directory, step):
    odd = replace(step, loss=float("nan"), grad_norm=np.float32("inf"), step=np.int64(3))
    directory.write_step(odd)
    [line] = lines(directory.path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["step"]) == (None, None, 3)


def test_events_have_their_own_file(directory):
    directory.write_event(Event(1.5, 4, "route_changed", "2-3", "slow"))
    directory.write_event(Event(2.5, 5, "checkpoint_saved"))
    directory.write_event(Event(3.5, 6, "plan_changed", evidence={"samples_ms": [31.0]}))
    *events, last = values(directory.path / "events.jsonl")
    assert last["evidence"] == {"samples_ms": [31.0]}
    assert events == [
        {"time_s": 1.5, "step": 4, "kind": "route_changed", "link": "2-3", "detail": "slow"},
        {"time_s": 2.5, "step": 5, "kind": "checkpoint_saved", "link": None, "detail": ""},
    ]


def test_profile_and_recovery_files_are_replaced(directory):
    for number in (1.5, 2.5):
        directory.write_profile({"links": {"0-1": {"forward_latency_ms": number}}})
        directory.write_recovery({"goodput": number / 4, "recoveries": []})
    assert directory.trace_path(20) == directory.path / "trace" / "step_20.json"
    names = sorted(path.name for path in directory.path.iterdir())
    assert values(directory.path / "profile.json") == [
        {"links": {"0-1": {"forward_latency_ms": 2.5}}}
    ]
    written = json.loads((directory.path / "recovery.json").read_text())
    assert written == {"goodput": 0.625, "recoveries": [], "crc32": written["crc32"]}
    assert names == [
        "config.yaml", "events.jsonl", "metrics.jsonl", "profile.json", "recovery.json", "trace",
    ]  # fmt: skip


@pytest.fixture
def stopped(tmp_path, step) -> Path:
    """A run that was killed in its fourth step, with a checkpoint after two."""
    with open_run_directory(config_for(tmp_path / "run")) as directory:
        for number in range(3):
            directory.write_step(replace(step, step=number, loss=1.0))
        for time_s, number, kind in (
            (0.0, 0, "plan_adopted"), (0.2, 1, "checkpoint_saved"), (0.3, 2, "step_skipped"),
            (0.0, 2, "resumed"),
        ):  # fmt: skip
            directory.write_event(Event(time_s, number, kind))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    return tmp_path / "run"


def test_a_resumed_run_has_each_step_once(stopped, step):
    longer = Config.model_validate({"run": {"dir": str(stopped), "steps": 500}})
    with reopen_run_directory(stopped, longer, 2) as directory:
        directory.write_step(replace(step, step=2, loss=2.0))
        directory.write_event(Event(0.1, 2, "resumed"))
    metrics = lines(stopped / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in metrics] == [(0, 1.0), (1, 1.0), (2, 2.0)]
    events = lines(stopped / "events.jsonl")
    assert [(event["kind"], event["time_s"]) for event in events] == [
        ("plan_adopted", 0.0), ("checkpoint_saved", 0.2), ("resumed", 0.0), ("resumed", 0.1),
    ]  # fmt: skip
    assert load_config(stopped / "config.yaml").run.steps == 500


def test_damaged_lines_are_left_out_and_counted(stopped):
    metrics, events = stopped / "metrics.jsonl", stopped / "events.jsonl"
    metrics.write_text(metrics.read_text().replace("10240.0", "10241.0", 1))
    events.write_bytes(events.read_bytes().replace(b"plan_adopted", b"plan_\xe1dopted", 1))
    with pytest.raises(UserError, match=r"^\S+/metrics.jsonl, line 1: got other values than were"):
        read_records(metrics, StepRecord)
    with reopen_run_directory(stopped, config_for(stopped), 2) as directory:
        assert directory.damage == (
            "metrics.jsonl: 2 damaged lines left out; metrics.jsonl lacks 1 of 2 steps, the first "
            "is 0; events.jsonl: 1 damaged line left out"
        )
    assert [line["step"] for line in lines(metrics)] == [1]
    with reopen_run_directory(stopped, config_for(stopped), 1) as directory:
        directory.go_back(0)
        assert directory.damage == ""


def test_damaged_objects_are_removed(stopped):
    with reopen_run_directory(stopped, config_for(stopped), 2) as directory:
        directory.write_profile({"values": [1]})
        directory.write_recovery({"values": [1]})
        for replica in range(2):
            directory.write_links(LinksChanged({}, 1, (), replica))
        for path in stopped.glob("*.json"):
            path.write_text(path.read_text().replace("1", "7", 1))
        directory.go_back(2)
        names = ("profile", "recovery", "links", "links_r1")
        assert directory.damage == "; ".join(
            f"{name}.json is damaged, and removed" for name in names
        )
    assert not list(stopped.glob("*.json"))


def test_a_flipped_bit_changes_no_value_in_silence(stopped):
    with reopen_run_directory(stopped, config_for(stopped), 2) as directory:
        directory.write_links(LinksChanged({"stages": 2}, 3, ({"links": [1.5]},)))
        directory.write_profile({"costs": [2.5]})
        directory.go_back(2)
        assert directory.damage == ""
    files = {path: path.read_bytes() for path in stopped.glob("*.json*")}
    before = {path: parsed(path) for path in files}
    rng = random.Random(5)
    for _ in range(300):
        path = rng.choice(sorted(files))
        changed, bit = bytearray(files[path]), rng.randrange(8 * len(files[path]))
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with reopen_run_directory(stopped, config_for(stopped), 2) as directory:
            assert directory.damage or parsed(path) == before[path], f"{path}, bit {bit}"
        path.write_bytes(files[path])


def parsed(path):
    return [
        dict([*json.loads(line).items()][:-1])  # without the sum
        for line in path.read_text(errors="replace").splitlines()
    ]


def test_what_cannot_be_written_waits(tmp_path, step, monkeypatch):
    """A full disk takes half of a line, then nothing, then all again."""
    room, write = [20], os.write

    def write_some(fd, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, data[: room[0]])
        room[0] -= done
        return done

    lines_of_run = RunLines(tmp_path)
    monkeypatch.setattr(os, "write", write_some)
    for number in range(2):
        with pytest.raises(OSError, match=r"No space left on device: \S+/metrics.jsonl"):
            lines_of_run.write_step(replace(step, step=number))
    with pytest.raises(OSError, match=r"No space left on device: \S+/metrics.jsonl"):
        lines_of_run.sync()
    room[0] = 1 << 20
    lines_of_run.write_step(replace(step, step=2))
    lines_of_run.sync()
    lines_of_run.close()
    assert [line["step"] for line in values(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_lines_after_a_removed_directory_go_to_a_new_file(tmp_path, step):
    (run := tmp_path / "run").mkdir()
    lines_of_run = RunLines(run)
    lines_of_run.write_step(replace(step, step=0))
    shutil.rmtree(run)
    with pytest.raises(OSError, match=r"No such file or directory: \S+/metrics.jsonl"):
        lines_of_run.write_step(replace(step, step=1))
    run.mkdir()
    lines_of_run.write_step(replace(step, step=2))
    lines_of_run.sync()
    lines_of_run.close()
    assert [line["step"] for line in values(run / "metrics.jsonl")] == [1, 2]


def test_records_are_read_without_a_truncated_line(stopped, step):
    first, *_ = records = read_records(stopped / "metrics.jsonl", StepRecord)
    assert [record.step for record in records] == [0, 1, 2]
    assert first == replace(step, loss=1.0, planned_bubble_rate=None)
    events = read_records(stopped / "events.jsonl", Event)
    assert events[-1] == Event(0.0, 2, EventKind.RESUMED)
    assert read_records(stopped / "none.jsonl", Event) == []


def test_an_unwritable_directory_is_the_users_mistake(stopped):
    (stopped / "events.jsonl").unlink()
    (stopped / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"^--resume: \S+/run: cannot write: Is a directory"):
        reopen_run_directory(stopped, config_for(stopped), 2)


def test_a_missing_tensorboard_library_changes_no_file(stopped, monkeypatch):
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    wanted = {"run": {"dir": str(stopped)}, "metrics": {"tensorboard": True}}
    with pytest.raises(UserError, match=r"without tensorboardX, expected"):
        reopen_run_directory(stopped, Config.model_validate(wanted), 2)
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before
    new = wanted | {"run": {"dir": str(stopped / "new")}}
    with pytest.raises(UserError, match=r"without tensorboardX, expected"):
        open_run_directory(Config.model_validate(new))
    assert not (stopped / "new").exists()


def test_going_back_keeps_events_about_failures(directory, step):
    for number in range(6):
        directory.write_step(replace(step, step=number, loss=float(number)))
    for number, kind in (
        (1, "plan_adopted"), (4, "plan_changed"), (5, "link_failed"), (5, "rank_failed"),
    ):  # fmt: skip
        directory.write_event(Event(1.0, number, kind))
    directory.go_back(4)
    directory.write_event(Event(2.0, 4, "resumed"))
    directory.write_step(replace(step, step=4, loss=44.0))
    written = lines(directory.path / "metrics.jsonl")
    events = lines(directory.path / "events.jsonl")
    assert [line["loss"] for line in written] == [0.0, 1.0, 2.0, 3.0, 44.0]
    kinds = [event["kind"] for event in events]
    assert kinds == ["plan_adopted", "link_failed", "rank_failed", "resumed"]


def test_a_file_that_cannot_be_replaced_stays_alone(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # as on a disk that is nearly full
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/profile.json'"):
            replace_file(path, "a longer text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"profile.json": "old"}


def test_a_folder_that_links_nowhere_is_refused(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"cannot write .*/runs: File exists"):
        claim_run_directory(config_for(tmp_path / "runs" / "demo"))


@pytest.mark.parametrize("path", [".", "/"])
def test_a_directory_without_a_name_is_refused(path):
    with pytest.raises(UserError, match=f"run.dir: got '{path}', expected a folder with a name"):
        claim_run_directory(config_for(Path(path)))
