import json

import pytest

from jaxmorph.errors import UserError
from jaxmorph.schedule.builders import one_forward_one_backward
from jaxmorph.schedule.schedule_file import load_schedule, save_schedule

SCHEDULE = one_forward_one_backward(3, 4)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".txt"])
def test_every_format_reads_back(tmp_path, suffix):
    path = tmp_path / f"1f1b{suffix}"
    save_schedule(path, SCHEDULE)
    assert load_schedule(path) == SCHEDULE


def test_what_schedule_save_wrote_is_read(tmp_path):
    SCHEDULE.save(tmp_path / "saved.json")
    assert load_schedule(tmp_path / "saved.json") == SCHEDULE


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


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(UserError, match=r"missing.csv: cannot be read: No such file"):
        load_schedule(tmp_path / "missing.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"bytes.csv: not UTF-8 text"):
        load_schedule(tmp_path / "bytes.csv")
    with pytest.raises(UserError, match=r"schedule file: got \S+/plan.pdf, expected a name that"):
        save_schedule(tmp_path / "plan.pdf", SCHEDULE)
    with pytest.raises(UserError, match=r"schedule file: got \S+/x/a.csv, but there is no folder"):
        save_schedule(tmp_path / "x" / "a.csv", SCHEDULE)
