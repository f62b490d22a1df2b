"""Replays of a run's decisions from its files."""

import json
import re
from dataclasses import replace

import pytest
from adapting_run import CONFIG, FIRST, PLANNED_FOR, USUAL, PlansHere

from jaxmorph.control.controller_state import (
    CandidatesReceived,
    Changing,
    ControllerState,
    Idle,
    Observation,
    PlannerStarted,
    StepObserved,
)
from jaxmorph.control.measurements import MessageTables, packed
from jaxmorph.errors import UserError
from jaxmorph.plain_json import dump, parse, tagged
from jaxmorph.report.run_directory import ObservationFiles, control_folder
from jaxmorph.training import replay as replaying
from jaxmorph.training.planning_client import RunToPlan
from jaxmorph.training.replay import ObservationLog, replay


@pytest.fixture
def kept_run(begin_run, tmp_path):
    """A run that has delegated a slow link and restored it, with its files."""

    def begin(num_steps=20, replica=0, **changed):
        files = ObservationFiles(control_folder(tmp_path, replica))
        run_known = RunToPlan(CONFIG, 0, FIRST, PLANNED_FOR, USUAL)
        log = ObservationLog(files, run_known)
        run = begin_run(PlansHere(), settings(**changed), keep=log.record)
        run.steps(6)
        run.steps(6, slow_ms=40.0)
        run.steps(num_steps)
        return run

    return begin


@pytest.fixture
def file(kept_run, tmp_path):
    """The one file of that run's observations."""
    kept_run()
    (path,) = (tmp_path / "control").glob("*.jsonl")
    return path


def settings(**changed):
    return CONFIG.adaptation.model_copy(update=changed)


def without_sums(lines):
    return re.sub(rb', "crc32": "\w{8}"\}\n', b"}\n", lines)


def kinds(moments):
    return [str(event.kind) for moment in moments for event in moment.events]


def test_a_replay_decides_the_same(kept_run, tmp_path):
    run = kept_run()
    moments = list(replay(tmp_path))
    assert not any(moment.differs or moment.is_simulated for moment in moments)
    assert sorted(kinds(moments)) == sorted(kind for _, kind, _ in run.events)
    assert "plan_changed" in kinds(moments)


def test_replicas_decide_for_themselves(kept_run, tmp_path):
    kept_run(worth=0.9)
    kept_run(replica=1)
    of_replicas = [kinds(replay(tmp_path, replica=index)) for index in range(2)]
    assert ["plan_changed" in each for each in of_replicas] == [False, True]
    with pytest.raises(UserError, match=r"got no control_r2/\*\.jsonl, expected what"):
        list(replay(tmp_path, replica=2))


def test_a_changed_outcome_is_found(file, tmp_path):
    lines = file.read_bytes()
    assert lines.count(b"is slow") >= 1
    lines = lines.replace(b'"straggler_detected", "1-2"', b'"straggler_detected", "0-1"')
    file.write_bytes(lines)
    with pytest.raises(UserError, match=r"\.jsonl:\d+: got other values than were written"):
        list(replay(tmp_path))
    file.write_bytes(without_sums(lines))  # as another run would have written
    differing = [moment for moment in replay(tmp_path) if moment.differs]
    assert len(differing) == 1
    then, now = differing[0].differences()
    assert ("0-1" in then, "1-2" in now) == (True, True)


def test_other_settings_simulate_after_the_first_difference(kept_run, tmp_path):
    kept_run()
    moments = list(replay(tmp_path, settings(worth=0.9)))
    first = next(index for index, moment in enumerate(moments) if moment.differs)
    assert not any(moment.is_simulated for moment in moments[: first + 1])
    rest = moments[first + 1 :]
    assert rest
    assert all(moment.is_simulated for moment in rest)
    assert "plan_changed" not in kinds(moments)
    assert rest[-1].result.state.plan.routes == FIRST.routes


def test_a_simulated_run_goes_on_deciding(kept_run, tmp_path):
    run = kept_run(num_steps=40)
    moments = list(replay(tmp_path, settings(dwell_steps=20)))  # it is slower to return
    assert any(moment.is_simulated for moment in moments)
    assert kinds(moments).count("plan_changed") == 2  # delegated, and restored later
    assert moments[-1].result.state.plan.routes == FIRST.routes
    last = [moment for moment in moments if "plan_changed" in kinds([moment])][-1]
    assert last.step > next(step for step, kind, _ in run.events[::-1] if kind == "plan_changed")


