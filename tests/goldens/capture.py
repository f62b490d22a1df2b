"""Captures what a tree of jaxmorph does, through its command line and the files that runs write."""

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.leftovers import children
from tests.goldens.cases import BASE, LINK_MS, LOWERED, RUNS, SCHEDULES, STAGES, Run

HERE = Path(__file__).parent
KILLED_AFTER_STEP = 2
LIMIT_S = 300
# Three times as quick to compile; programs themselves are optimised as ever.
_QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
Record = dict[str, Any]


def plans(tree: Path) -> Iterator[Record]:
    """The answers to problems.jsonl; of one to a bad line, the field that it blames."""
    for answer in _answers(tree, (HERE / "problems.jsonl").read_text(), code=2):
        answer.pop("planning_ms", None)
        if "error" in answer:
            answer["error"] = answer["error"].partition(":")[0]
        yield answer


def programs(tree: Path) -> Iterator[Record]:
    """Every schedule, lowered in every way."""
    sizes = {"num_stages": 3, "num_microbatches": 6, "link_ms": LINK_MS}
    times = {"forward_ms": 10, "backward_input_ms": 12, "backward_weight_ms": 8}
    problems = [{"name": name, "schedule": name, **sizes, **times} for name in SCHEDULES]
    answers = _answers(tree, "\n".join(map(json.dumps, problems)))
    cases = [
        {"name": f"{answer['name']}, {how}", "orders": answer["orders"], **options}
        for answer in answers
        for how, options in LOWERED.items()
    ]
    found = _run(tree, [str(HERE / "lowered.py"), "programs"], text=json.dumps(cases)).stdout
    for case, ranks in zip(cases, json.loads(found), strict=True):
        yield {"name": case["name"], "ranks": ranks}


def stages(tree: Path) -> list[Record]:
    """The traced programs of stages: the same on every machine, and with JAX 0.10.2 to 0.12."""
    found = _run(tree, [str(HERE / "lowered.py"), "stages"], text=json.dumps(STAGES)).stdout
    return json.loads(found)


def runs(tree: Path) -> Iterator[Record]:
    """What short runs computed, and on what: losses and digests are the same only there."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else platform.processor()
    features = [line for line in cpu.splitlines() if line.startswith(("flags", "model name"))][:2]
    yield {
        "name": "environment",
        **{package: version(package) for package in ("jax", "jaxlib", "numpy", "optax")},
        "cpu": hashlib.sha256("\n".join(features).encode()).hexdigest()[:16],
    }
    for run in RUNS:
        print(f"  {run.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            yield _run_record(tree, run, Path(folder))


def _run_record(tree: Path, run: Run, folder: Path) -> Record:
    out, config = folder / "out", folder / "run.yaml"
    (folder / "text").write_text(" ".join(str(number**2) for number in range(10_000)))
    data = {"path": str(folder / "text"), "sequence_length": 8}
    config.write_text(json.dumps({**BASE, "data": data}))  # which is YAML too
    _train(tree, run, ["train", str(config), f"run.dir={out}", *run.overrides], out)
    steps, events = _lines(out / "metrics.jsonl"), _lines(out / "events.jsonl")
    compared = ["step", "loss", "grad_norm", "held_out_loss", "skipped"]
    compared += ["schedule", "warmup_forwards", "routes", "peak_live"] if run.planned else []
    compiled = steps[-1]["compilations"] > steps[0]["compilations"]
    return {
        "name": run.name,
        "steps": [{key: step[key] for key in compared if key in step} for step in steps],
        "compiled_later": None if run.fails else compiled,
        "step_fields": sorted({key for step in steps for key in step}),
        "events": _events(events, run.kinds),
        "event_fields": sorted({key for event in events for key in event}),
        "files": sorted(path.name for path in out.iterdir() if path.name != "links.json"),
        "parameters": _parameters(tree, out, folder / "exported") if run.exported else None,
    }


def _events(events: list[Record], kinds: tuple[str, ...] | None) -> Record:
    """By link the kinds of its events, in order; where only some are asked for, which occurred."""
    if kinds is not None:
        events = [event for event in events if event["kind"] in kinds]
    by_link: dict[str, list[str]] = {}
    for event in events:
        by_link.setdefault(event["link"] or "no link", []).append(event["kind"])
    if kinds is None:
        return by_link
    return {link: sorted(set(seen)) for link, seen in by_link.items()}


def _train(tree: Path, run: Run, words: list[str], out: Path) -> None:
    if not run.is_killed:
        _run(tree, ["-m", "jaxmorph", *words])
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxmorph", *words], cwd=tree, env=_environment(tree),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until_s = time.monotonic() + LIMIT_S
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= KILLED_AFTER_STEP:
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"{run.name}: no step to kill a rank after: {process.communicate()}")
        time.sleep(0.01)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise SystemExit(f"{run.name}: exit code {process.returncode}\n{stderr}")


def _parameters(tree: Path, run_dir: Path, exported: Path) -> str:
    """A digest of the parameters after the last step."""
    _run(tree, ["-m", "jaxmorph", "export", str(run_dir), "--to", str(exported)])
    digest = hashlib.sha256()
    for name, array in sorted(load_file(exported / "model.safetensors").items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _answers(tree: Path, problems: str, code: int = 0) -> list[Record]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as batch:
        batch.write(problems)
        batch.flush()
        done = _run(tree, ["-m", "jaxmorph", "plan", "--batch", batch.name], code=code)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _run(tree: Path, words: list[str], text: str = "", code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=_environment(tree), input=text,
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != code:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done


def _environment(tree: Path) -> dict[str, str]:
    """The tree before what is installed, in this process's environment otherwise."""
    return {**os.environ, **_QUICK, "PYTHONPATH": str(tree)}
