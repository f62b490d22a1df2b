import json

import pytest

from jaxmorph.config import Config, dump_config
from jaxmorph.control.profiler import Profile
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, StageCosts, StashBytes


@pytest.fixture
def plan(run):
    def plan(*arguments: object):
        code, out, err = run("plan", "--json", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    return plan


@pytest.fixture
def measured_run(tmp_path):
    """Makes a directory of a run of two stages that has measured its costs."""

    def make(links, sizes=None, **sections):
        config = Config.model_validate({"parallelism": {"stages": 2}, **sections})
        (tmp_path / "config.yaml").write_text(dump_config(config))
        profile = Profile(StageCosts.uniform(2, 10, 10, 10), links, sizes)
        (tmp_path / "profile.json").write_text(json.dumps(profile.to_json()))
        return ["--profile", tmp_path]

    return make


def test_plan_prints_the_step_and_its_numbers(run):
    code, out, err = run("plan")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "adaptive: 4 stages, 12 microbatches"
    assert [line[:17] for line in lines[1:5]] == [
        "stage 0 F0 F1 F2 ", "stage 1 ...F0 F1 ", "stage 2 ......F0 ", "stage 3 .........",
    ]  # fmt: skip
    assert lines[-6:-1] == [
        "makespan     390.0 ms",
        "lower bound  390.0 ms  no schedule is faster",
        "bubble rate  7.7%",
        "warm-ups     7 5 3 1   forwards before the first backward",
        "peak live    7 5 3 1   microbatches held until B",
    ]
    assert lines[-1].startswith("planning     ")
    _, out, _ = run("plan", "--link-ms", "0,0,20", "--planned-link-ms", "0")
    assert "lower bound  410.0 ms  this is 17.1% above the bound\n" in out


_WHOLE_IN_25_BYTES = (
    *("--max-stash-bytes", "25"),
    *("--stash-bytes-after-forward", "5", "--stash-bytes-after-backward", "20"),
)


@pytest.mark.parametrize(
    ("arguments", "makespan_ms"),
    [
        ([], 390.0),
        (["--schedule", "gpipe"], 450.0),
        (["--link-ms", "20,0,0", "--planned-link-ms", "0,0,0"], 440.0),
        (["--link-ms", "20,0,0"], 410.0),
        (["--stages", "8", "--microbatches", "24"], 790.0),
        (["--stages", "1", "--microbatches", "3"], 90.0),
        (["--schedule", "zb-h2", "--time-step", "4"], 468.0),
        (["--schedule", "1f1b", "--link-forward-ms", "20"], 670.0),
        (["--schedule", "1f1b", "--link-ms", "20", "--link-forward-ms", "0"], 670.0),
        (["--schedule", "gpipe", "--link-ms", "25", "--link-model", "serialized"], 820.0),
        (["--schedule", "gpipe", "--link-occupancy-ms", "25"], 820.0),
        (["--schedule", "1f1b", *_WHOLE_IN_25_BYTES], 450.0),
    ],
)
def test_plan_answers_in_json(plan, arguments, makespan_ms):
    assert plan(*arguments)["makespan_ms"] == makespan_ms


def test_plan_takes_costs_caps_and_warm_ups_per_stage(plan):
    costs = ["--forward-ms", "1,2", "--backward-input-ms", "3,4", "--backward-weight-ms", "5,6.5"]
    assert plan("--stages", "2", "--microbatches", "1", *costs)["makespan_ms"] == 15.0
    capped = plan("--max-live", "4", "--live-until", "W")
    assert capped["peak_live"] == [4, 4, 4, 4]
    assert plan("--warmup-forwards", "9,5,3,1")["warmup_forwards"] == [9, 5, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "magic"], "--schedule: got 'magic', expected one of "),
        (["--stages", "four"], "Invalid value for '--stages'"),
        (["--forward-ms", "10,x"], "--forward-ms: got 2 values, expected 4"),
        (["--forward-ms", "ten"], "--forward-ms: got 'ten', expected one number or a list of 4"),
        (["--frob"], "No such option"),
        (["--out", "plan.pdf"], "--out: got plan.pdf, expected a name that ends in .png"),
        (["--out", "nowhere/plan.png"], "--out: got nowhere/plan.png, but there is no folder"),
        (["--warmup-forwards", "3,4,2,1"], "--warmup-forwards[1]: got 4"),
        (["--batch", "missing.jsonl", "--stages", "4"], "--batch: got --stages as well"),
        (["--json", "--batch", "missing.jsonl"], "--batch: got --json as well"),
        (["--batch", "missing.jsonl"], "--batch: cannot read missing.jsonl"),
        (["--max-live", "3", "--schedule", "zb-h2"], "--max-live[0]: zb-h2 holds 7"),
        (["--chunks", "2"], "--chunks: got 2, expected 1 for adaptive (or interleaved)"),
        (["--schedule", "interleaved", "--microbatches", "13"], "interleaved: got 13 microbatches"),
        (["--compare", "1f1b,x"], "--compare: got 'x', expected some of gpipe"),
        (["--compare", "1f1b,1f1b"], "--compare: got 1f1b twice, expected each schedule once"),
        (["--compare", "1f1b", "--chunks", "2"], "--chunks: got 2, expected interleaved among"),
        (["--compare", "1f1b", "--export", "a.csv"], "--compare: got --export as well, expected"),
        (["--compare", "1f1b", "--what-if", "link=0:0ms"], "--compare: got --what-if as well"),
        (["--what-if", "faster"], "--what-if: got 'faster', expected a change such as link=2:0ms"),
        (["--export", "a.pdf"], "--export: got a.pdf, expected a name that ends in .csv, .json"),
        (["--layers-cost", "1,2"], "--stages: got 4, expected between 1 and the 2 layers"),
        (["--layers-cost", "1,a,2,3"], "--layers-cost[1]: got 'a', expected a number of ms"),
        (["--layers-cost", "1,1,1,1", "--forward-ms", "1,2,3,4"], "--forward-ms: got [1, 2, 3, 4]"),
        (["--layers-cost", "1,1,1,1", "--forward-ms", "0"], "--forward-ms: got 0, expected a num"),
        (
            ["--layers-cost", "1,1,1,1", "--schedule", "zb-v"],
            "--schedule: got zb-v beside --layers",
        ),
        (["--head-cost", "3"], "--head-cost: got no --layers-cost, expected both"),
        (["--profile", "nowhere"], "--profile: got nowhere, expected a run directory"),
        (["--profile", ".", "--stages", "3"], "--profile: got --stages as well"),
    ],
)
def test_mistakes_are_one_line(expect_mistake, arguments, message):
    expect_mistake(message, "plan", *arguments)


