import pickle

import pytest

from jaxmorph.schedule.ops import Op, OpKind, peak_live
from jaxmorph.schedule.schedule import Schedule, ScheduleError


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(OpKind.F, 3), "F3"),
        (Op(OpKind.B, 0), "B0"),
        (Op(OpKind.W, 12), "W12"),
        (Op(OpKind.BW, 7), "BW7"),
        (Op(OpKind.F, 3, chunk=1), "1.F3"),
        (Op(OpKind.W, 8, group=4), "W8-11"),
        (Op(OpKind.W, 0, chunk=1, group=2), "1.W0-1"),
    ],
)
def test_text_form_round_trips(op, text):
    assert str(op) == text
    assert Op.parse(text) == op


@pytest.mark.parametrize("text", ["", "F", "3", "X3", "F-1", "f3", "F3 ", ".F3", "1.F", "WB3"])
def test_what_is_not_an_op_is_refused(text):
    with pytest.raises(ValueError, match="expected an op such as F3"):
        Op.parse(text)


@pytest.mark.parametrize("text", ["F0-1", "B0-1", "BW0-1", "W1-1", "W2-1"])
def test_only_a_w_has_a_range_of_microbatches(text):
    with pytest.raises(ValueError, match=f"got '{text}', expected a range only for W"):
        Op.parse(text)


@pytest.mark.parametrize(
    ("row", "until_b", "until_w"),
    [
        ("F0 B0 W0 F1 B1 W1", 1, 1),
        ("F0 F1 B0 F2 B1 B2 W0 W1 W2", 2, 3),
        ("F0 F1 BW0 F2 BW1 BW2", 2, 2),
        ("F0 F1 F2 B0 B1 B2 W0 W1 W2", 3, 3),
        ("F0 B0 F1 B1 W0-1 F2 B2 W2", 1, 2),
        ("", 0, 0),
    ],
)
def test_peak_live_counts_held_microbatches(row, until_b, until_w):
    order = [Op.parse(word) for word in row.split()]
    assert peak_live(order, "B") == until_b
    assert peak_live(order, "W") == until_w


def test_peak_live_counts_each_chunk_of_a_microbatch():
    row = "F0 1.F0 F1 1.F1 1.BW0 BW0 1.BW1 BW1"
    assert peak_live([Op.parse(word) for word in row.split()]) == 4


def _error(*rows: str, microbatches: int | None = None) -> ScheduleError:
    schedule = Schedule.from_rows("test", rows)
    if microbatches is not None:
        schedule = Schedule("test", microbatches, schedule.orders)
    with pytest.raises(ScheduleError) as caught:
        schedule.validate()
    return caught.value


def test_a_schedule_prints_as_a_grid():
    split = Schedule.from_rows("small", ["F0 F1 B0 B1 W0 W1", "F0 B0 W0 F1 B1 W1"])
    assert str(split) == (
        "small: 2 stages, 2 microbatches\nstage 0  F0 F1 B0 B1 W0 W1\nstage 1  F0 B0 W0 F1 B1 W1"
    )
    assert Schedule.parse(str(split)) == split
    assert (split.num_stages, split.num_chunks, split.num_microbatches) == (2, 1, 2)
    assert split.splits_backward
    assert split.warmup_forwards == (2, 1)
    assert split.peak_live("W") == (2, 1)
    chunked = Schedule.from_rows("two", ["F0 F1 1.F0 1.BW0 1.F1 1.BW1 BW0 BW1"])
    chunked.validate()
    assert not chunked.splits_backward
    assert (chunked.num_stages, chunked.num_chunks, chunked.num_microbatches) == (1, 2, 2)
    assert chunked.warmup_forwards == chunked.peak_live() == (3,)
    assert Schedule.parse(str(chunked)) == chunked


@pytest.mark.parametrize(
    ("size", "row"),
    [
        (1, "F0 F1 B0 W0 F2 B1 B2 W1 W2"),
        (2, "F0 F1 B0 F2 B1 B2 W0-1 W2"),
        (3, "F0 F1 B0 F2 B1 B2 W0-2"),
        (4, "F0 F1 B0 F2 B1 B2 W0-2"),
    ],
)
def test_one_w_for_a_group_stands_at_the_last_of_them(size, row):
    single = Schedule.from_rows("small", ["F0 F1 B0 W0 F2 B1 B2 W1 W2"])
    grouped = single.with_weight_groups(size)
    assert grouped == Schedule.from_rows("small", [row])
    grouped.validate()
    assert Schedule.parse(str(grouped)) == grouped


def test_each_chunk_has_its_own_groups():
    row = "F0 1.F0 F1 1.F1 1.B0 1.W0 1.B1 B0 W0 1.W1 B1 W1"
    grouped = Schedule.from_rows("two", [row]).with_weight_groups(2)
    assert (
        grouped.orders
        == Schedule.from_rows("two", ["F0 1.F0 F1 1.F1 1.B0 1.B1 B0 1.W0-1 B1 W0-1"]).orders
    )
    grouped.validate()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "x: 2 stages, 1 microbatches\nstage 0  F0 BW0",
        "x: 1 stages, 1 microbatches\ns 0 Q",
    ],
)
def test_text_that_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        Schedule.parse(text)


