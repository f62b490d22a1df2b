"""How well the blocking link model predicts direct runs: `python -m benchmarks.blocking`.

Runs configs/uneven4.yaml, whose stages differ so that both ends of transfers wait for each other,
under several schedules, with healthy links and with an emulated latency on the last one, and
configs/pace4.yaml, whose stages are alike, with that latency. Holds the median step against the
step simulated with the run's own measured costs, and the emulated link's latency as it was
configured. Wants an otherwise idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from jaxmorph.cli.measured_run import read_run
from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.records import Link, StepRecord
from jaxmorph.report.run_directory import METRICS, read_records
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.simulate import simulate

ROOT = Path(__file__).parent.parent
UNEVEN, EVEN = "configs/uneven4.yaml", "configs/pace4.yaml"
SLOW_MS = 30.0  # on link 2-3, both directions
FIRST_STEPS = 5  # left out: caches are still cold
BAR = 0.05


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        config: The configuration file.
        schedule: The schedule's name.
        slow_ms: Latency that is emulated on link 2-3, both directions.
    """

    config: str
    schedule: str
    slow_ms: float = 0.0

    def settings(self) -> list[str]:
        """The overrides that make the configuration this case."""
        links = f"[{{between: [2, 3], latency_ms: {self.slow_ms}}}]" if self.slow_ms else "[]"
        return [f"schedule.name={self.schedule}", f"emulation.links={links}"]


CASES = (
    *(Case(UNEVEN, schedule) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(Case(UNEVEN, schedule, SLOW_MS) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(Case(EVEN, schedule, SLOW_MS) for schedule in ("1f1b", "zb-h2")),
)


@dataclass(frozen=True)
class Result:
    """One case's median step and what two link models make of its measured costs."""

    case: Case
    step_ms: float
    blocking_ms: float
    latency_ms: float
    load_average: float

    @property
    def off(self) -> float:
        """How far the measured step is from the blocking model's."""
        return self.step_ms / self.blocking_ms - 1


def run(case: Case) -> Result:
    """Train in a directory that is thrown away, and simulate what was measured."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "jaxmorph", "train", case.config]
        settings = [*case.settings(), f"run.dir={out}"]
        subprocess.run([*command, *settings], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        steps = read_records(out / METRICS, StepRecord)[FIRST_STEPS:]
        measured = read_run(out)
    step_ms = 1e3 * median(step.step_s for step in steps)
    profile, batch = _as_configured(measured.profile, measured.config), measured.config.batch
    order = FIXED_SCHEDULES[case.schedule](profile.costs.num_stages, batch.microbatches)
    programs = lower_step(order, profile)
    return Result(
        case,
        step_ms,
        simulate_blocking(programs, profile.costs, profile.links).makespan_ms,
        simulate(order, profile.costs, profile.links).makespan_ms,
        load_average,
    )


def _as_configured(profile: Profile, config: Config) -> Profile:
    """The profile with emulated links' latencies as they were configured, not as measured."""
    configured = {
        Link(*link.between): LinkDelay(link.latency_ms, link.latency_ms)
        for link in config.emulation.links
    }
    return replace(profile, links={**profile.links, **configured})


def main() -> int:
    """Print a row per case; 1 if a prediction is too far off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(
        "config   schedule  link 2-3 ms   step ms  blocking model ms     off (bar)  "
        "latency model ms  load before"
    )
    results = []
    for case in CASES:
        result = run(case)
        results.append(result)
        print(
            f"{Path(case.config).stem:9}{case.schedule:8}{case.slow_ms:13.0f}"
            f"{result.step_ms:10.1f}{result.blocking_ms:19.1f}"
            f"{result.off:+10.1%} ({BAR:.0%}){result.latency_ms:18.1f}"
            f"{result.load_average:13.2f}{'' if abs(result.off) <= BAR else '  MISSED'}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0 if all(abs(result.off) <= BAR for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
