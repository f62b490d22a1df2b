"""Speed of this tree beside that of a commit: `python -m benchmarks.old_and_new COMMIT`.

Both take turns, old new new old ..., each in processes of its own and in the same environment, so
that what slows the machine down for a while slows down both. Per case it prints the medians and the
median of the ratios new/old of the pairs, with a 95 % interval. Ten pairs of all cases take half an
hour and want an idle machine: with other load it refuses, unless `--busy` is given.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import ROOT, provenance, write_json
from jaxmorph.compare.provenance import load_averages

FIRST_STEPS = 4  # left out: caches are still cold
IDLE_LOAD = 0.5
PLANS = 7  # of each problem, of which the quickest counts
Run = Callable[[Path, Path], float]


def trained(config: str, *overrides: str) -> Run:
    """A run, of which the median step counts, in milliseconds."""

    def run(tree: Path, folder: Path) -> float:
        out = folder / "run"
        _call(tree, "jaxmorph", "train", str(ROOT / config), f"run.dir={out}", *overrides)
        lines = (out / "metrics.jsonl").read_text().splitlines()[FIRST_STEPS:]
        return 1e3 * median(json.loads(line)["step_s"] for line in lines)

    return run


def dispatched(tree: Path, folder: Path) -> float:
    """Microseconds per instruction of a step that computes next to nothing."""
    figures = folder / "figures.json"
    _call(tree, "benchmarks.dispatch", "--json", str(figures))
    found = json.loads(figures.read_text())
    return next(value for name, value in found.items() if "per instruction" in name)


def planned(tree: Path, folder: Path) -> float:
    """Milliseconds to plan a fixed batch, in one process."""
    problems = [
        {
            "name": f"{schedule} {stages} {microbatches} {links}", "schedule": schedule,
            "num_stages": stages, "num_microbatches": microbatches,
            "forward_ms": 10, "backward_input_ms": 11, "backward_weight_ms": 9,
            "link_ms": [links * (link % 3) for link in range(stages - 1)],
        }
        for schedule in ("adaptive", "paper", "initial")
        for stages, microbatches in ((4, 12), (8, 32), (16, 64), (32, 128))
        for links in (0, 15)
    ]  # fmt: skip
    batch = folder / "problems.jsonl"
    batch.write_text("".join(json.dumps(problem) + "\n" for problem in problems) * PLANS)
    fastest: dict[str, float] = {}
    for line in _call(tree, "jaxmorph", "plan", "--batch", str(batch)).splitlines():
        answer = json.loads(line)
        fastest[answer["name"]] = min(fastest.get(answer["name"], math.inf), answer["planning_ms"])
    return sum(fastest.values())


_PACE, _HOL = "configs/pace4.yaml", "configs/hol.yaml"
_SLOW = "emulation.links=[{between: [2, 3], latency_ms: 30}]"
_ADAPTIVE = "schedule={name: adaptive, link_ms: {2-3: 30}}"  # what `compare` gives that system
CASES: dict[str, tuple[str, Run]] = {
    "pace4": ("ms a step", trained(_PACE, "run.steps=20")),
    "hol": (
        "ms a step",
        trained(
            *(_HOL, "run.steps=18", "compare=null", _SLOW, _ADAPTIVE, "routes.2-3=delegated"),
            "adaptation.enabled=false",
        ),
    ),
    "unpaced": (
        "ms a step",
        trained(_PACE, "run.steps=60", "parallelism.stages=2", "emulation.accelerator=null"),
    ),
    "dispatch": ("us an instruction", dispatched),
    "planner": ("ms a batch", planned),
}


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary working tree of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by order statistics; the range of under six values."""
    ordered, num = sorted(values), len(values)
    left_out, chance = 0, 2.0 ** (1 - num)  # that the median lies outside of all values
    while chance <= 0.05 and left_out < num // 2:
        left_out += 1
        chance += 2.0 ** (1 - num) * math.comb(num, left_out)
    outer = max(0, left_out - 1)
    return ordered[outer], ordered[num - 1 - outer]


def measure(run: Run, trees: tuple[Path, Path], pairs: int) -> dict[str, Any]:
    """What both trees take, pair by pair, and how they compare."""
    taken: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            with tempfile.TemporaryDirectory() as folder:
                taken[which].append(run(trees[which], Path(folder)))
    ratios = [new / old for old, new in zip(*taken, strict=True)]
    return {
        "old": taken[0],
        "new": taken[1],
        "ratio": median(ratios),
        "interval_95": median_interval(ratios),
    }


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Under which conditions it is measured."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        **provenance("benchmarks.old_and_new"),
        "old": _git("rev-parse", options.commit),
        "new": _git("rev-parse", "HEAD") + (" and changes" if _git("status", "--short") else ""),
        "machine": f"{platform.platform()}, {os.cpu_count()} x {cpus[0].partition(': ')[2]}",
        "configs": {
            path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in (_PACE, _HOL)
        },
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def _call(tree: Path, module: str, *words: str) -> str:
    """What a module of a tree prints, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=tree, env=environment, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(words)} in {tree}: {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.old_and_new")
    parser.add_argument("commit", metavar="COMMIT")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", choices=CASES, action="append", help="may be given several times")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--busy", action="store_true", help="measure beside other load all the same"
    )
    options = parser.parse_args()
    result = record(options)
    if result["load_before"][0] > IDLE_LOAD and not options.busy:
        load = result["load_before"][0]
        parser.error(f"got a load average of {load:.2f}, expected at most {IDLE_LOAD}, or --busy")
    print(f"load average before: {result['load_before'][0]:.2f}")
    print("case          old      new  new/old  95 % interval", flush=True)
    result["cases"] = {}
    with checked_out(options.commit) as old:
        for name in options.only or CASES:
            unit, run = CASES[name]
            case = measure(run, (old, ROOT), options.pairs)
            result["cases"][name] = {"unit": unit, **case}
            least, most = case["interval_95"]
            print(
                f"{name:9}{median(case['old']):8.2f} {median(case['new']):8.2f}"
                f"{case['ratio']:9.3f}  {least:.3f} to {most:.3f}  {unit}",
                flush=True,
            )
            result["load_after"] = load_averages()
            if options.json:
                write_json(options.json, result)
    print(f"load average after: {load_averages()[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