@pytest.mark.parametrize(
    ("row", "reason", "marked"),
    [
        ("B0 F0 W0", "B0 comes before F0", ">B0< F0   W0"),
        ("F0 W0 B0", "W0 comes before B0", "F0   >W0< B0"),
        ("F0 B0 B0 W0", "B0 is there twice", "F0   B0   >B0< W0"),
        ("F1 F0 B0 B1 W0 W1", "F1 is out of microbatch order, expected F0", ">F1< F0   B0"),
        ("F0 F1 B0 BW1 W0", "BW1 is out of microbatch order", "F0    F1    B0    >BW1<"),
        ("F0 F1 BW0 B0 W0", "B0 mixes full backwards", "F0   F1   BW0  >B0< W0"),
        ("F0 B0", "W0 is missing", "F0 B0 ><"),
        ("F0 F1 B0 W0-1 B1", "W0-1 comes before B1", "F0     F1     B0     >W0-1< B1"),
        ("F0 F1 B0 B1 W0-1 W1", "W1 is out of microbatch order, expected W2",
         "F0   F1   B0   B1   W0-1 >W1<"),
        ("F0 F1 B0 B1 W0 W1-2", "W1-2 is beyond the last microbatch, 1",
         "F0     F1     B0     B1     W0     >W1-2<"),
        ("F0 F1 F2 B0 B1 B2 W0-1", "W2 is missing", "F0   F1   F2   B0   B1   B2   W0-1 ><"),
        ("F0", "BW0 is missing", "F0 ><"),
        ("F0 F1 B0 W0", "B1 is missing", "F0 F1 B0 W0 ><"),
        ("1.F0 B0 W0", "1.F0 comes before F0", ">1.F0< B0"),
        ("F0 1.F0 B0 W0", "B0 comes before 1.B0", "F0   1.F0 >B0< W0"),
        ("F0 F1 1.F1", "1.F1 is out of microbatch order, expected 1.F0", "F0     F1     >1.F1<"),
        ("F0 1.F0 1.B0 1.W0 W0 B0", "W0 comes before B0", "F0   1.F0 1.B0 1.W0 >W0< B0"),
        ("F0 1.F0 1.BW0 B0 W0", "B0 comes before 1.B0", "F0    1.F0  1.BW0 >B0<  W0"),
        ("F0 F1 1.F0 1.BW0 BW0", "1.F1 is missing", "F0    F1    1.F0  1.BW0 BW0   ><"),
        ("F0 2.F0 BW0", "2.F0 comes before 1.F0", "F0     >2.F0< BW0"),
    ],
)  # fmt: skip
def test_a_bad_row_names_and_marks_its_op(row, reason, marked):
    error = _error(row)
    assert error.kind == ("missing op" if reason.endswith("missing") else "bad order")
    assert error.reason.startswith(f"stage 0: {reason}")
    assert error.grid.startswith(f"stage 0  {marked}")
    assert str(error) == f"{error.reason}\n{error.grid}"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["F0 1.F0 1.BW0 BW0", "F0 BW0"], "stage 1: BW0 comes before 1.BW0"),
        (["F0 1.F0 1.BW0 BW0", "F0"], "stage 1: 1.F0 is missing"),
        (["F0 B0 W0", "F0 BW0"], "stage 1: BW0 is a full backward (BW), but other stages split"),
        ([], "got 0 stages and 0 microbatches, expected at least one of each"),
    ],
)
def test_disagreeing_stages_are_named(rows, reason):
    assert _error(*rows).reason.startswith(reason)


@pytest.mark.parametrize(
    ("rows", "waits", "grid"),
    [
        (
            ["F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1"],
            "stage 0 at B0, stage 1 at F1",
            ["stage 0  F0   >B0< F1   B1   W0   W1", "stage 1  F0   >F1< B0   B1   W0   W1"],
        ),
        (
            ["F0 BW0 F1 BW1", "F0 F1 BW0 BW1"],
            "stage 0 at BW0, stage 1 at F1",
            ["stage 0  F0    >BW0< F1    BW1", "stage 1  F0    >F1<  BW0   BW1"],
        ),
        (
            ["F0 F1 1.F0 1.F1 1.BW0 1.BW1 BW0 BW1", "F0 1.F0 1.BW0 BW0 F1 1.F1 1.BW1 BW1"],
            "stage 0 at 1.F1, stage 1 at BW0",
            None,
        ),
        (
            ["F0 1.F0 1.BW0 BW0 F1 1.F1 1.BW1 BW1", "F0 F1 1.F0 1.F1 1.BW0 1.BW1 BW0 BW1"],
            "stage 0 at 1.BW0, stage 1 at F1",
            None,
        ),
    ],
)
def test_a_deadlock_marks_where_each_stage_stops(rows, waits, grid):
    error = _error(*rows)
    assert error.kind == "deadlock"
    assert error.reason == f"the stages wait for each other in a circle: {waits}"
    assert grid is None or error.grid.splitlines() == grid


def test_ops_outside_a_schedules_sizes_are_named():
    assert _error("F0 F1 BW0 BW1", microbatches=1).reason == (
        "stage 0: F1 is beyond the last microbatch, 0"
    )
    schedule = Schedule("test", 1, ((Op(OpKind.F, 0, -1), Op(OpKind.BW, 0)),))
    with pytest.raises(ScheduleError, match=r"got chunk -1, expected 0\n"):
        schedule.validate()


def test_errors_survive_pickling_between_processes():
    error = pickle.loads(pickle.dumps(_error("F0 B0")))
    assert str(error) == str(_error("F0 B0"))
    assert error.kind == "missing op"
