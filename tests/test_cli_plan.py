import json

import pytest

from jaxmorph import cli


def _run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    captured = capsys.readouterr()
    code = exit_info.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


def _plan(capsys, *arguments: str):
    code, out, err = _run(capsys, "plan", "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_plan_prints_the_step_and_its_numbers(capsys):
    code, out, err = _run(capsys, "plan")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "adaptive: 4 stages, 12 microbatches",
        "stage 0 F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 F8 B2 F9 B3 F10B4 F11B5 W0 B6 W1 B7 W2 B8 W3 B9 "
        "W4 B10W5 B11W6 W7 W8 W9 W10W11.........",
        "stage 1 ...F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 F8 B4 F9 B5 F10B6 F11B7 W0 B8 W1 B9 W2 "
        "B10W3 B11W4 W5 W6 W7 W8 W9 W10W11......",
        "stage 2 ......F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 F9 B7 F10B8 F11B9 W0 "
        "B10W1 B11W2 W3 W4 W5 W6 W7 W8 W9 W10W11...",
        "stage 3 .........F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8 F9 B9 F10B10"
        "F11B11W0 W1 W2 W3 W4 W5 W6 W7 W8 W9 W10W11",
        "        |--------------|--------------|--------------|--------------|--------------|----"
        "----------|--------------|-----------",
        "        0 ms           50             100            150            200            250   "
        "         300            350",
        "",
        "makespan     390.0 ms",
        "lower bound  390.0 ms  no schedule is faster",
        "bubble rate  7.7%",
        "warm-ups     7 5 3 1   forwards before the first backward",
        "peak live    7 5 3 1   microbatches held until B",
        out.splitlines()[-1],
    ]
    assert out.splitlines()[-1].startswith("planning     ")


def test_a_step_that_is_not_the_fastest_says_how_far_it_is_above_the_bound(capsys):
    _, out, _ = _run(capsys, "plan", "--link-ms", "0,0,20", "--planned-link-ms", "0")
    assert "lower bound  410.0 ms  this is 17.1% above the bound\n" in out


@pytest.mark.parametrize(
    ("arguments", "makespan_ms"),
    [
        ([], 390.0),
        (["--schedule", "zb-h2"], 390.0),
        (["--schedule", "paper"], 390.0),
        (["--schedule", "gpipe"], 450.0),
        (["--link-ms", "10,0,0", "--planned-link-ms", "0"], 400.0),
        (["--link-ms", "20,0,0", "--planned-link-ms", "0,0,0"], 440.0),
        (["--link-ms", "10,0,0"], 400.0),
        (["--link-ms", "20,0,0"], 410.0),
        (["--stages", "8", "--microbatches", "24"], 790.0),
        (["--stages", "1", "--microbatches", "3"], 90.0),
    ],
)
def test_plan_answers_in_json(capsys, arguments, makespan_ms):
    assert _plan(capsys, *arguments)["makespan_ms"] == makespan_ms


def test_plan_takes_numbers_per_stage(capsys):
    costs = ["--forward-ms", "1,2", "--backward-input-ms", "3,4", "--backward-weight-ms", "5,6.5"]
    answer = _plan(capsys, "--stages", "2", "--microbatches", "1", *costs)
    assert answer["makespan_ms"] == 15.0


def test_plan_keeps_caps_and_takes_warm_ups(capsys):
    capped = _plan(capsys, "--max-live", "4", "--live-until", "W")
    assert capped["peak_live"] == [4, 4, 4, 4]
    assert _plan(capsys, "--warmup-forwards", "9,5,3,1")["warmup_forwards"] == [9, 5, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "interleaved"], "--schedule: got 'interleaved', expected one of "),
        (["--stages", "four"], "Invalid value for '--stages'"),
        (["--stages", "0"], "--stages: got 0"),
        (["--forward-ms", "10,x"], "--forward-ms: got 2 values, expected 4"),
        (["--forward-ms", "ten"], "--forward-ms: got 'ten', expected one number or a list of 4"),
        (["--link-ms", "nan"], "--link-ms[0]: got nan"),
        (["--frob"], "No such option"),
        (["--out", "plan.pdf"], "--out: got plan.pdf, expected a name that ends in .png"),
        (["--out", "nowhere/plan.png"], "--out: got nowhere/plan.png, but there is no folder"),
        (["--microbatches", "0"], "--microbatches: got 0"),
        (["--warmup-forwards", "3,4,2,1"], "--warmup-forwards[1]: got 4"),
        (["--batch", "missing.jsonl", "--stages", "4"], "--batch: got --stages as well"),
        (["--json", "--batch", "missing.jsonl"], "--batch: got --json as well"),
        (["--batch", "missing.jsonl"], "--batch: cannot read missing.jsonl"),
        (["--max-live", "3", "--schedule", "zb-h2"], "--max-live[0]: zb-h2 holds 7"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = _run(capsys, "plan", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_problem_in_a_batch_keeps_its_fields_names_in_errors(capsys, tmp_path):
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"name": "a"}')
    _, out, _ = _run(capsys, "plan", "--batch", str(batch))
    assert json.loads(out)["error"] == "num_stages: missing, expected a value"


def test_an_unknown_command_is_the_users_mistake(capsys):
    code, _, err = _run(capsys, "plane")
    assert code == 2
    assert err.startswith("error: No such command 'plane'")


def test_no_command_shows_the_commands(capsys):
    code, out, _ = _run(capsys)
    assert code == 0
    assert "plan" in out


@pytest.mark.parametrize("suffix", [".png", ".svg", ".txt", ".json"])
def test_plan_writes_a_file(capsys, tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    assert _run(capsys, "plan", "--out", str(path))[0] == 0
    assert path.stat().st_size > 1000


def test_a_batch_goes_on_after_a_bad_line(capsys, tmp_path):
    good = {
        "name": "good",
        "num_stages": 2,
        "num_microbatches": 4,
        "forward_ms": [10, 10],
        "backward_input_ms": [10, 10],
        "backward_weight_ms": [10, 10],
        "link_ms": [0],
    }
    batch = tmp_path / "batch.jsonl"
    batch.write_text(f"{json.dumps(good)}\nnonsense\n{json.dumps(good | {'name': 'also good'})}\n")
    code, out, err = _run(capsys, "plan", "--batch", str(batch))
    answers = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (2, "")
    assert [answer["name"] for answer in answers] == ["good", None, "also good"]
    assert [answer.get("makespan_ms") for answer in answers] == [130.0, None, 130.0]
    batch.write_text(json.dumps(good))
    assert _run(capsys, "plan", "--batch", str(batch))[0] == 0
