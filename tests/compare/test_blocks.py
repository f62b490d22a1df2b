"""Blocks of a comparison, by a double of its ranks: kept, resumed, refused, measured again.

tests/train/test_compare.py has the real ranks.
"""

import json
from pathlib import Path

import pytest
from example_round import PLAN, steps

from jaxmorph.compare import comparison
from jaxmorph.compare.comparison import run_comparison
from jaxmorph.compare.provenance import ProcessorTimes
from jaxmorph.config import load_config
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.training.resume import hold

TEXT = """
parallelism: {stages: 2}
compare:
  systems: [zb, 1f1b]
  conditions: [{name: healthy}, {name: A, trace: delays.csv}]
  steps: 3
  repeats: 2
"""
RESTARTS = ("checkpoint.every_steps=1", "compare.conditions=[{name: healthy}]")
ALL = [("zb", 1), ("1f1b", 1), ("zb", 2), ("1f1b", 2)]


class Ranks:
    """A double of `run_ranks`: rounds of some made-up steps.

    Attributes:
        launches: The blocks that were begun.
        ends: By launch, how it ends, and after how many rounds.
        steals_s: By launch, the processor time that others use meanwhile.
    """

    def __init__(self):
        self.launches: list[tuple[str, int]] = []
        self.ends: dict[int, tuple[int, BaseException]] = {}
        self.steals_s: dict[int, float] = {}
        self._now_s = self._busy_s = 0.0

    def __call__(self, module, arguments, num_ranks, logs, take, **_):
        path, system, number = arguments
        at = len(self.launches)
        self.launches.append((system, int(number)))
        compare = load_config(Path(path)).compare
        assert compare is not None
        self._now_s += 10.0
        self._busy_s += self.steals_s.get(at, 0.0)
        for condition in range(len(compare.conditions)):
            take({"kind": "RoundPlanned", "condition": condition, "plan": PLAN})
        num_rounds, end = self.ends.get(at, (-1, None))
        for condition in range(len(compare.conditions)):
            if num_rounds == 0 and end is not None:
                raise end
            num_rounds -= 1
            take(steps(condition, *(400.0 + 10 * int(number) + each for each in range(3))))

    def times(self):
        return ProcessorTimes(self._now_s, self._busy_s, 0.0)


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """The double; the working directory has a configuration and its trace."""
    monkeypatch.chdir(tmp_path)
    Path("few.yaml").write_text(TEXT)
    Path("delays.csv").write_text("step,links,latency_ms\n0,0-1,5\n")
    stand_in = Ranks()
    monkeypatch.setattr(comparison, "run_ranks", stand_in)
    monkeypatch.setattr(comparison, "processor_times", stand_in.times)
    monkeypatch.setattr(comparison, "num_processors", lambda: 2)
    monkeypatch.setattr(comparison, "check_run", lambda config: None)
    # Pictures and pages would take most of the time.
    monkeypatch.setattr("jaxmorph.report.matrix_figure.save_figure", lambda *_: None)
    monkeypatch.setattr(comparison, "write_report", lambda directory: None)
    return stand_in


def start(*overrides: str) -> int:
    return run_comparison(["few.yaml", "run.dir=out", *overrides])


def resume(*overrides: str, **options) -> int:
    return run_comparison(overrides, "out", **options)


def results():
    return json.loads(Path("out/results.json").read_text())


def found_runs():
    return {(run["system"], run["condition"]): run for run in results()["runs"]}


def is_whole() -> bool:
    runs = found_runs().values()
    whole = [run["step_ms"]["n"] == 6 and not run["failed"] for run in runs]
    measured = [(each["system"], each["block"]) for each in results()["blocks"]]
    return len(whole) == 4 and all(whole) and measured == ALL


def test_systems_take_turns_block_by_block(ranks):
    assert start() == 0
    assert ranks.launches == ALL
    assert is_whole()
    assert [(each["system"], each["block"]) for each in results()["blocks"]] == ALL


