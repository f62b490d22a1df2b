"""How well the blocking link model predicts direct runs: `python -m benchmarks.blocking`.

Runs configs/uneven4.yaml, whose stages differ so that both ends of transfers wait for each other,
under several schedules, and holds the median step against the step simulated with the run's own
measured costs. Wants an otherwise idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from jaxmorph.measured_run import read_run
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.schedule.builders import FIXED_SCHEDULES
from jaxmorph.schedule.simulator import simulate
from jaxmorph.step_programs import lower_step

ROOT = Path(__file__).parent.parent
CONFIG = "configs/uneven4.yaml"
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
FIRST_STEPS = 5  # left out: caches are still cold
BAR = 0.05


@dataclass(frozen=True)
class Result:
    """One schedule's median step and what two link models make of its measured costs."""

    schedule: str
    step_ms: float
    blocking_ms: float
    latency_ms: float
    load_average: float

    @property
    def off(self) -> float:
        """How far the measured step is from the blocking model's."""
        return self.step_ms / self.blocking_ms - 1


def run(schedule: str) -> Result:
    """Train under a schedule in a directory that is thrown away, and simulate what it measured."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "jaxmorph", "train", CONFIG]
        settings = [f"schedule.name={schedule}", f"run.dir={out}"]
        subprocess.run([*command, *settings], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (out / "metrics.jsonl").read_text().splitlines()[FIRST_STEPS:]
        measured = read_run(out)
    step_ms = 1e3 * median(json.loads(line)["step_s"] for line in lines)
    profile, batch = measured.profile, measured.config.batch
    order = FIXED_SCHEDULES[schedule](profile.costs.num_stages, batch.microbatches)
    programs = lower_step(order, profile)
    return Result(
        schedule,
        step_ms,
        simulate_blocking(programs, profile.costs, profile.links).makespan_ms,
        simulate(order, profile.costs, profile.links).makespan_ms,
        load_average,
    )


def main() -> int:
    """Print a row per schedule; 1 if a prediction is too far off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("schedule   step ms  blocking model ms     off (bar)  latency model ms  load before")
    results = []
    for schedule in SCHEDULES:
        result = run(schedule)
        results.append(result)
        print(
            f"{result.schedule:8}{result.step_ms:10.1f}{result.blocking_ms:19.1f}"
            f"{result.off:+10.1%} ({BAR:.0%}){result.latency_ms:18.1f}"
            f"{result.load_average:13.2f}{'' if abs(result.off) <= BAR else '  MISSED'}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0 if all(abs(result.off) <= BAR for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
