import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.errors import UserError
from jaxmorph.schedule.files import format_torch_csv, load_schedule, parse_torch_csv, save_schedule
from jaxmorph.schedule.fixed import (
    FIXED_SCHEDULES,
    dualpipe_v,
    interleaved,
    one_forward_one_backward,
    zb_v,
)
from jaxmorph.schedule.schedule import Schedule, ScheduleError

SCHEDULE = one_forward_one_backward(3, 4)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".txt"])
def test_every_format_reads_back(tmp_path, suffix):
    path = tmp_path / f"1f1b{suffix}"
    save_schedule(path, SCHEDULE)
    assert load_schedule(path) == SCHEDULE


def test_an_answer_of_the_planner_is_read(tmp_path):
    path = tmp_path / "answer.json"
    orders = SCHEDULE.to_json()["orders"]
    path.write_text(json.dumps({"name": "mine", "schedule": "1f1b", "orders": orders}))
    assert load_schedule(path) == SCHEDULE


def test_a_faulty_schedule_is_read_as_it_stands(tmp_path):
    path = tmp_path / "faulty.txt"
    path.write_text("x: 1 stages, 2 microbatches\nstage 0  F0 B0\n")
    assert str(load_schedule(path)).splitlines()[1] == "stage 0  F0 B0"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "0F0,what\n", "row 0, column 1: got 'what'"),
        ("a.json", "{", "Expecting property name"),
        ("a.json", "[1]", "got a JSON list without 'orders', expected a saved schedule"),
        ("a.csv", f'0F0,"{"0F1," * 40_000}', "field larger than field limit (131072)"),
        ("a.json", '{"orders": 3}', "got 'int' object is not iterable, expected a saved"),
        ("a.json", '{"orders": [["F0", "?"]]}', "got '?', expected an op such as F3"),
        ("a.json", '{"orders": [["F0"]], "num_microbatches": null}', "got int"),
        ("a.json", '{"orders": [["F0"]], "num_microbatches": 1e400}', "got cannot convert"),
        ("a.txt", "hello", "got 'hello', expected 'NAME: S stages, N microbatches'"),
    ],
)
def test_mistakes_name_the_file(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_schedule(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_an_unclosed_quote_is_refused_in_short(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('0F0,"' + "0F1," * 30_000)
    with pytest.raises(
        UserError, match=r"row 0, column 1: got '0F1,0F1,.*\.\.\., expected"
    ) as caught:
        load_schedule(path)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_unreadable_and_unwritable_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"missing.csv: cannot be read: No such file"):
        load_schedule(tmp_path / "missing.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"bytes.csv: not UTF-8 text"):
        load_schedule(tmp_path / "bytes.csv")
    with pytest.raises(UserError, match=r"schedule file: got \S+/plan.pdf, expected a name that"):
        save_schedule(tmp_path / "plan.pdf", SCHEDULE)
    with pytest.raises(UserError, match=r"schedule file: got \S+/x/a.csv, but there is no folder"):
        save_schedule(tmp_path / "x" / "a.csv", SCHEDULE)


def _rows(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_a_split_schedule_as_torch_writes_it():
    schedule = Schedule.from_rows("two", ["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"])
    assert format_torch_csv(schedule) == (
        "0F0,0F1,,0I0,0W0,0I1,0W1\n"
        ",1F0,1I0,1F1,1I1,1W0,1W1\n"
    )  # fmt: skip


def test_full_backwards_are_torchs_b():
    schedule = Schedule.from_rows("whole", ["F0 F1 BW0 BW1", "F0 BW0 F1 BW1"])
    assert format_torch_csv(schedule) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


def test_stages_go_around_the_ranks_once_per_chunk():
    schedule = parse_torch_csv("0F0,,2F0,,2B0,,0B0\n,1F0,,3F0,3B0,1B0\n", "loop")
    assert _rows(schedule) == ["F0 1.F0 1.BW0 BW0", "F0 1.F0 1.BW0 BW0"]
    assert schedule.num_chunks == 2


def test_empty_cells_and_spaces_are_ignored():
    schedule = parse_torch_csv(" 0F0, ,,0B0 \r\n,1F0,1B0,\r\n\r\n", "x")
    assert (schedule.name, schedule.num_microbatches) == ("x", 1)
    assert _rows(schedule) == ["F0 BW0", "F0 BW0"]


def test_messages_and_what_is_done_to_parameters_are_left_out():
    text = (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
    )
    assert _rows(parse_torch_csv(text, "whole")) == ["F0 BW0", "F0 BW0"]


DUMPS = Path(__file__).parent / "torch_dumps"
"""What torch 2.14.1 writes of its schedules for three ranks and six microbatches."""


@pytest.mark.parametrize(
    "name",
    ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
def test_torchs_own_schedules_are_read_with_messages_and_without(name):
    files = [DUMPS / f"{name}.compute_{kind}.csv" for kind in ("only", "comms")]
    plain, with_messages = map(load_schedule, files)
    plain.validate()
    assert with_messages.orders == plain.orders
    assert with_messages.placement == plain.placement
    assert (plain.num_stages, plain.num_microbatches) == (3, 6)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        # Gradients are summed in the order of microbatches, so that all orders give the same bits.
        ("LoopedBFS.compute_only", "1.BW5 is out of microbatch order, expected 1.BW0"),
        ("LoopedBFS.compute_comms", "1.BW5 is out of microbatch order, expected 1.BW0"),
        # Its last rank begins with F1 and ends with F6, which torch itself refuses to complete.
        ("1F1B.compute_only", "stage 0: F6 is missing"),
    ],
)
def test_torchs_other_schedules_are_read_and_refused(name, fault):
    with pytest.raises(ScheduleError, match=re.escape(fault)):
        load_schedule(DUMPS / f"{name}.csv").validate()


def test_old_files_write_b_for_the_input_gradient():
    assert _rows(parse_torch_csv("0F0,,0B0,0W0\n,1F0,1B0,1W0\n", "old")) == ["F0 B0 W0"] * 2


def test_full_backwards_beside_split_ones_are_split():
    text = "0F0,0F1,0I0,0B1,0W0\n"
    assert _rows(parse_torch_csv(text, "mixed")) == ["F0 F1 B0 B1 W1 W0"]


def test_stages_and_microbatches_may_have_several_digits():
    text = "".join(f"{rank}F10\n" for rank in range(12))
    assert parse_torch_csv(text, "wide").num_microbatches == 11


@given(
    name=st.sampled_from([*FIXED_SCHEDULES, "interleaved"]),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 9),
)
def test_a_csv_reads_back(name, stages, microbatches):
    if name == "interleaved":
        schedule = interleaved(stages, stages * (1 + microbatches // 4), 1 + microbatches % 4)
    else:
        schedule = FIXED_SCHEDULES[name](stages, microbatches)
    assert parse_torch_csv(format_torch_csv(schedule), schedule.name) == schedule


def test_torch_gets_a_w_for_each_microbatch_of_a_group():
    grouped = Schedule.from_rows("two", ["F0 F1 B0 B1 W0-1", "F0 B0 F1 B1 W0-1"])
    assert format_torch_csv(grouped).splitlines() == [
        "0F0,0F1,,0I0,,0I1,0W0,0W1",
        ",1F0,1I0,1F1,1I1,1W0,1W1,",
    ]
    single = Schedule.from_rows("two", ["F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"])
    assert parse_torch_csv(format_torch_csv(grouped), "two") == single


@pytest.mark.parametrize("suffix", [".csv", ".json", ".txt"])
def test_a_v_is_read_back(tmp_path, suffix):
    for schedule in (zb_v(3, 4), dualpipe_v(3, 6)):
        path = tmp_path / f"{schedule.name}{suffix}"
        save_schedule(path, schedule)
        assert load_schedule(path) == schedule


def test_a_forward_and_a_backward_side_by_side_are_read_as_two_ops():
    text = "0F0,(3F0;0F1)OVERLAP_F_B,3I0,3W0,(0F2;3B1)OVERLAP_F_B\n1F0,2F0\n"
    rows = _rows(parse_torch_csv(text, "overlapped"))
    assert rows == ["F0 1.F0 F1 1.B0 1.W0 F2 1.B1 1.W1", "F0 1.F0"]


@given(stages=st.integers(1, 5), microbatches=st.integers(1, 6))
def test_an_op_stands_behind_all_it_needs(stages, microbatches):
    text = format_torch_csv(FIXED_SCHEDULES["zb-h2"](stages, microbatches))
    column = {
        cell: at for line in text.splitlines() for at, cell in enumerate(line.split(",")) if cell
    }
    for microbatch in range(microbatches):
        for stage in range(stages - 1):
            assert column[f"{stage}F{microbatch}"] < column[f"{stage + 1}F{microbatch}"]
            assert column[f"{stage + 1}I{microbatch}"] < column[f"{stage}I{microbatch}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no rows, expected one per rank"),
        ("\n,,\n", "got no rows"),
        ("0F0,0X0\n", "row 0, column 1: got '0X0', expected an empty cell or a computation"),
        ("0F0\n,1SEND_F\n", "row 1, column 1: got '1SEND_F', expected an empty cell"),
        (
            "0F0,3F0\n1F0,2F0,4F0\n",
            "row 0: got stage 3 on rank 0, expected it on rank 1: of 2 ranks, stage s must be on "
            "rank s mod 2, or two stages of each rank in a V",
        ),
    ],
)
def test_a_bad_csv_is_refused_with_the_place(text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_torch_csv(text, "x")


def test_a_schedule_that_gets_stuck_is_not_written():
    stuck = Schedule.from_rows("stuck", ["F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1"])
    with pytest.raises(ScheduleError, match="wait for each other"):
        format_torch_csv(stuck)
