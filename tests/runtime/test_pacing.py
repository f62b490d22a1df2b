import pytest

from jaxmorph.runtime.pacing import Pace
from jaxmorph.schedule.ops import OpKind


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_an_op_of_one_chunk_lasts_its_share_of_the_stages_time(num_chunks):
    pace = Pace.of_stage(8.0, 6.0, 4.0, num_chunks)
    stage_ms = {OpKind.F: 8.0, OpKind.B: 6.0, OpKind.W: 4.0, OpKind.BW: 10.0}
    for kind, time_ms in stage_ms.items():
        assert pace.of(kind) == pytest.approx(time_ms / num_chunks / 1e3)


def test_without_a_pace_ops_last_as_long_as_they_take():
    assert Pace().of(OpKind.F) is None
