"""`benchmarks.gpu`: it finds what is wrong, outlives what hangs or dies, and runs to its end."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import two_gpus
from benchmarks.gpu.__main__ import INTO, ONE_GPU, OUT_OF, main, run_parts, summary
from benchmarks.gpu.child import Outcome, Row, run_part
from benchmarks.gpu.copies import SMALL, backend_rows, look_at_payloads
from benchmarks.gpu.copy_ends import Incoming, Outgoing, Site, spoil, what_is_wrong
from benchmarks.gpu.stage import Sizes, build_gpt2, model_flops
from benchmarks.gpu.two_stages import compare
from jaxmorph.stage.backward import split_backward
from jaxmorph.stage.model_flops import product_flops
from tests.test_import_rule import _named_in

ROOT = Path(__file__).parents[1]
SITE = Site(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
COPIES = replace(SMALL, num_small=12, small_bytes=(4, 1000), ops=2, rounds=1)


class Over:
    """A ticket of a copy that is over."""

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self):
        return self


class NeverOver(Over):
    """A ticket of a copy that hangs."""

    def is_ready(self) -> bool:
        return False


class Backend:
    """Copies into slots by a function of a payload's bytes, its slot and what ends the message."""

    name = "tried"

    def __init__(self, copy):
        self._copy = copy

    def compile(self, use, placement):
        return self.start

    def start(self, value, part, slot, tag):
        contents = np.asarray(value).reshape(-1)[part.start : part.stop].view(np.uint8)

        def signal():
            slot.post(len(contents), tag)
            slot.complete()

        return self._copy(contents, slot.payload[: len(contents)], signal) or Over()


def rightly(contents, memory, signal):
    memory[:] = contents
    signal()


def signalled_early(contents, memory, signal):
    """The last byte follows the signal, as on a device whose copy isn't over yet."""
    memory[:-1] = contents[:-1]
    signal()

    class Late(Over):
        def block_until_ready(self):
            memory[-1:] = contents[-1:]
            return self

    return Late()


def never_signalled(contents, memory, signal):
    return NeverOver()


def over_unsignalled(contents, memory, signal):
    memory[:] = contents


class Receiving:
    """Copies out of slots; releases each before or after its bytes have been read."""

    name = "tried"

    def __init__(self, *, too_early, payload=None):
        self._too_early, self._payload = too_early, payload

    def compile(self, use, placement):
        arrival = Receiving(too_early=self._too_early, payload=use.payload)
        return lambda: arrival

    def add(self, part, slot):
        memory = slot.payload
        self._value = memory if self._too_early else memory.copy()
        slot.release()

    def value(self):
        assert self._payload is not None
        return self._value.view(self._payload.dtype).reshape(self._payload.shape)

    def settle(self):
        pass


def look_at(backend, site=SITE, end: type[Outgoing | Incoming] = Outgoing):
    def open_end(*arguments):
        return end(backend, site, *arguments)

    return list(look_at_payloads(open_end, SITE.placement, COPIES))


def test_whole_messages_are_right():
    whole, torn = look_at(Backend(rightly))
    assert (whole.value, whole.holds) == ("6 of 6", True)
    assert (torn.value, torn.holds) == ("0 of 12", True)


def test_a_signal_before_the_last_byte_is_seen_in_every_message():
    whole, torn = look_at(Backend(signalled_early))
    assert (whole.value, whole.holds) == ("0 of 6", False)
    assert whole.note == "bfloat16, 4 B: 1 of the last bytes (4), the first at 3 among them"
    assert (torn.value, torn.holds) == ("12 of 12", False)
    assert torn.note.startswith("message 0, ")


def test_one_torn_message_among_many_is_named():
    count = iter(range(1000))

    def seldom(*arguments):
        return (signalled_early if next(count) == 6 + 7 else rightly)(*arguments)

    whole, torn = look_at(Backend(seldom))
    assert (whole.holds, torn.value) == (True, "1 of 12")
    assert torn.note.startswith("message 7, ")


@pytest.mark.parametrize(
    ("copy", "error", "message"),
    [
        (never_signalled, TimeoutError, "tried has signalled nothing within 0.05 s"),
        (over_unsignalled, RuntimeError, "has signalled nothing, and the copy is over"),
    ],
)
def test_a_missing_signal_is_not_waited_for_long(copy, error, message):
    with pytest.raises(error, match=message):
        look_at(Backend(copy), replace(SITE, patience_s=0.05))


