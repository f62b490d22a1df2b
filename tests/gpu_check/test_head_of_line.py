import pytest

from jaxmorph.gpu_check.head_of_line import report_of
from jaxmorph.gpu_check.settings import ON_CPU
from jaxmorph.gpu_check.stage_processes import StageResult
from jaxmorph.gpu_check.stage_task import StageTask

TASK = StageTask("delay", joined=False, sizes=ON_CPU.parity, num_steps=3, num_sends=3, delay_ms=30)
COPIES = {"tier": "copy_engine", "landing_tier": "copy_engine", "warnings": []}


def steps(without_ms, with_ms, op_ms):
    without = {"step_ms": without_ms, "idle": 0.25, "op_ms": dict.fromkeys("FBW", op_ms)}
    return {"without": without, "with": {"step_ms": with_ms, "idle": 0.75, "op_ms": {}}}


def told(alone_ms, behind_ms, on_way_ms=(30.1, 30.2, 31.0)):
    sender = {"alone_ms": alone_ms, "behind_ms": behind_ms, "steps": steps(20.0, 100.0, 1.0)}
    receiver = {"on_way_ms": on_way_ms, "steps": steps(21.0, 99.0, 1.0)}
    found = [StageResult({**each, "copies": COPIES}, {}) for each in (sender, receiver)]
    return report_of(TASK, found)


def verdicts(report):
    return [row.holds for row in report.rows() if row.holds is not None]


def test_work_that_runs_on_beside_a_late_message_holds():
    report = told([2.0, 2.1, 9.0], [2.2, 2.1, 2.0])
    assert report.held_up_ms == pytest.approx(0.0)  # one round that was held up otherwise
    assert verdicts(report) == [True, True]


def test_work_that_waits_for_the_message_does_not():
    report = told([2.0, 2.1, 2.0], [32.2, 32.1, 2.0])
    assert report.held_up_ms == pytest.approx(30.0)
    assert verdicts(report) == [True, False]


def test_without_the_delay_nothing_is_shown():
    assert verdicts(told([2.0], [2.0], on_way_ms=(0.2, 29.0, 30.0))) == [False, True]


def test_steps_are_beside_what_they_would_take_with_either_kind_of_transfer():
    report = told([2.0], [2.0])
    assert report.step_ms == {"without": 21.0, "with": 100.0}
    assert report.idle == [{"without": 0.25, "with": 0.75}] * 2
    # Four microbatches of 3 ms each on either stage, and of the delay at least once each way,
    # and once more there and back for the tied gradients.
    assert 12 + 4 * 30 <= report.simulated_ms["delegated"] < report.simulated_ms["direct"]