@pytest.mark.parametrize(("launch", "num_rounds"), [(0, 0), (1, 0), (1, 1), (3, 1)])
def test_a_stopped_comparison_loses_the_block_at_work_alone(ranks, capsys, launch, num_rounds):
    ranks.ends[launch] = (num_rounds, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        start()
    assert "to continue: jaxmorph compare --resume out" in capsys.readouterr().out
    stopped = found_runs()[ALL[launch][0], "A"]
    assert stopped["failed"] == f"{3 * (launch // 2)} of 6 steps measured: interrupted"
    assert resume() == 0
    assert ranks.launches == [*ALL[: launch + 1], *ALL[launch:]]
    assert is_whole()
    shown = capsys.readouterr().out
    assert f"{4 - launch} of 4 blocks are to be measured" in shown
    assert resume() == 0  # nothing is left
    assert len(ranks.launches) == 5


def test_a_killed_comparison_keeps_its_finished_blocks(ranks, monkeypatch):
    ranks.ends[2] = (1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        start()
    Path("out/blocks/zb-2.json").unlink()  # SIGKILL leaves it unwritten
    assert resume() == 0
    assert ranks.launches == [*ALL[:3], *ALL[2:]]
    assert is_whole()


def test_one_command_starts_and_continues(ranks):
    ranks.ends[1] = (0, KeyboardInterrupt())
    given = ["few.yaml", "run.dir=out"], "auto"
    with pytest.raises(KeyboardInterrupt):
        run_comparison(*given)
    for _ in range(2):
        assert run_comparison(*given) == 0
    assert ranks.launches == [*ALL[:2], *ALL[1:]]
    assert is_whole()
    assert results()["name"] == "few"
    assert results()["provenance"]["command"] == (
        "jaxmorph compare few.yaml run.dir=out --resume auto"
    )


def test_resumed_results_keep_name_and_command(ranks):
    start()
    Path("out/blocks/1f1b-2.json").unlink()
    Path("out/results.json").unlink()
    assert resume("compare.bars=[{systems: [zb], at_most: 1}]") == 0
    assert results()["name"] == "few"
    assert results()["provenance"]["command"] == "jaxmorph compare few.yaml run.dir=out"
    assert {bar["verdict"] for bar in results()["bars"]} == {"missed"}


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:90], lambda text: "", lambda text: text.replace("411.0", "311.0", 1)],
)
def test_a_damaged_block_is_measured_again(ranks, capsys, damage):
    start()
    path = Path("out/blocks/1f1b-1.json")
    path.write_text(damage(path.read_text()))
    assert resume() == 0
    assert ranks.launches == [*ALL, ("1f1b", 1)]
    assert is_whole()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if str(path) in line]
    assert line.endswith("; the block is measured again")


def test_another_blocks_file_is_measured_again(ranks, capsys):
    start()
    Path("out/blocks/zb-1.json").replace("out/blocks/1f1b-1.json")
    resume()
    assert ranks.launches == [*ALL, ("zb", 1), ("1f1b", 1)]
    assert "1f1b-1.json: got block 1 of zb, expected its own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        (["compare.steps=5"], "compare.steps"),
        (["compare.repeats=1", "batch.microbatches=4"], "batch.microbatches, compare.repeats"),
    ],
)
def test_another_configuration_is_refused(ranks, overrides, other):
    start()
    before = Path("out/config.yaml").read_text()
    says = f"got other {other} than the blocks in out were measured with, expected the same"
    with pytest.raises(UserError, match=says):
        resume(*overrides)
    with pytest.raises(UserError, match=says):
        run_comparison(["few.yaml", "run.dir=out", *overrides], "auto")
    assert Path("out/config.yaml").read_text() == before
    assert ranks.launches == ALL


def test_another_configuration_is_refused_though_its_systems_are_new(ranks):
    start("compare.systems=[zb]", *RESTARTS)
    with pytest.raises(UserError, match=r"got other batch\.microbatches than the blocks in out"):
        resume("compare.systems=[1f1b]", "batch.microbatches=4")
    with pytest.raises(UserError, match="got systems that restart beside blocks of others in out"):
        resume("compare.systems=[1f1b, restart]")


