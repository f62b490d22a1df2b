"""How long a run takes to its first step: `python -m benchmarks.start_up`.

Trains the demo twice in turns, with nothing compiled and with what the first start has kept,
and compares the second start with the floor: as many processes as there are ranks that do nothing
but import JAX. Wants an otherwise idle machine. `--json FILE` writes the figures; exit code 1 when
the bar is missed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.results import ROOT, Bar, finish, provenance
from jaxmorph.config import load_config
from jaxmorph.report.run_directory import METRICS

ROUNDS = 3
_CONFIG = "configs/demo.yaml"
_POLL_S = 0.01
_LIMIT_S = 300.0
_IMPORTS = "import jax; jax.devices()"


@dataclass(frozen=True)
class Round:
    """Seconds from the launch on.

    Attributes:
        floor_s: Until the last of the processes has imported JAX.
        first_s: Until the end of the first step, where nothing was compiled before.
        second_s: The same, with what the first start has kept.
    """

    floor_s: float
    first_s: float
    second_s: float


def measured_round(num_ranks: int) -> Round:
    """The floor and both starts, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        first_s, second_s = (_first_step_s(Path(folder), name) for name in ("first", "second"))
        return Round(_floor_s(num_ranks), first_s, second_s)


def _floor_s(num_processes: int) -> float:
    began_s = time.monotonic()
    command = [sys.executable, "-c", _IMPORTS]
    started = [subprocess.Popen(command) for _ in range(num_processes)]
    if any(process.wait() for process in started):
        raise RuntimeError("a process that imports JAX failed")
    return time.monotonic() - began_s


def _first_step_s(folder: Path, name: str) -> float:
    """Start a run of one step; returns when its record was written."""
    command = [sys.executable, "-m", "jaxmorph", "train", _CONFIG]
    command += ["run.steps=1", f"run.dir={folder / name}"]
    environment = os.environ | {"JAXMORPH_CACHE_DIR": str(folder / "cache")}
    began_s, metrics = time.monotonic(), folder / name / METRICS
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while not (metrics.exists() and metrics.stat().st_size):
        if run.poll() is not None or time.monotonic() - began_s > _LIMIT_S:
            run.kill()
            raise RuntimeError(f"{' '.join(command)} took no step")
        time.sleep(_POLL_S)
    took_s = time.monotonic() - began_s
    if run.wait() != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    return took_s


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, rounds = provenance("benchmarks.start_up"), []
    num_ranks = load_config(ROOT / _CONFIG).parallelism.num_ranks
    for number in range(ROUNDS):
        rounds.append(found := measured_round(num_ranks))
        print(
            f"round {number + 1}: first step after {found.first_s:.1f} s, with what is kept after "
            f"{found.second_s:.1f} s; {num_ranks} processes import JAX in {found.floor_s:.1f} s",
            flush=True,
        )
    ratio = median(each.second_s / each.floor_s for each in rounds)
    bars = [Bar(f"{_CONFIG}: second start over importing JAX", ratio, at_most=1.5)]
    values = {"provenance": began, "rounds": [asdict(each) for each in rounds]}
    return finish(bars, options.json, values)


if __name__ == "__main__":
    sys.exit(main())
