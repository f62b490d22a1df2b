import pytest

from jaxmorph.compare.condition_steps import around_ops_ms
from jaxmorph.program.instructions import RankInstructions
from jaxmorph.runtime.report import StepReport, StepTimings, total
from jaxmorph.runtime.step import StepResult
from jaxmorph.schedule.ops import Op, OpKind

F0, BW0 = Op(OpKind.F, 0), Op(OpKind.BW, 0)


def step(took_ms, *ops_of_ranks):
    timings = [StepTimings.of(ops) for ops in ops_of_ranks]
    reports = tuple(StepReport(0.0, 0.0, detail=each.detail()) for each in timings)
    program = RankInstructions(0, len(timings), 1, ())
    return StepResult(0, program, total(reports), reports, timings[0], took_ms / 1e3, 0.0, True)


def test_what_lies_around_ops_is_what_no_rank_spends_between_first_and_last():
    first = [(F0, 2.0, 12.0), (BW0, 40.0, 60.0)]
    last = [(F0, 14.0, 24.0), (BW0, 25.0, 39.0)]
    took_ms = (65.0, 66.0, 90.0)
    steps = [step(each, first, last) for each in took_ms]
    assert around_ops_ms(steps) == pytest.approx(66.0 - 58.0)
    assert around_ops_ms([]) == 0.0