@pytest.mark.parametrize("too_early", [True, False])
def test_a_slot_released_before_it_was_read_is_found(too_early):
    whole, torn = look_at(Receiving(too_early=too_early), end=Incoming)
    assert whole.holds != too_early
    assert torn.value == ("12 of 12" if too_early else "0 of 12")


def test_the_end_of_a_payload_is_read_before_the_rest():
    class Filling(np.ndarray):
        """Memory whose last byte comes with the second look."""

        def __getitem__(self, at):
            seen = np.asarray(self)[at].copy()
            np.asarray(self)[-1] = 7
            return seen

    expected = np.full(10_000, 7, np.uint8)
    memory = expected.copy()
    memory[-1] = 0
    found = "1 of the last bytes (4096), the first at 4095 among them"
    assert what_is_wrong(memory.view(Filling), expected) == found
    assert what_is_wrong(memory, expected) == ""
    spoil(memory, expected)
    assert (memory != expected).all()


@pytest.mark.parametrize(
    ("end", "backend"), [(Outgoing, Backend(rightly)), (Incoming, Receiving(too_early=False))]
)
def test_a_backend_that_works_is_timed(end, backend):
    rows = {row.name: row for row in backend_rows(end, backend, SITE, COPIES)}
    assert set(rows) == {"whole", "torn", "a call", "64.0 KiB", "matmuls slower by"}
    assert rows["64.0 KiB"].figures["gb_per_s"] > 0


def copied(slowdown, rate, platform="gpu"):
    speed = Row("16 MiB", "", figures={"gb_per_s": rate})
    return Outcome(rows=(speed, Row("x", "", figures={"slowdown": slowdown, "platform": platform})))


@pytest.mark.parametrize(
    ("backends", "taken", "holds", "recommended"),
    [
        ({"a": copied(0.01, 50.0), "b": copied(0.0, 30.0)}, "a", True, ["a"]),
        ({"a": copied(0.01, 50.0), "b": copied(0.0, 55.0)}, "a", True, ["b"]),
        ({"a": copied(0.05, 50.0), "b": copied(0.0, 30.0)}, "a", False, ["b"]),
        ({"a": Outcome(error="died"), "b": copied(0.0, 30.0)}, "b", True, ["b"]),
        ({"a": copied(0.8, 50.0, "cpu")}, "a", None, ["a"]),
        ({"a": Outcome(error="died")}, "nothing", False, []),
    ],
)
def test_the_backend_that_runs_take_must_be_gentle(backends, taken, holds, recommended):
    outcomes = {f"into:{name}": outcome for name, outcome in backends.items()}
    first, *second = summary("into", {**outcomes, "out-of:c": copied(0.0, 99.0)})
    assert (first.value, first.holds, [row.value for row in second]) == (taken, holds, recommended)


SIZES = Sizes(width=24, num_heads=3, num_layers=1, sequence_length=10, microbatch_size=2)


