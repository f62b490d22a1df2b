"""The check from its command line to its exit code; most tests share one small run on the CPU."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxmorph.gpu_check.command import PARTS, main, run_parts
from jaxmorph.gpu_check.device import find_device
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import ON_CPU

ROOT = Path(__file__).parents[2]
BESIDE = Path(__file__).parent / "without_dependencies.py"


@dataclass(frozen=True)
class Told:
    """A part's report of one row."""

    holds: bool | None

    def rows(self):
        yield Row("figure", "1 ms", holds=self.holds)


def told(settings):
    return Told(holds=None)


def disappointed(settings):
    return Told(holds=False)


def broken(settings):
    raise RuntimeError("out of\nmemory")


def ended(settings):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """All parts on the CPU, where no dependency is but JAX, Flax and Optax."""
    folder = tmp_path_factory.mktemp("check")
    path, temporary = folder / "check.json", folder / "temporary"
    temporary.mkdir()
    command = [sys.executable, str(BESIDE), "jaxmorph.gpu_check", "--allow-cpu", f"--json={path}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "TMPDIR": str(temporary),  # also what its processes are known by
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(temporary.iterdir())
    assert not processes_with(f"TMPDIR={temporary}")
    return done.stdout, json.loads(path.read_text(encoding="utf-8"))


def processes_with(variable):
    """The processes in whose environment something is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # another user's, or one that has ended meanwhile
            continue
        if variable.encode() in variables:
            found.append(path.parent.name)
    return found


@dataclass(frozen=True)
class Untellable:
    """A part's report of what JSON can't hold."""

    what: object = object()

    def rows(self):
        return ()


def test_a_report_that_cannot_be_told_is_its_parts_fault_alone(tmp_path):
    parts = {"bad": lambda settings: Untellable(), "good": told}
    outcomes = run_parts(parts, ON_CPU, tmp_path / "found.json", limit_s=100.0)
    assert [outcome.holds for outcome in outcomes] == [False, True]
    assert "JSON serializable" in outcomes[0].error
    assert json.loads((tmp_path / "found.json").read_text())["done"]


def test_the_file_names_the_part_that_runs(tmp_path):
    path, running = tmp_path / "found.json", []

    def look(settings):
        running.append(json.loads(path.read_text())["running"])
        return Told(holds=True)

    run_parts({"one": look, "two": look}, ON_CPU, path, limit_s=100.0)
    assert running == ["one", "two"]
    found = json.loads(path.read_text())
    assert (found["running"], found["done"], found["holds"]) == (None, True, True)


@pytest.mark.timeout(100)
def test_a_check_that_hangs_ends_itself_and_says_where():
    program = (
        "import threading; from jaxmorph.gpu_check.command import _ending_in_time\n"
        "def hangs(): threading.Event().wait()\n"
        "with _ending_in_time(0.2): hangs()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert "in hangs" in done.stderr


@pytest.fixture
def without_gpu(monkeypatch):
    devices = jax.devices

    def of_cpu(backend=None):
        if backend == "cuda":
            raise RuntimeError("Unknown backend\ncuda")
        return devices(backend)

    monkeypatch.setattr(jax, "devices", of_cpu)


@pytest.mark.timeout(280)
def test_every_part_runs_where_only_jax_flax_and_optax_are(small_run):
    out, found = small_run
    assert list(found["parts"]) == list(PARTS)
    assert found["done"]
    assert found["holds"]
    assert out.endswith("all parts ran, and what they ask for holds\n")


@pytest.mark.timeout(280)
def test_the_device_is_named_with_the_versions_of_what_computes(small_run):
    figures = small_run[1]["parts"]["device"]["figures"]
    assert figures["versions"]["jax"] == jax.__version__
    assert figures["device"] == "cpu"
    assert figures["peak_tflops"] is None


@pytest.mark.timeout(280)
def test_every_program_is_timed_and_no_mfu_is_made_up(small_run):
    out, found = small_run
    figures = found["parts"]["stage"]["figures"]
    assert set(figures["time_ms"]) == {"F", "B", "W", "BW", "plain"}
    assert min(figures["time_ms"].values()) > 0
    assert figures["mfu"] is None
    assert "so no MFU is told" in out
    assert "(F+BW)/plain" in out
    ms, ratio = figures["time_ms"], figures["ratios"]["(prepare+F+BW)/plain"]
    assert ratio * ms["plain"] == pytest.approx(figures["prepare_ms"] + ms["F"] + ms["BW"])


@pytest.mark.timeout(280)
def test_instructions_have_a_price(small_run):
    prices = small_run[1]["parts"]["instructions"]["figures"]["time_us"]
    assert {"a step of F, B, W, per instruction", "call BW"} < set(prices)
    for ops in ("F, B, W", "F, BW"):
        alone = prices[f"{ops}: the same programs alone"]
        added = prices.pop(f"{ops}: the runtime's part")
        assert alone + added == pytest.approx(prices[f"a step of {ops}, per instruction"])
    assert min(prices.values()) > 0


@pytest.mark.timeout(280)
def test_the_planned_stash_is_what_the_compiler_says(small_run):
    memory = small_run[1]["parts"]["memory"]
    assert set(memory["asked"]) == {"kept from F until B", "kept from B until W"}
    kept = memory["figures"]["after_forward"]
    assert kept["planned"] > 100_000
    assert kept["held"] is None


@pytest.mark.timeout(280)
def test_every_gradient_is_compared(small_run):
    steps = small_run[1]["parts"]["parity"]["figures"]["steps"]
    assert [*steps] == ["F, B, W", "F, BW"]
    for step in steps.values():
        assert len(step["gradients"]) == 17
        assert max(step["gradients"].values()) < 1e-4


@pytest.mark.timeout(280)
def test_two_processes_train_as_one_device_does_by_delegated_messages_alone(small_run):
    part = small_run[1]["parts"]["two-stages"]
    figures = part["figures"]
    assert figures["not_joined"] is None
    assert len(figures["losses"]) == 20
    assert figures["losses"][-1] < 0.9 * figures["losses"][0]
    difference = figures["difference"]
    # The embedding's two and the head's three, of which one is a copy, and twelve of the layers.
    assert [len(own) for own in difference["gradients"]] == [14, 15]
    assert [len(own) for own in difference["parameters"]] == [14, 15]
    assert set(part["asked"].values()) == {True}
    assert len(part["asked"]) == 4
    assert {told["tier"] for told in figures["copies"]} == {"buffer_callback"}


@pytest.mark.timeout(280)
def test_work_runs_on_while_a_message_is_held_up_in_the_link(small_run):
    part = small_run[1]["parts"]["head-of-line"]
    figures = part["figures"]
    assert set(part["asked"]) == {"a message on its way", "held up by one before it"}
    assert figures["on_way_ms"] >= figures["delay_ms"] == 50
    assert figures["step_ms"]["with"] > figures["step_ms"]["without"] + 100
    assert all(stage["with"] > stage["without"] for stage in figures["idle"])


class Command:
    """Stands for the module behind the command: is told JAX's settings when it is imported."""

    def __init__(self):
        self.found = []

    def __getattr__(self, name):
        if name != "main":
            raise AttributeError(name)
        self.found.append(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
        return lambda: 0


@pytest.mark.parametrize(("of_user", "found"), [(None, "false"), ("true", "true")])
def test_the_gpus_memory_is_left_to_others_unless_the_user_says_else(monkeypatch, of_user, found):
    command, variable = Command(), "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(variable, of_user or "")
    if of_user is None:
        monkeypatch.delenv(variable)
    monkeypatch.setitem(sys.modules, "jaxmorph.gpu_check.command", command)
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("jaxmorph.gpu_check", run_name="__main__")
    assert exit_info.value.code == 0
    assert command.found == [found]


@pytest.mark.timeout(280)
def test_every_way_of_copying_is_looked_at_in_a_process_beside(small_run):
    parts = small_run[1]["parts"]
    into, out_of = parts["outgoing"]["figures"], parts["incoming"]["figures"]
    assert [tier["name"] for tier in into["tiers"]] == [
        "buffer_callback",
        "io_callback",
        "pinned_host",
    ]
    assert (into["taken"], out_of["taken"]) == ("buffer_callback", "host")
    for tier in [*into["tiers"], *out_of["tiers"]]:
        assert (tier["absent"], tier["trouble"], tier["wholeness"]["wrong"]) == ("", "", [])
        assert tier["wholeness"]["num_small"] == 40
        assert min(tier["latency"].values()) > 0
        assert [speed["num_bytes"] for speed in tier["speeds"]] == [1 << 16]
        assert min(tier["speeds"][0].values()) > 0
        assert tier["disturbance"]["op_ms"] > 0
    assert [*into][-1] == [*out_of][-1] == "recommended"


@pytest.mark.timeout(280)
def test_messages_go_both_ways_beside_computation(small_run):
    part = small_run[1]["parts"]["both-ways"]
    found = part["figures"]
    assert (found["outgoing"], found["incoming"]) == ("buffer_callback", "host")
    assert found["disturbance"]["op_ms"] > 0
    assert found["disturbance"]["num_training"] >= 2  # at least one in each direction
    assert part["asked"] == {}


@pytest.mark.timeout(280)
def test_on_a_cpu_slots_are_made_and_none_is_registered(small_run):
    registration, waits = (small_run[1]["parts"][name] for name in ("registration", "waits"))
    assert registration["figures"]["create_s"] > 0
    assert registration["figures"]["registered"] is None
    assert registration["asked"] == {}
    assert waits["asked"] == {"the host gave up after": True}


def test_without_a_gpu_it_says_so_in_one_line(without_gpu, capsys):
    assert main([], {"told": told}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: got no CUDA GPU (Unknown backend cuda), expected one")
    assert "--allow-cpu" in line


@pytest.fixture
def platforms():
    """Tells JAX which platforms it has."""
    before = jax.config.values["jax_platforms"]
    yield lambda told: jax.config.update("jax_platforms", told)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("told", "had"),
    [("cuda", "cuda,cpu"), ("cpu,cuda", "cpu,cuda"), (None, None)],
)
def test_the_cpu_is_there_for_parity_whatever_the_user_asks_for(told, had, platforms, monkeypatch):
    asked = []
    platforms(told)
    monkeypatch.setattr(
        jax,
        "devices",
        lambda backend=None: asked.append(jax.config.values["jax_platforms"]) or ["gpu"],
    )
    assert find_device(allow_cpu=False) == "gpu"
    assert set(asked) == {had}


def test_a_gpu_that_is_not_what_jax_computes_on_is_refused(platforms, monkeypatch, capsys):
    of = {
        "cuda": [SimpleNamespace(device_kind="NVIDIA H200")],
        None: [SimpleNamespace(device_kind="cpu")],
    }
    platforms("cpu,cuda")
    monkeypatch.setattr(jax, "devices", lambda backend=None: of[backend])
    assert main([], {"told": told}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: JAX_PLATFORMS: got 'cpu,cuda', by which JAX computes on 'cpu'")


def test_jax_without_any_device_is_told_in_one_line(monkeypatch, capsys):
    def none(backend=None):
        raise RuntimeError("Unable to initialize\nbackend")

    monkeypatch.setattr(jax, "devices", none)
    assert main(["--allow-cpu"], {"told": told}) == 2
    assert capsys.readouterr().err == "error: JAX has no device: Unable to initialize backend\n"


def test_a_part_that_fails_loses_no_other(without_gpu, capsys, tmp_path):
    path = tmp_path / "check.json"
    parts = {"broken": broken, "told": told}
    assert main(["--allow-cpu", "--json", str(path)], parts) == 1
    out = capsys.readouterr().out
    assert "FAILED: RuntimeError: out of memory" in out
    assert "figure" in out
    assert out.endswith("FAILED: broken\n")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["done"]
    assert not found["holds"]
    assert "in broken" in found["parts"]["broken"]["traceback"]
    assert found["parts"]["told"]["figures"] == {"holds": None}


def test_what_was_found_is_kept_when_the_process_is_ended(without_gpu, tmp_path):
    path = tmp_path / "check.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--allow-cpu", "--json", str(path)], {"told": told, "ended": ended})
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [*found["parts"]] == ["told"]
    assert (found["done"], found["holds"]) == (False, False)


def test_no_part_is_begun_that_has_no_time_left_and_the_others_hear_how_much_there_is():
    left_s = []

    def heard(settings):
        left_s.append(settings.left_s)
        return Told(holds=None)

    times = iter([100.0, 100.0, 140.0, 186.0])
    parts = {"early": heard, "later": heard, "late": heard}
    early, later, late = run_parts(parts, ON_CPU, None, limit_s=100.0, clock=lambda: next(times))
    assert left_s == [100.0, 60.0]
    assert early.holds
    assert later.holds
    assert not late.holds
    assert late.error == "not begun: the check's 100 s are over; run it with --parts late"


def test_what_does_not_hold_is_a_failure(without_gpu, capsys):
    assert main(["--allow-cpu"], {"told": told, "disappointed": disappointed}) == 1
    assert capsys.readouterr().out.endswith("FAILED: disappointed\n")


def test_parts_are_chosen_by_name(without_gpu, capsys):
    assert main(["--allow-cpu", "--parts", "told"], {"broken": broken, "told": told}) == 0
    with pytest.raises(SystemExit) as exit_info:
        main(["--allow-cpu", "--parts", "tolled"], {"broken": broken, "told": told})
    assert exit_info.value.code == 2
    assert "got tolled, expected some of broken, told" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(without_gpu, capsys, tmp_path):
    path = tmp_path / "missing" / "check.json"
    assert main(["--allow-cpu", "--json", str(path)], {"told": told}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot be written: No such file or directory" in captured.err
