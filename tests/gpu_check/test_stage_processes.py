"""Whatever happens to a stage's process: one line, the end of its log, and nothing left behind."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from jaxmorph.gpu_check import stage_processes
from jaxmorph.gpu_check.settings import ON_CPU
from jaxmorph.gpu_check.stage_processes import (
    WITHIN_S,
    NotJoined,
    StageResult,
    StagesFailedError,
    run_joined,
    run_stages,
)
from jaxmorph.gpu_check.stage_task import StageTask

HERE = Path(__file__).parent
TASK = StageTask("train", joined=True, sizes=ON_CPU.parity, num_steps=3)


@pytest.fixture
def ailing(monkeypatch, tmp_path):
    """Has a stage's process fail; gives the error, and what there is of processes and files."""
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    path = f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def failing(ailment, within_s):
        monkeypatch.setenv("AILMENT", ailment)
        with pytest.raises(StagesFailedError) as raised:
            run_stages(TASK, within_s=within_s, module="ailing_stage")
        started = [int(each.name) for each in pids.iterdir()]
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
        assert not list(temporary.iterdir())
        return raised.value, started

    return failing


def test_a_process_that_dies_is_told_in_one_line_with_the_end_of_its_log(ailing):
    error, started = ailing("die", within_s=60)
    assert str(error) == "rank 1 failed: ended by SIGKILL"
    assert "the end of rank_1.log:\nout of memory:\nlast words" in error.__notes__
    assert len(started) == 2


def test_processes_that_hang_are_ended_in_time(ailing):
    error, _ = ailing("hang", within_s=0.5)
    assert str(error) == "rank 0 failed: still running after 0.5 s"


def test_what_a_process_refuses_is_not_the_mistake_of_who_checks(ailing):
    error, _ = ailing("refuse", within_s=60)
    assert str(error) == "parallelism: 2 stages need 2 devices, got 1"


RESULTS = [StageResult({}, {}), StageResult({}, {})]


@pytest.fixture
def runs(monkeypatch):
    """Has runs of processes that are joined, or not, fail; gives how long each could have run."""
    limits_s = []

    def failing(**errors):
        def run(task, within_s):
            limits_s.append(within_s)
            if error := errors.get("joined" if task.joined else "alone"):
                failed = StagesFailedError(error)
                failed.add_note(f"the log of {error}")
                raise failed
            return RESULTS

        monkeypatch.setattr(stage_processes, "run_stages", run)
        return limits_s

    return failing


def test_processes_are_joined_as_those_of_a_run(runs):
    runs(alone="not to be tried")
    assert run_joined(replace(TASK, joined=False)) == (RESULTS, None)


def test_where_joining_fails_each_has_jax_for_itself_and_the_reason_is_told(runs):
    runs(joined="no topology")
    why = NotJoined("no topology", ["the log of no topology"])
    assert run_joined(TASK) == (RESULTS, why)


def test_processes_share_what_time_is_left(runs):
    limits_s = runs(joined="no topology")
    run_joined(TASK, left_s=30.0)
    first_s, second_s = limits_s
    assert 29.0 < second_s <= first_s == 30.0
    run_joined(TASK, left_s=1e6)
    assert limits_s[2:] == [WITHIN_S, WITHIN_S]


def test_where_both_ways_fail_both_reasons_and_logs_are_told(runs):
    runs(joined="no topology", alone="no memory")
    with pytest.raises(StagesFailedError) as raised:
        run_joined(TASK)
    assert str(raised.value) == "no memory; joined by jax.distributed: no topology"
    assert raised.value.__notes__ == ["the log of no memory", "joined: the log of no topology"]