def test_the_formula_counts_the_matrix_products_of_each_program():
    model = build_gpt2(SIZES, "bfloat16")
    params = jax.eval_shape(model.init_layer, jax.random.key(0))
    shape = (SIZES.microbatch_size, SIZES.sequence_length, SIZES.width)
    layer = split_backward(model.layer, params, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    flops = model_flops(SIZES)
    assert flops["F"] == product_flops(layer.forward.equations)
    assert flops["B"] == product_flops(layer.backward_input.equations)
    assert flops["W"] == product_flops(layer.backward_weight.equations)
    assert flops["BW"] == product_flops(layer.backward.equations)
    assert flops["plain"] == flops["F"] + flops["BW"]


def test_cudnns_attention_counts_only_what_the_mask_shows():
    whole, seen = model_flops(SIZES), model_flops(SIZES, "cudnn")
    length = SIZES.sequence_length
    hidden = sum(length - position for position in range(1, length + 1))
    left_out = SIZES.microbatch_size * hidden * 2 * 2 * SIZES.width * SIZES.num_layers
    assert {name: whole[name] - seen[name] for name in whole} == {
        "F": left_out, "B": 2 * left_out, "W": 0, "BW": 2 * left_out, "plain": 3 * left_out
    }  # fmt: skip


NAMES = ("['layers']['kernel']", "['layers']['bias']")
FIRST = {name: np.array([0.2, -0.5], np.float32) for name in NAMES}
PLAIN = {"losses": [3.0, 2.5], "norms": [1.0, 0.5], "gradients": [FIRST, FIRST]}


@pytest.mark.parametrize(
    ("changed", "gradient", "holds"),
    [
        ({}, (0.2, -0.5), [True, True, True]),
        ({"losses": [3.0, 2.5001]}, (0.2, -0.5), [False, True, True]),
        ({"norms": [1.0001, 0.5]}, (0.2, -0.5), [True, False, True]),
        ({"norms": [1.0, float("nan")]}, (0.2, -0.5), [True, False, True]),
        ({}, (0.2, -0.5003), [True, True, False]),
        ({}, (0.2, float("nan")), [True, True, False]),
    ],
)
def test_a_difference_in_one_place_does_not_hold(changed, gradient, holds):
    second = {**FIRST, NAMES[1]: np.array(gradient, np.float32)}
    rows = list(compare({**PLAIN, **changed}, [FIRST, second], PLAIN))
    assert [row.holds for row in rows] == holds
    if not holds[-1]:
        assert rows[-1].note.endswith(f"of 4: stage 1, {NAMES[1]}")


def test_gradients_of_another_part_of_the_model_are_refused():
    with pytest.raises(ValueError, match="expected"):
        list(compare(PLAIN, [FIRST, {NAMES[0]: FIRST[NAMES[0]]}], PLAIN))


CHILD = """
import os, sys, threading
from benchmarks.gpu.child import Part, Row, serve

def here():
    threading.Event().wait()

def rows(self, *, small):
    yield Row("first", "1 ms", figures={"ms": 1.0})
    print("last words")
    sys.stdout.flush()
    END

Part.rows = rows
serve(Part("", ""), sys.argv[1:])
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def child(end, limit_s=60.0, show=lambda row: None):
    command = [sys.executable, "-c", CHILD.replace("END", end)]
    return run_part(command, limit_s, ENVIRONMENT, show)


def test_rows_of_a_part_are_shown_as_they_come():
    shown = []
    found = child("yield Row('second', '2 ms', holds=True)", show=shown.append)
    assert [row.name for row in shown] == ["first", "second"]
    assert found.holds
    assert found.log == ""


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("raise RuntimeError('out of\\nmemory')", "RuntimeError: out of memory"),
        ("os._exit(3)", "its process ended with 3: last words"),
        ("os.kill(os.getpid(), 9)", "its process ended with -9: last words"),
    ],
)
def test_a_part_that_fails_keeps_its_rows_and_says_why(end, error):
    found = child(end)
    assert [row.name for row in found.rows] == ["first"]
    assert (found.error, found.holds) == (error, False)
    assert "last words" in found.log


def test_a_part_that_hangs_is_ended_and_says_where():
    found = child("here()", limit_s=1.0)
    assert [row.name for row in found.rows] == ["first"]
    assert found.error.startswith("hung for 1 s: File ")
    assert "in here" in found.error


def test_a_part_ends_with_the_one_that_asked():
    code = CHILD.replace("END", "here()")
    words = [sys.executable, "-c", code, "--limit-s=60", "--rows-fd=1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=-3, env=ENVIRONMENT) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


def test_a_part_that_fails_loses_no_other(tmp_path, capsys):
    path, running = tmp_path / "found.json", []
    outcomes = iter([Outcome(error="died"), Outcome(rows=(Row("figure", "1 ms", holds=True),))])

    def run(command, limit_s, environment, show):
        running.append(json.loads(path.read_text())["running"])
        return next(outcomes)

    found = run_parts(["environment", "stage"], 100.0, path, small=True, run=run)
    assert [outcome.holds for outcome in found.values()] == [False, True]
    assert running == ["environment", "stage"]
    written = json.loads(path.read_text())
    assert (written["running"], written["done"], written["holds"]) == (None, True, False)
    assert written["parts"]["stage"]["rows"][0]["name"] == "figure"
    assert "FAILED: died" in capsys.readouterr().out


def test_no_part_is_begun_without_time_left():
    found = run_parts(["stage"], 1.0, None, small=True)["stage"]
    assert found.error == "not begun, the 1 s are over: run it with --parts stage"


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--parts", "tolled"])
    assert exit_info.value.code == 2
    assert "got tolled, expected some of environment, stage" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_ends_the_check_first(capsys):
    assert main(["--parts", "stage", "--json", "no/such/folder/f.json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "No such file or directory" in captured.err


def run_check(path, *options):
    command = [sys.executable, "-m", "benchmarks.gpu", f"--json={path}", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    return done, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.long
def test_without_a_gpu_it_runs_and_says_so(tmp_path):
    done, found = run_check(tmp_path / "f.json", "--parts=environment,into:pallas,out-of:host")
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("FAILED: environment\n")
    assert found["done"]
    rows = {row["name"]: row for row in found["parts"]["environment"]["rows"]}
    assert (rows["GPU"]["value"], rows["GPU"]["holds"]) == ("no", False)
    assert rows["jax"]["value"] == jax.__version__
    assert found["parts"]["into:pallas"]["rows"][0]["value"] == "absent"
    assert found["parts"]["out-of"]["rows"][0]["value"] == "host"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_part_runs_small_on_a_cpu(tmp_path):
    done, found = run_check(tmp_path / "f.json", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every part ran, every requirement holds\n")
    parts = found["parts"]
    assert set(parts) == {*ONE_GPU, "into", "out-of"}
    for name in (*(f"into:{each}" for each in INTO), *(f"out-of:{each}" for each in OUT_OF)):
        is_gpus = name.endswith((":copy_engine", ":pallas"))
        assert (parts[name]["rows"][0]["value"] == "absent") == is_gpus
    assert {row["name"] for row in parts["stage"]["rows"]} >= {"F", "B", "W", "BW", "(F+BW)/plain"}
    judged = [row["name"] for row in parts["two-stages"]["rows"] if row["holds"]]
    assert judged == ["losses", "norms", "worst gradient"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_direct_link_and_its_failures_are_rehearsed_on_a_cpu(tmp_path):
    parts = "direct-link,no-memory,stopped:ends"
    done, found = run_check(tmp_path / "f.json", "--two-gpus", "--small", f"--parts={parts}")
    assert done.returncode == 0, done.stdout + done.stderr
    judged = {
        part: [row["name"] for row in outcome["rows"] if row["holds"]]
        for part, outcome in found["parts"].items()
    }
    ends = ["the run ended after", "named", "wrong bytes"]
    assert judged == {
        "direct-link": ["losses", "norms", "worst gradient"],
        "no-memory": [*ends, "raised as"],
        "stopped:ends": ends,
    }


BEGINS = {"kind": "begins", "number": 7, "message_bytes": 4, "time_s": 100.0}


@pytest.mark.parametrize(
    ("messages", "reason", "ended_s", "failed"),
    [
        ([BEGINS], "rank 1 failed: stalled", 112.9, []),
        ([BEGINS], "rank 1 failed: stalled", 113.1, ["the run ended after"]),
        ([BEGINS], "rank 0 failed: stalled", 101.0, ["named"]),
        ([BEGINS, {"kind": "wrong", "number": 7}], "rank 1 failed: x", 101.0, ["wrong bytes"]),
        ([], "rank 0 failed: no GPU", 101.0, ["transfers before"]),
    ],
)
def test_a_run_must_end_in_time_by_name_without_wrong_bytes(messages, reason, ended_s, failed):
    rows = two_gpus.Ended(messages, reason, ended_s, has_stacks=True).rows(step_s=3.0)
    assert [row.name for row in rows if row.holds is False] == failed


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: ["the only one"])
    (row,) = two_gpus.check_no_memory(small=True)
    assert (row.value, row.holds) == ("1", False)


def test_the_check_needs_jax_flax_optax_and_numpy_alone():
    own = {"jaxmorph", "benchmarks"}
    waiting = {f"benchmarks.gpu.{path.stem}" for path in (ROOT / "benchmarks/gpu").glob("*.py")}
    waiting.add("jaxmorph.models.gpt2.model")  # imported once a model is built
    seen, foreign = set(), {}
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name in imported_by(module):
            top = name.partition(".")[0]
            if top in own:
                waiting |= {name} - seen
            elif top not in sys.stdlib_module_names:
                foreign.setdefault(top, set()).add(module)
    assert "jaxmorph.runtime.executor" in seen
    assert foreign.keys() <= {"jax", "numpy", "flax", "optax"}, foreign


def imported_by(module):
    """The modules that a module's imports name, with their packages; not those in functions."""
    path = ROOT.joinpath(*module.split("."))
    source = next(filter(Path.is_file, (path / "__init__.py", path.with_suffix(".py"))), None)
    body = ast.parse(source.read_text(encoding="utf-8")).body if source else ()
    names = _named_in(body, source or path)
    return {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
