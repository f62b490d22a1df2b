"""How a run is followed by what it has written, without running anything."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos import harm, watched_run
from benchmarks.chaos.faults import Trouble
from benchmarks.chaos.judgement import Computed, differences
from benchmarks.chaos.storm import Storm, troubles_met
from benchmarks.chaos.watched_run import EndedError, HungError, WatchedRun


class Clock:
    """A clock that goes on only when somebody sleeps; then the run writes its next lines."""

    def __init__(self, path, *writes):
        self.now_s, self.path, self.writes = 0.0, path, list(writes)

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        if self.writes:
            self.path.write_text(self.writes.pop(0))


def text(*steps, rest=""):
    return "".join(json.dumps({"step": step}) + "\n" for step in steps) + rest


@pytest.fixture
def follow(tmp_path, monkeypatch):
    def follow(*writes, code=None):
        run: Any = WatchedRun.__new__(WatchedRun)
        run.out = tmp_path
        run.traces = SimpleNamespace(processes=list)
        run.process = SimpleNamespace(poll=lambda: code)
        run._said = tmp_path / "said.txt"
        run._said.write_text("the last word\n")
        clock = Clock(tmp_path / "metrics.jsonl", *writes)
        monkeypatch.setattr(watched_run, "time", clock)
        return run, clock

    return follow


def test_only_whole_lines_count_and_a_run_may_go_back(follow):
    run, _ = follow(text(0, rest='{"st'), text(0, 1, 2, 3), text(0), text(0, 1, 2, 3, 4))
    assert run.last_step() == -1
    run.wait_for_step(4, patience_s=1.0)
    assert run.last_step() == 4
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_run_that_goes_on_no_more_is_hung_after_its_patience_and_no_sooner(follow):
    run, clock = follow(text(0), text(0, 1))
    with pytest.raises(HungError, match=r"no step after 1 for 5 s\n(.|\n)*the last word"):
        run.wait_for_step(2, patience_s=5.0)
    assert 5.0 < clock.now_s < 5.2


def test_a_run_that_has_ended_is_not_waited_for(follow):
    run, _ = follow(code=1)
    with pytest.raises(EndedError, match=r"before step 0: exit code 1\nthe last word"):
        run.wait_for_step(0, patience_s=5.0)


def test_while_storage_fails_nothing_can_be_written_there_and_afterwards_all_is_back(tmp_path):
    (storage := tmp_path / "checkpoints").mkdir()
    (storage / "step_5").touch()
    with harm.failing(storage), pytest.raises(OSError, match=r"Not a directory|exists"):
        (storage / "step_10.unfinished").mkdir(parents=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints", "step_5"]


def test_storage_fails_though_a_run_makes_its_folder_anew_before_the_file_is_there(
    tmp_path, monkeypatch
):
    (storage := tmp_path / "checkpoints").mkdir()
    put_file, late = harm._put_file, [storage / "step_10.unfinished"]

    def put_file_late(path):
        if late:
            late.pop().mkdir(parents=True)
        return put_file(path)

    monkeypatch.setattr(harm, "_put_file", put_file_late)
    with harm.failing(storage):
        assert storage.is_file()
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


def test_every_bit_that_differs_and_every_step_that_is_missing_is_told():
    expected = Computed(((0, 1.5, 2.0), (1, 1.25, None)), "a")
    assert differences(expected, expected) == []
    found = Computed(((0, 1.5, 2.0000000000000004),), "b")
    assert differences(found, expected) == [
        "step 0: got (0, 1.5, 2.0000000000000004), expected (0, 1.5, 2.0)",
        "step 1: got None, expected (1, 1.25, None)",
        "got 1 lines of steps, expected 2",
        "parameters: got b, expected a",
    ]


def test_what_a_run_has_been_through_passes_only_if_nothing_came_of_it_and_is_json():
    storm = Storm(3, faults=Counter({"link cut": 2}))
    assert storm.passes
    assert json.loads(json.dumps(storm.to_json()))["faults"] == {"link cut": 2}
    assert not any(replace(storm, **{name: ["!"]}).passes for name in ("wrong", "hangs", "leaks"))


def test_troubles_count_once_though_every_life_of_a_run_meets_the_first_of_them_anew():
    files = {
        "metrics.jsonl": [{"step": step, "step_s": 1.0} for step in range(10)],
        "events.jsonl": [{"kind": "resumed", "step": 3}, {"kind": "rank_failed", "step": 5}],
    }
    run: Any = SimpleNamespace(lines=files.__getitem__)
    troubles = [Trouble(at_s, at_s + 1, "0-1", "slow", ()) for at_s in (0.5, 2.5, 6.5, 7.5)]
    assert troubles_met(troubles, run) == {"link slow": 3}
