import json

import pytest

from jaxmorph.schedule.files import save_schedule
from jaxmorph.schedule.fixed import one_forward_one_backward, zb_h2


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "mine.csv"
    save_schedule(path, zb_h2(4, 12))
    return path


def test_a_valid_schedule_is_drawn(run, saved):
    code, out, err = run("validate", saved, "--link-ms", "0,0,20")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == ["ok: every op runs", "mine: 4 stages, 12 microbatches"]
    assert out.splitlines()[-5:] == [
        "makespan     460.0 ms",
        "lower bound  410.0 ms  this is 12.2% above the bound",
        "bubble rate  21.7%",
        "warm-ups     7 5 3 1   forwards before the first backward",
        "peak live    7 5 3 1   microbatches held until B",
    ]


def test_an_answer_in_json_says_that_it_is_valid(run, tmp_path):
    path = tmp_path / "1f1b.json"
    save_schedule(path, one_forward_one_backward(4, 12))
    code, out, err = run("validate", path, "--json", "--backward-weight-ms", "20")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert (answer["valid"], answer["name"], answer["makespan_ms"]) == (True, "1f1b", 600.0)
    assert answer["peak_live"] == [4, 3, 2, 1]


def test_a_deadlock_is_shown_in_the_grid(run, tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, out, err = run("validate", path)
    assert (code, err) == (2, "")
    assert out.splitlines() == [
        "deadlock: the stages wait for each other in a circle: stage 0 at BW0, stage 1 at F1",
        "stuck, the op marked as >op<:",
        "stage 0  F0    >BW0< F1    BW1",
        "stage 1  F0    >F1<  BW0   BW1",
    ]


def test_a_missing_op_is_reported_in_json(run, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("short: 1 stages, 2 microbatches\nstage 0  F0 F1 BW0\n")
    code, out, _ = run("validate", path, "--json")
    assert code == 2
    assert json.loads(out) == {
        "name": "short",
        "valid": False,
        "kind": "missing op",
        "reason": "stage 0: BW1 is missing",
        "grid": "stage 0  F0  F1  BW0 ><",
    }


def test_a_picture_is_drawn(run, saved, tmp_path):
    assert run("validate", saved, "--out", tmp_path / "mine.svg")[0] == 0
    assert (tmp_path / "mine.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link-ms", "1,2"], "--link-ms: got 2 values, expected 3 (one per link)"),
        (["--max-live", "6"], "--max-live[0]: mine holds 7 microbatches"),
        (["--link-model", "x"], "--link-model: got 'x', expected 'latency'"),
        (["--out", "a.pdf"], "--out: got a.pdf, expected a name that ends in"),
    ],
)
def test_mistakes_are_one_line(expect_mistake, saved, arguments, message):
    expect_mistake(message, "validate", saved, *arguments)


def test_a_file_that_is_no_schedule_is_named(expect_mistake, tmp_path):
    path = tmp_path / "mixed.csv"
    path.write_text("0F0,3F0\n1F0,2F0,4F0\n")
    says = f"{path}: row 0: got stage 3 on rank 0, expected it on rank 1"
    expect_mistake(says, "validate", path)
    expect_mistake(f"{tmp_path}/none.csv: cannot", "validate", tmp_path / "none.csv")


def test_a_yaml_file_points_to_dry_run(run):
    code, _, error = run("validate", "configs/demo.yaml")
    assert code == 2
    assert error.startswith("error: configs/demo.yaml: got a YAML file, expected a schedule in a ")
    assert error.endswith("train configs/demo.yaml --dry-run checks a run's configuration\n")