def test_a_batch_continues_after_a_bad_line(run, tmp_path):
    good = {
        "name": "good", "num_stages": 2, "num_microbatches": 4, "forward_ms": [10, 10],
        "backward_input_ms": [10, 10], "backward_weight_ms": [10, 10], "link_ms": [0],
    }  # fmt: skip
    batch = tmp_path / "batch.jsonl"
    also_good = json.dumps(good | {"name": "also good"})
    batch.write_text(f'{json.dumps(good)}\nnonsense\n{{"name": "a"}}\n{also_good}\n')
    code, out, err = run("plan", "--batch", str(batch))
    answers = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (2, "")
    assert [answer["name"] for answer in answers] == ["good", None, "a", "also good"]
    assert [answer.get("makespan_ms") for answer in answers] == [130.0, None, None, 130.0]
    # A problem's fields keep their names in errors.
    assert answers[2]["error"] == "num_stages: missing, expected a value"
    batch.write_text(json.dumps(good))
    assert run("plan", "--batch", str(batch))[0] == 0


def test_blocking_links_hold_queues(run, plan, tmp_path):
    arguments = ["--schedule", "zb-h2", "--link-ms", "0,0,30", "--link-model"]
    latency = plan(*arguments, "latency")["makespan_ms"]
    blocking = plan(*arguments, "blocking")["makespan_ms"]
    # Each of the 24 messages of the slow link holds up both of its stages.
    assert latency < 24 * 30.0 < blocking
    problem = {
        "name": "x", "num_stages": 4, "num_microbatches": 12, "forward_ms": 10,
        "backward_input_ms": 10, "backward_weight_ms": 10, "link_ms": [0, 0, 30],
        "schedule": "zb-h2",
    }  # fmt: skip
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps(problem | {"link_model": "blocking"}))
    _, out, _ = run("plan", "--batch", str(batch))
    assert json.loads(out)["makespan_ms"] == blocking


def test_interleaved_runs_virtual_stages(plan):
    arguments = ["--schedule", "interleaved", "--backward-weight-ms", "0"]
    two = plan(*arguments)
    # (v m + p - 1) steps of F and BW, each of t / v
    assert two["makespan_ms"] == (2 * 12 + 3) * 10.0
    assert two["orders"][0][4] == "1.F0"
    three = plan(*arguments, "--chunks", "3")
    assert three["makespan_ms"] == pytest.approx((3 * 12 + 3) * 20 / 3)
    around = plan(*arguments, "--link-ms", "0,0,0,5")
    assert around["makespan_ms"] > two["makespan_ms"]


def test_jitter_is_planned_for_and_shown(run):
    code, out, _ = run("plan", "--link-ms", "0,0,20", "--link-jitter-ms", "10")
    assert code == 0
    assert "\nwith jitter  " in out
    assert "mean; one step in ten takes over " in out


def test_caps_in_bytes_show_the_peak(run):
    sizes = ["--stash-bytes-after-forward", "1000", "--stash-bytes-after-backward", "500"]
    code, out, _ = run("plan", "--max-stash-bytes", "5000", *sizes)
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("peak stash"))
    peaks = [int(word.replace(",", "")) for word in line.split()[2:6]]
    assert line.endswith("bytes held until W")
    assert max(peaks) <= 5000


