"""A network card dies in mid-step: `python -m benchmarks.nic_failure [--json FILE]`.

Trains configs/pace4.yaml twice, undisturbed and with the direct paths of stage 2's links, 1-2 and
2-3, cut for good after some seconds (`--links 1-2`: of one link alone). The second must take every
step, with the first's losses and gradient norms bit by bit, and lose no more time in the step of
the failure than the deadline of a direct transfer and a tenth. Wants an otherwise idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from jaxmorph.records import StepRecord
from jaxmorph.report.run_directory import METRICS, read_records

ROOT = Path(__file__).parent.parent
CONFIG = "configs/pace4.yaml"
LINKS = ("1-2", "2-3")
BAR = 1.1
Steps = list[StepRecord]


@dataclass(frozen=True)
class Result:
    """What the failure cost.

    Attributes:
        steps: How many were taken, of how many.
        differing: Those whose loss or gradient norm isn't that of the undisturbed run.
        failed_step: The one in which the path failed, which is the longest one.
        before_ms: The median step before it.
        extra_s: How much longer it took.
        over_deadline: That, as a share of the deadline of a direct transfer.
        after_ms: The median step after it, with the link delegated at the same places.
    """

    steps: tuple[int, int]
    differing: int
    failed_step: int
    before_ms: float
    extra_s: float
    over_deadline: float
    after_ms: float

    @property
    def passes(self) -> bool:
        """Whether the step of the failure is in bounds, and nothing was lost; and one failed."""
        all_there = self.steps[0] == self.steps[1] and not self.differing
        return all_there and 0.5 <= self.over_deadline <= BAR


def train(folder: Path, *overrides: str) -> Steps:
    """The steps of a run."""
    command = [sys.executable, "-m", "jaxmorph", "train", CONFIG, f"run.dir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_records(folder / METRICS, StepRecord)


def measure(folder: Path, steps: int, at_s: float, direct_s: float, links: Sequence[str]) -> Result:
    """Both runs, one after the other."""
    trace = folder / "trace.csv"
    rows = [f"{at_s},{link},1,direct" for link in links]
    trace.write_text("\n".join(["time_s,links,cut,route", *rows, ""]))
    common = [f"run.steps={steps}", "failover.enabled=true", f"timeouts.direct_s={direct_s}"]
    healthy = train(folder / "healthy", *common)
    failing = train(folder / "failing", *common, f"emulation.trace={trace}")
    return compare(healthy, failing, direct_s)


def compare(healthy: Steps, failing: Steps, direct_s: float) -> Result:
    """What the second run lost against the first."""
    pairs = zip(healthy, failing, strict=False)
    differing = sum((a.loss, a.grad_norm) != (b.loss, b.grad_norm) for a, b in pairs)
    took_s = [step.step_s for step in failing]
    at = max(range(1, len(took_s) - 1), key=took_s.__getitem__)
    before_s, after_s = median(took_s[1:at] or took_s[:1]), median(took_s[at + 1 :])
    extra_s = took_s[at] - before_s
    return Result(
        (len(failing), len(healthy)),
        differing,
        at,
        1e3 * before_s,
        extra_s,
        extra_s / direct_s,
        1e3 * after_s,
    )


def main() -> int:
    """Print the result; 1 if a bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--at-s", type=float, default=15.15)
    parser.add_argument("--direct-s", type=float, default=2.0)
    parser.add_argument("--links", nargs="+", default=LINKS, help="whose direct paths are cut")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            Path(folder), arguments.steps, arguments.at_s, arguments.direct_s, arguments.links
        )
    verdict = "" if result.passes else "  MISSED"
    print(
        f"steps {result.steps[0]} of {result.steps[1]}, {result.differing} of them differ\n"
        f"step {result.failed_step}: {result.extra_s:.3f} s longer than {result.before_ms:.1f} ms, "
        f"{result.over_deadline:.3f} of the deadline (<= {BAR}){verdict}\n"
        f"afterwards {result.after_ms:.1f} ms; load before {load:.2f}"
    )
    if arguments.json:
        values = asdict(result) | {"links": arguments.links, "load_before": load}
        arguments.json.write_text(json.dumps(values, indent=1))
    return 0 if result.passes else 1


if __name__ == "__main__":
    sys.exit(main())
