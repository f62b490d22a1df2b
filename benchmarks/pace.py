"""How close paced steps come to their plan: `python -m benchmarks.pace [--json FILE]`.

Runs configs/pace4.yaml and configs/pace8.yaml and holds the median step against what the profiled
costs predicted and against the nominal step of the schedule. Wants an otherwise idle machine.
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

from jaxmorph.records import StepRecord
from jaxmorph.report.run_directory import METRICS, read_records

ROOT = Path(__file__).parent.parent
FIRST_STEPS = 5  # left out: caches are still cold


@dataclass(frozen=True)
class Case:
    """A configuration, its nominal step and how far off it may be."""

    config: str
    nominal_ms: float
    predicted_bar: float
    nominal_bar: float


@dataclass(frozen=True)
class Result:
    """Medians over the steps of one run."""

    config: str
    step_ms: float
    predicted_ms: float
    over_predicted: float
    predicted_bar: float
    over_nominal: float
    nominal_bar: float
    load_average: float

    @property
    def passes(self) -> bool:
        """Whether both bars are kept."""
        return (
            abs(self.over_predicted) <= self.predicted_bar
            and abs(self.over_nominal) <= self.nominal_bar
        )


CASES = (Case("pace4", 390.0, 0.03, 0.05), Case("pace8", 790.0, 0.04, 0.12))


def run(case: Case, *overrides: str) -> Result:
    """Train the configuration in a directory that is thrown away, and take the medians."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "jaxmorph", "train", f"configs/{case.config}.yaml"]
        command += [f"run.dir={out}", *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        steps = read_records(out / METRICS, StepRecord)[FIRST_STEPS:]
    step_ms = 1e3 * median(step.step_s for step in steps)
    predicted_s = [step.predicted_step_s for step in steps if step.predicted_step_s is not None]
    predicted_ms = 1e3 * median(predicted_s)
    return Result(
        case.config,
        step_ms,
        predicted_ms,
        step_ms / predicted_ms - 1,
        case.predicted_bar,
        step_ms / case.nominal_ms - 1,
        case.nominal_bar,
        load_average,
    )


def main() -> int:
    """Print a row per case; 1 if a bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("config   step ms  predicted ms  over it (bar)    over nominal (bar)  load before")
    results = []
    for case in CASES:
        result = run(case)
        results.append(result)
        verdict = "" if result.passes else "  MISSED"
        print(
            f"{result.config:8}{result.step_ms:8.1f}{result.predicted_ms:14.1f}"
            f"{result.over_predicted:9.1%} ({result.predicted_bar:.0%})"
            f"{result.over_nominal:13.1%} ({result.nominal_bar:.0%})"
            f"{result.load_average:15.2f}{verdict}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0 if all(result.passes for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