def test_states_and_observations_come_back_equal(begin_run):
    kept = []
    run = begin_run(PlansHere(), keep=lambda *each: kept.append(each[:2]))
    run.steps(6)
    run.steps(20, slow_ms=40.0)
    for state, observation in kept:
        read = parse(ControllerState, json.loads(dump(state)), "state")
        assert replace(read, phase=Idle()) == replace(state, phase=Idle())
        if not isinstance(state.phase, Changing):  # its evidence is `Any`: tuples become lists
            assert read.phase == state.phase
        assert parse(Observation, json.loads(dump(tagged(observation))), "line") == observation
    assert len({type(state.phase) for state, _ in kept}) > 3


def test_a_replay_needs_no_older_files_and_goes_on_after_a_lost_one(
    kept_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(replaying, "SEGMENT_STEPS", 5)
    kept_run()
    files = sorted((tmp_path / "control").glob("*.jsonl"))
    assert len(files) > 3
    files[1].unlink()  # the link turned slow then
    assert not any(moment.differs for moment in replay(tmp_path))
    files[0].unlink()
    moments = list(replay(tmp_path))
    assert moments[0].step >= 4
    assert not any(moment.differs for moment in moments)


def test_a_replay_can_morph_where_the_run_did_not(kept_run, tmp_path):
    """The first difference is a morph, where the run kept its plan."""
    kept_run(worth=0.9)
    moments = list(replay(tmp_path, settings(worth=0.05)))
    assert any(moment.differs for moment in moments)
    assert kinds(moments).count("plan_changed") == 2
    assert moments[-1].result.state.plan.routes == FIRST.routes


def test_a_replay_may_delegate_all_links(kept_run, tmp_path):
    kept_run(worth=0.9)
    moments = replay(tmp_path, settings(worth=0.05, delegates="any"))
    seen = [each.observation for each in moments]
    offers = [each.options for each in seen if isinstance(each, CandidatesReceived)]
    options = [option for offer in offers for option in offer.candidates]
    assert any(set(option.routes.values()) == {"delegated"} for option in options)


def test_an_empty_file_is_skipped(kept_run, tmp_path):
    kept_run()
    (tmp_path / "control" / "000000.jsonl").touch()
    whole = list(replay(tmp_path))
    assert not any(moment.differs for moment in whole)
    (tmp_path / "control" / "000000.jsonl").write_text('{"state": {}, "run": {}}\n')
    with pytest.raises(UserError, match=r"000000.jsonl:1: "):
        list(replay(tmp_path))


def test_a_simulation_ends_at_a_restart_of_ranks(kept_run, tmp_path):
    kept_run()
    kept_run()
    moments = list(replay(tmp_path, settings(worth=0.9)))
    starts = [at for at, each in enumerate(moments) if isinstance(each.observation, PlannerStarted)]
    facts = [at for at in starts if not moments[at].is_simulated]
    assert len(facts) == 2  # one for each start of the ranks
    assert moments[facts[1] - 1].is_simulated


def test_a_cut_off_line_ends_the_replay(file, tmp_path):
    whole = len(list(replay(tmp_path)))
    content = file.read_bytes()
    file.write_bytes(content + b'{"observation": ')
    assert len(list(replay(tmp_path))) == whole
    file.write_bytes(content[:-30])  # in the midst of a step's tables
    assert len(list(replay(tmp_path))) == whole - 1


def test_tables_of_ranks_come_back_or_are_refused(kept_run, tmp_path):
    run = kept_run()
    rows = packed([[0, 1, 2], [100, 10_100, 20_100], [600, 10_600, 20_600]])
    seen = StepObserved(run.step, messages=(MessageTables(((0, 1, True),), rows),))
    run.loop.observe(seen)
    moments = list(replay(tmp_path))
    assert moments[-1].observation == seen
    assert not any(moment.differs for moment in moments)
    (path,) = (tmp_path / "control").glob("*.jsonl")
    whole = path.read_bytes()
    assert whole.endswith(rows)
    path.write_bytes(whole[:-1])  # of a killed run
    assert len(list(replay(tmp_path))) == len(moments) - 1
    path.write_bytes(whole[:-1] + b"\xff")
    with pytest.raises(UserError, match=r"\.jsonl:\d+: got other bytes than were written"):
        list(replay(tmp_path))


def test_a_run_without_observations_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected what `train` keeps there"):
        list(replay(tmp_path))


def test_a_file_of_an_older_version_is_refused(file, tmp_path):
    file.write_bytes(without_sums(file.read_bytes()).replace(b'"findings"', b'"news"'))
    with pytest.raises(UserError, match=r"000001.jsonl:1: state.findings: missing$"):
        list(replay(tmp_path))


def test_a_simulation_applies_delays_to_other_routes(kept_run, tmp_path):
    kept_run()
    moments = replay(tmp_path, settings(worth=0.9))
    slow = [each for each in moments if each.is_simulated and each.timeline is not None]
    verdict = slow[0].result.state.detector.verdicts[1, 2]
    assert verdict.latency_ms == pytest.approx(40.5, abs=0.1)  # on its direct route
