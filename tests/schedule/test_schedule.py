import pickle

import pytest

from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule, ScheduleError


def _error(*rows: str, microbatches: int | None = None) -> ScheduleError:
    schedule = Schedule.from_rows("test", rows)
    if microbatches is not None:
        schedule = Schedule("test", microbatches, schedule.orders)
    with pytest.raises(ScheduleError) as caught:
        schedule.validate()
    return caught.value


def test_a_schedule_prints_as_a_grid_and_reads_back():
    schedule = Schedule.from_rows("small", ["F0 F1 B0 B1 W0 W1", "F0 B0 W0 F1 B1 W1"])
    assert str(schedule) == (
        "small: 2 stages, 2 microbatches\nstage 0  F0 F1 B0 B1 W0 W1\nstage 1  F0 B0 W0 F1 B1 W1"
    )
    assert Schedule.parse(str(schedule)) == schedule


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


def test_a_schedule_describes_itself():
    split = Schedule.from_rows("split", ["F0 F1 B0 B1 W0 W1", "F0 B0 W0 F1 B1 W1"])
    full = Schedule.from_rows("full", ["F0 F1 BW0 BW1"])
    assert (split.num_stages, split.num_microbatches) == (2, 2)
    assert split.splits_backward
    assert not full.splits_backward
    assert split.warmup_forwards == (2, 1)
    assert split.peak_live("W") == (2, 1)