def test_schedules_that_do_not_fit_are_left_out(run, plan):
    capped = ["plan", "--compare", "zb-h2,1f1b,interleaved", "--max-live", "6", "--chunks", "2"]
    code, out, err = run(*capped)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1f1b", "interleaved", "zb-h2:"]
    assert lines[2].endswith("(each 1/2)")
    assert lines[3].startswith("zb-h2: left out, max_live[0]: zb-h2 holds 7 microbatches")
    answers = plan(*capped[1:])
    assert [answer["name"] for answer in answers] == ["1f1b", "interleaved", "zb-h2"]
    assert "holds 7 microbatches" in answers[2]["error"]


def test_schedules_are_compared_in_a_table_and_in_json(run, plan, tmp_path):
    picture = tmp_path / "all.svg"
    arguments = ["--compare", "1f1b,zb-h2, gpipe", "--link-ms", "0,0,20"]
    code, out, _ = run("plan", *arguments, "--out", str(picture))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["makespan", "1f1b", "zb-h2", "gpipe"]
    assert "zb-h2  460.0 ms     410.0 ms  12.2%        21.7%" in out
    assert picture.stat().st_size > 1000
    answers = plan(*arguments)
    assert [answer["makespan_ms"] for answer in answers] == [690.0, 460.0, 490.0]


def test_what_if_is_compared_with_the_original(run, plan):
    arguments = ["--link-ms", "0,0,20", "--what-if", "link=2:0ms"]
    now, then = plan(*arguments)
    assert (now["name"], now["makespan_ms"]) == ("as it is", 410.0)
    assert (then["name"], then["makespan_ms"]) == ("what if link 2-3: 0 ms", 390.0)
    code, out, _ = run("plan", *arguments, "--what-if", "stage=0:2x")
    assert code == 0
    assert out.splitlines()[2].startswith("what if link 2-3: 0 ms, stage 0: 2x  ")


def test_the_schedule_is_exported(run, tmp_path):
    path = tmp_path / "plan.csv"
    arguments = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "1"]
    assert run("plan", *arguments, "--export", str(path))[0] == 0
    assert path.read_text() == "0F0,,,0B0\n,1F0,1B0,\n"


def test_layer_cuts_are_compared_with_the_even_cut(run, plan):
    arguments = ["--layers-cost", "1,1,1,1,1,1,1,1", "--head-cost", "3"]
    code, out, _ = run("plan", *arguments)
    assert code == 0
    assert out.splitlines()[-2:] == [
        "layers       2 2 3 1  slowest stage 12.0 ms a microbatch, makespan 151.0 ms",
        "even cut     2 2 2 2  slowest stage 15.0 ms a microbatch, makespan 186.0 ms",
    ]
    answer = plan(*arguments, "--backward-input-ms", "20", "--embedding-cost", "1")
    assert (answer["layers"], answer["even_layers"]) == ([2, 2, 3, 1], [2, 2, 2, 2])
    assert (answer["slowest_stage_ms"], answer["even_slowest_stage_ms"]) == (16.0, 20.0)
    assert answer["makespan_ms"] < answer["even_makespan_ms"]


def test_a_run_is_planned_from_its_measurements(plan, measured_run):
    links = {Link(0, 1): LinkDelay(30, 30)}
    run = measured_run(links, batch={"microbatches": 4}, schedule={"name": "zb-h2"})
    assert plan(*run)["schedule"] == "zb-h2"
    assert plan(*run)["makespan_ms"] == 220.0
    assert plan(*run, "--schedule", "gpipe")["schedule"] == "gpipe"
    assert plan(*run, "--link-ms", "0")["makespan_ms"] == 130.0
    now, then = plan(*run, "--what-if", "link=0:0ms")
    assert (now["makespan_ms"], then["makespan_ms"]) == (220.0, 130.0)


def test_a_given_cap_overrides_the_runs(plan, measured_run):
    schedule = {"name": "adaptive", "max_stash_bytes": 500}
    run = measured_run({}, StashBytes((100, 100), (50, 50)), schedule=schedule)
    assert max(plan(*run)["peak_stash_bytes"]) <= 500
    assert max(plan(*run, "--max-live", "1")["peak_live"]) == 1
    assert max(plan(*run, "--max-stash-bytes", "150")["peak_stash_bytes"]) <= 150


def test_a_mesh_says_who_is_where_and_what_hosts_carry(run):
    code, printed, _ = run("plan", "--mesh", "2x4x8", "--stages", "4")
    assert code == 0
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    assert ["0", "0", "(r0", "stage", "0),", "1", "(r0", "stage", "1)"] in rows
    assert ["0-1", "r0:1-2", "-"] in rows
    assert ["0-2", "-", "stage", "0,", "stage", "1"] in rows


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("2x4", "--mesh: got '2x4', expected replicas x tensor devices"),
        ("2x3x8", "--mesh: got 3 tensor devices and 8 of a host, expected a number that divides 8"),
        ("3x1x8", "--mesh: got 4 stages x 3 replicas, 12 ranks, expected a multiple of 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(expect_mistake, mesh, says):
    expect_mistake(says, "plan", "--mesh", mesh)
