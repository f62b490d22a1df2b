"""Whether long runs stay small: `python -m benchmarks.long_run [--steps N] [--json FILE]`.

Trains a tiny model for 500 steps, once on direct links and once on delegated ones, with held-out
losses on the way, and reads `metrics.jsonl` while it is written. Holds the memory of every process
(the launcher, each rank, each sidecar) in the last fifth of the run against that after its first
fifth, and says what the run left on disk. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.leftovers import children, resident_bytes
from benchmarks.results import ROOT, provenance, write_json
from jaxmorph.compare.provenance import load_averages
from jaxmorph.records import StepRecord
from jaxmorph.report.run_directory import METRICS, read_records

BAR_BYTES_PER_STEP = 4096
_MIB = 2**20
_POLL_S = 0.05
_CONFIG = {
    "model": {"preset": "tiny", "width": 32, "num_layers": 4, "num_heads": 2},
    "data": {"sequence_length": 16, "held_out_fraction": 0.01},
    "parallelism": {"stages": 2},
    "batch": {"microbatches": 4, "microbatch_size": 1},
    "evaluation": {"every_steps": 50},
    "adaptation": {"enabled": False},
}


@dataclass(frozen=True)
class Memory:
    """One process's resident memory, bytes: medians of a fifth of the run's steps each."""

    process: str
    early_bytes: int
    late_bytes: int
    bytes_per_step: float

    @property
    def passes(self) -> bool:
        """Whether it is flat."""
        return self.bytes_per_step <= BAR_BYTES_PER_STEP


@dataclass(frozen=True)
class Result:
    """What one run showed."""

    route: str
    steps: int
    step_ms: float
    memory: list[Memory]
    reads_while_written: int
    disk_bytes: dict[str, int]
    load_average: float


def run(route: str, steps: int) -> Result:
    """Train, and look on."""
    load_average = load_averages()[0]
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder) / "long.yaml", Path(folder) / "run"
        config.write_text(json.dumps(_CONFIG))  # which is YAML too
        command = [sys.executable, "-m", "jaxmorph", "train", str(config), f"run.dir={out}"]
        command += [f"run.steps={steps}", f"routes.default={route}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        seen = list(_samples(process, out / METRICS))
        if process.returncode != 0:
            raise SystemExit(f"the run failed: exit code {process.returncode}")
        records = read_records(out / METRICS, StepRecord)
        if [record.step for record in records] != list(range(steps)):
            raise SystemExit(f"{METRICS}: got {len(records)} lines, expected {steps} steps")
        return Result(
            route=route,
            steps=steps,
            step_ms=1e3 * median(record.step_s for record in records),
            memory=_memory(seen, steps),
            reads_while_written=len(seen),
            disk_bytes=_disk_bytes(out),
            load_average=load_average,
        )


Sample = tuple[int, dict[str, int]]
"""How many steps were written, and the resident bytes of each process."""


def _samples(process: subprocess.Popen, metrics: Path) -> Iterator[Sample]:
    names: dict[int, str] = {}
    while process.poll() is None:
        if records := read_records(metrics, StepRecord):
            names = names or _processes(process.pid)
            resident = {name: resident_bytes(pid) for pid, name in names.items()}
            if all(resident.values()):  # else the first has ended
                yield records[-1].step + 1, resident
        time.sleep(_POLL_S)


def _processes(launcher: int) -> dict[int, str]:
    names = {launcher: "launcher"}
    for rank, pid in enumerate(children(launcher)):
        names[pid] = f"rank {rank}"
        names |= dict.fromkeys(children(pid), f"sidecar {rank}")
    return names


def _memory(seen: list[Sample], steps: int) -> list[Memory]:
    fifth = steps // 5
    early = [resident for at, resident in seen if fifth <= at < 2 * fifth]
    late = [resident for at, resident in seen if at >= steps - fifth]
    if not early or not late:
        raise SystemExit(f"got {len(seen)} samples of memory, expected some of each fifth")
    found = []
    for process in early[0]:
        before = int(median(resident[process] for resident in early))
        after = int(median(resident[process] for resident in late))
        found.append(Memory(process, before, after, (after - before) / (3 * fifth)))
    return found


def _disk_bytes(out: Path) -> dict[str, int]:
    """What lies in the run directory, by file, and by folder."""
    return {
        path.name: sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
        for path in sorted(out.iterdir())
    }


def main() -> int:
    """Print a row per process; 1 if the memory of any grows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    values = provenance("benchmarks.long_run")
    results = [run(route, arguments.steps) for route in ("direct", "delegated")]
    for result in results:
        _print(result)
    if arguments.json:
        write_json(arguments.json, values | {"runs": [asdict(result) for result in results]})
    return 0 if all(memory.passes for result in results for memory in result.memory) else 1


def _print(result: Result) -> None:
    print(
        f"{result.route}: {result.steps} steps of {result.step_ms:.1f} ms, metrics.jsonl read "
        f"{result.reads_while_written} times meanwhile; load before {result.load_average:.2f}"
    )
    print(f"process      MiB early    MiB late  bytes/step (bar {BAR_BYTES_PER_STEP})")
    for memory in result.memory:
        verdict = "" if memory.passes else "  MISSED"
        print(
            f"{memory.process:10}{memory.early_bytes / _MIB:12.1f}{memory.late_bytes / _MIB:12.1f}"
            f"{memory.bytes_per_step:12.0f}{verdict}"
        )
    sizes = (f"{name} {size / 1024:.0f}" for name, size in result.disk_bytes.items())
    print(f"on disk, KiB: {', '.join(sizes)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