def test_another_commit_is_told_and_kept(ranks, capsys, monkeypatch):
    start("compare.systems=[zb]")
    monkeypatch.setattr("jaxmorph.compare.provenance._commit", lambda root: "f00")
    assert resume("compare.systems=[zb, 1f1b]") == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("commit: ")]
    assert line.endswith(", now f00")
    assert results()["provenance"]["commit"].endswith(", then f00")


def test_another_trace_is_refused(ranks):
    start()
    Path("delays.csv").write_text("step,links,latency_ms\n2,0-1,5\n")
    with pytest.raises(UserError, match="got other contents of a trace than the blocks in out"):
        resume()


def test_a_configuration_whose_trace_is_gone_is_no_traceback(ranks):
    start()
    Path("delays.csv").rename("others.csv")
    moved = "compare.conditions.1.trace=others.csv"
    with pytest.raises(UserError, match=r"got other compare\.conditions than the blocks in out"):
        run_comparison(["few.yaml", "run.dir=out", moved], "auto")


def test_only_a_comparison_is_resumed(ranks):
    with pytest.raises(UserError, match="--resume: got out, expected a comparison's directory"):
        resume()
    Path("out").mkdir()
    Path("out/config.yaml").write_text("parallelism: {stages: 2}\n")
    with pytest.raises(UserError, match="compare: missing"):
        resume()
    given = ["few.yaml", "run.dir=out"]
    with pytest.raises(UserError, match="got out, the directory of a run, not of a comparison"):
        run_comparison(given, "auto")
    Path("out/config.yaml").rename("out/other.yaml")
    with pytest.raises(UserError, match="got out, expected a comparison's directory, or none"):
        run_comparison(given, "auto")
    with pytest.raises(UserError, match=r"--resume: got few\.yaml beside out, expected"):
        run_comparison(given, "out")
    with pytest.raises(UserError, match="compare: got no configuration, expected a YAML file"):
        run_comparison([], "auto")


def test_a_system_can_be_added(ranks):
    start("compare.systems=[zb]")
    assert resume("compare.systems=[zb, 1f1b]") == 0
    assert ranks.launches == [("zb", 1), ("zb", 2), ("1f1b", 1), ("1f1b", 2)]
    assert is_whole()


def test_a_failed_system_is_measured_again(ranks):
    ranks.ends[0] = (1, RunFailedError("rank 1 failed: ended by SIGKILL"))
    assert start() == 1
    assert ranks.launches == [("zb", 1), ("1f1b", 1), ("1f1b", 2)]  # its second block is not begun
    reasons = {key: run["failed"] for key, run in found_runs().items()}
    assert reasons["zb", "healthy"] == ("3 of 6 steps measured: rank 1 failed: ended by SIGKILL")
    assert reasons["1f1b", "healthy"] is None
    assert resume() == 0
    assert ranks.launches[3:] == [("zb", 1), ("zb", 2)]
    assert is_whole()


def disturbed() -> list[tuple[str, int]]:
    """The blocks that the results mark."""
    return [
        (run["system"], int(run["disturbed"].split()[1]))
        for run in results()["runs"]
        if run["disturbed"] and run["condition"] == "healthy"
    ]


def test_a_disturbed_block_is_marked_and_measured_again_alone(ranks, capsys):
    ranks.steals_s = {0: 0.5, 1: 8.0}  # of 10 s of each of two processors
    assert start() == 0
    assert disturbed() == [("1f1b", 1)]
    assert "beside other work" in Path("out/table.md").read_text()
    assert "others' processor time 40.0%, beside other work" in capsys.readouterr().out
    assert resume() == 0
    assert len(ranks.launches) == 4
    ranks.ends[4] = (1, RunFailedError("rank 0 failed: no memory"))
    assert resume(redo_disturbed=True) == 1
    assert is_whole()  # what was measured stays until it is measured again
    assert disturbed() == [("1f1b", 1)]
    assert resume(redo_disturbed=True) == 0
    assert ranks.launches[4:] == [("1f1b", 1), ("1f1b", 1)]
    assert is_whole()
    assert disturbed() == []


def test_a_directory_in_use_is_refused(ranks):
    start()
    with hold([Path("out")]), pytest.raises(UserError, match="in use by another run"):
        resume()
