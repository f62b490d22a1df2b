import pytest

from jaxmorph.schedule.faults import find_fault
from jaxmorph.schedule.schedule import Schedule


@pytest.mark.parametrize(
    ("rows", "kind", "reason", "grid"),
    [
        (
            ["F0 F1 B0 W0 B1", "F0 B0 W0 F1 B1 W1"],
            "missing op",
            "stage 0: W1 is missing",
            ["stage 0  F0 F1 B0 W0 B1 ><", "stage 1  F0 B0 W0 F1 B1 W1"],
        ),
        (
            ["F0 F1 BW0 BW1", "F1 F0 BW0 BW1"],
            "bad order",
            "stage 1: F1 is out of microbatch order, expected F0",
            ["stage 0  F0   F1   BW0  BW1", "stage 1  >F1< F0   BW0  BW1"],
        ),
        (
            ["F0 BW0 F1 BW1", "F0 F1 BW0 BW1"],
            "deadlock",
            "the stages wait for each other in a circle: stage 0 at BW0, stage 1 at F1",
            ["stage 0  F0    >BW0< F1    BW1", "stage 1  F0    >F1<  BW0   BW1"],
        ),
    ],
)
def test_the_first_fault_is_told_with_its_place(rows, kind, reason, grid):
    fault = find_fault(Schedule.from_rows("x", rows))
    assert fault is not None
    assert (fault.kind, fault.reason, fault.grid.splitlines()) == (kind, reason, grid)


def test_a_schedule_that_runs_has_none():
    assert find_fault(Schedule.from_rows("x", ["F0 F1 BW0 BW1", "F0 BW0 F1 BW1"])) is None