def test_saving_and_loading_round_trips(tmp_path):
    schedule = Schedule.from_rows("small", ["F0 B0 W0", "F0 B0 W0"])
    schedule.save(tmp_path / "small.json")
    assert Schedule.load(tmp_path / "small.json") == schedule


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"name": "x", "orders": [["Q"]]}'])
def test_a_file_that_is_no_schedule_is_named(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json: expected a saved schedule"):
        Schedule.load(path)


@pytest.mark.parametrize(
    ("row", "reason", "marked"),
    [
        ("B0 F0 W0", "B0 comes before F0", ">B0< F0   W0"),
        ("F0 W0 B0", "W0 comes before B0", "F0   >W0< B0"),
        ("BW0 F0", "BW0 comes before F0", ">BW0< F0"),
        ("F0 B0 B0 W0", "B0 is there twice", "F0   B0   >B0< W0"),
        ("F1 F0 B0 B1 W0 W1", "F1 is out of microbatch order, expected F0", ">F1< F0   B0"),
        ("F0 F1 B1 B0 W0 W1", "B1 is out of microbatch order, expected B0", "F0   F1   >B1<"),
        ("F0 F1 B0 BW1 W0", "BW1 is out of microbatch order", "F0    F1    B0    >BW1<"),
        ("F0 F1 BW0 B0 W0", "B0 mixes full backwards", "F0   F1   BW0  >B0< W0"),
        ("F0 B0", "W0 is missing", "F0 B0 ><"),
        ("F0", "BW0 is missing", "F0 ><"),
        ("F0 F1 B0 W0", "B1 is missing", "F0 F1 B0 W0 ><"),
        ("1.F0 B0 W0", "1.F0 comes before F0", ">1.F0< B0"),
    ],
)  # fmt: skip
def test_a_bad_row_names_and_marks_its_op(row, reason, marked):
    error = _error(row)
    assert error.reason.startswith(f"stage 0: {reason}")
    assert error.grid.startswith(f"stage 0  {marked}")
    assert str(error) == f"{error.reason}\n{error.grid}"


@pytest.mark.parametrize(
    ("row", "reason", "marked"),
    [
        ("F0 1.F0 B0 W0", "B0 comes before 1.B0", "F0   1.F0 >B0< W0"),
        ("F0 1.B0 1.F0", "1.B0 comes before 1.F0", "F0     >1.B0< 1.F0"),
        ("F0 F1 1.F1", "1.F1 is out of microbatch order, expected 1.F0", "F0     F1     >1.F1<"),
        ("F0 1.F0 1.F0", "1.F0 is there twice", "F0     1.F0   >1.F0<"),
        ("F0 1.F0 1.B0 1.W0 W0 B0", "W0 comes before B0", "F0   1.F0 1.B0 1.W0 >W0< B0"),
        ("F0 1.F0 1.BW0 B0 W0", "B0 comes before 1.B0", "F0    1.F0  1.BW0 >B0<  W0"),
        ("F0 F1 1.F0 1.BW0 BW0", "1.F1 is missing", "F0    F1    1.F0  1.BW0 BW0   ><"),
        ("F0 1.F0 1.B0 1.W0 B0", "W0 is missing", "F0   1.F0 1.B0 1.W0 B0   ><"),
        ("F0 1.F0 1.BW0", "BW0 is missing", "F0    1.F0  1.BW0 ><"),
        ("F0 2.F0 BW0", "2.F0 comes before 1.F0", "F0     >2.F0< BW0"),
    ],
)  # fmt: skip
def test_a_bad_row_of_several_chunks_names_and_marks_its_op(row, reason, marked):
    error = _error(row)
    assert error.reason.startswith(f"stage 0: {reason}")
    assert error.grid == f"stage 0  {marked}"


def test_every_stage_runs_every_chunk():
    assert _error("F0 1.F0 1.BW0 BW0", "F0 BW0").reason == "stage 1: BW0 comes before 1.BW0"
    assert _error("F0 1.F0 1.BW0 BW0", "F0").reason == "stage 1: 1.F0 is missing"


def test_a_chunk_below_the_first_is_refused():
    schedule = Schedule("test", 1, ((Op(OpKind.F, 0, -1), Op(OpKind.BW, 0)),))
    with pytest.raises(ScheduleError, match=r"got chunk -1, expected 0\n"):
        schedule.validate()


def test_a_schedule_of_several_chunks_describes_itself(tmp_path):
    schedule = Schedule.from_rows("two", ["F0 F1 1.F0 1.BW0 1.F1 1.BW1 BW0 BW1"])
    schedule.validate()
    assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == (1, 2, 2)
    assert schedule.warmup_forwards == (3,)
    assert schedule.peak_live() == (3,)
    assert Schedule.parse(str(schedule)) == schedule
    schedule.save(tmp_path / "two.json")
    assert Schedule.load(tmp_path / "two.json") == schedule
    assert Schedule.from_rows("one", ["F0 BW0"]).num_chunks == 1


def test_stages_whose_chunks_wait_for_each_other_are_marked_where_they_stop():
    error = _error("F0 F1 1.F0 1.F1 1.BW0 1.BW1 BW0 BW1", "F0 1.F0 1.BW0 BW0 F1 1.F1 1.BW1 BW1")
    assert error.reason == (
        "the stages wait for each other in a circle: stage 0 at 1.F1, stage 1 at BW0"
    )
    error = _error("F0 1.F0 1.BW0 BW0 F1 1.F1 1.BW1 BW1", "F0 F1 1.F0 1.F1 1.BW0 1.BW1 BW0 BW1")
    assert error.reason == (
        "the stages wait for each other in a circle: stage 0 at 1.BW0, stage 1 at F1"
    )


def test_the_grid_of_an_error_stays_aligned():
    error = _error("F0 B0 W0", "F0 W0 B0")
    assert error.grid == (
        "stage 0  F0   B0   W0\n"
        "stage 1  F0   >W0< B0"
    )  # fmt: skip


def test_an_op_beyond_the_last_microbatch_is_named():
    assert _error("F0 F1 BW0 BW1", microbatches=1).reason == (
        "stage 0: F1 is beyond the last microbatch, 0"
    )


def test_stages_must_agree_on_splitting_backwards():
    error = _error("F0 B0 W0", "F0 BW0")
    assert error.reason.startswith("stage 1: BW0 is a full backward (BW), but other stages split")
    assert ">BW0<" in error.grid


def test_stages_that_wait_for_each_other_are_marked_where_they_stop():
    error = _error("F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1")
    assert error.reason == (
        "the stages wait for each other in a circle: stage 0 at B0, stage 1 at F1"
    )
    assert error.grid == (
        "stage 0  F0   >B0< F1   B1   W0   W1\n"
        "stage 1  F0   >F1< B0   B1   W0   W1"
    )  # fmt: skip


def test_a_schedule_of_nothing_is_refused():
    assert _error().reason == "got 0 stages and 0 microbatches, expected at least one of each"


def test_errors_survive_pickling_between_processes():
    error = _error("F0 W0 B0")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_from_rows_reads_ops():
    assert Schedule.from_rows("x", ["F0 BW0"]).orders == ((Op.parse("F0"), Op.parse("BW0")),)
