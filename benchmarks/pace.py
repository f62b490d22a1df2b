"""How close emulated runs come to their predictions: `python -m benchmarks.pace [QUESTION ...]`.

`paced` trains configs/pace4.yaml and configs/pace8.yaml, and compares the median step with what the
measured costs predict and with the schedule's nominal step. `delegated` trains configs/pace8.yaml
with all links direct and with all delegated, in turns: what delegating healthy links costs.
`blocking` compares direct runs of several schedules with the blocking link model: of
configs/uneven4.yaml, whose stages differ so that both ends of transfers wait for each other, with
healthy links and with a slow last one, and of configs/pace4.yaml, whose stages are alike. All of
them want an otherwise idle machine.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.results import ROOT, Bar, finish, provenance
from jaxmorph.cli.measured_run import read_run
from jaxmorph.compare.provenance import load_averages
from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.records import Link, StepRecord
from jaxmorph.report.run_directory import METRICS, read_records
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.schedule.fixed import FIXED_SCHEDULES

FIRST_STEPS = 5  # left out: caches are still cold
ROUNDS = 3
SLOW_MS = 30.0  # on link 2-3, both directions
PACED = (("pace4", 390.0, 0.03, 0.05), ("pace8", 790.0, 0.04, 0.12))
"""Configuration, nominal step, how far off the prediction and the nominal step it may be."""
BLOCKING = (
    *(("uneven4", schedule, 0.0) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(("uneven4", schedule, SLOW_MS) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(("pace4", schedule, SLOW_MS) for schedule in ("1f1b", "zb-h2")),
)
"""Configuration, schedule and emulated latency of the last link."""


def train(out: Path, config: str, *overrides: str) -> tuple[float, float]:
    """Train in a directory; the median step and the median prediction, in milliseconds."""
    load = load_averages()[0]
    command = [sys.executable, "-m", "jaxmorph", "train", f"configs/{config}.yaml"]
    command += [f"run.dir={out}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    steps = read_records(out / METRICS, StepRecord)[FIRST_STEPS:]
    step_ms = 1e3 * median(step.step_s for step in steps)
    predicted_s = [step.predicted_step_s for step in steps if step.predicted_step_s is not None]
    predicted_ms = 1e3 * median(predicted_s)
    words = " ".join([config, *overrides])
    print(f"{words}: {step_ms:.1f} ms, {predicted_ms:.1f} predicted; load before {load:.2f}")
    return step_ms, predicted_ms


def paced(folder: Path) -> Iterator[Bar]:
    """Whether paced steps take what is predicted."""
    for config, nominal_ms, off_predicted, off_nominal in PACED:
        step_ms, predicted_ms = train(folder / config, config)
        yield _close(f"{config}: step over predicted", step_ms / predicted_ms, off_predicted)
        yield _close(f"{config}: step over nominal", step_ms / nominal_ms, off_nominal)


def delegated(folder: Path) -> Iterator[Bar]:
    """What it costs to delegate all links while they are healthy."""
    steps_ms: dict[str, list[float]] = {"direct": [], "delegated": []}
    for number in range(ROUNDS):
        for route, found_ms in steps_ms.items():
            out = folder / f"{route}_{number}"
            found_ms.append(train(out, "pace8", f"routes.default={route}")[0])
    ratio = median(steps_ms["delegated"]) / median(steps_ms["direct"])
    yield Bar("pace8: all links delegated over all direct", ratio, at_most=1.03)


def blocking(folder: Path) -> Iterator[Bar]:
    """How well the blocking link model predicts direct runs from their own measured costs."""
    for number, (config, schedule, slow_ms) in enumerate(BLOCKING):
        links = f"[{{between: [2, 3], latency_ms: {slow_ms}}}]" if slow_ms else "[]"
        out = folder / f"blocking_{number}"
        words = f"schedule.name={schedule}", f"emulation.links={links}"
        step_ms, _ = train(out, config, *words)
        ran, measured = read_run(out)
        profile = _with_configured_links(measured, ran)
        order = FIXED_SCHEDULES[schedule](profile.costs.num_stages, ran.batch.microbatches)
        simulated = simulate_blocking(lower_step(order, profile), profile.costs, profile.links)
        name = f"{config}, {schedule}, link 2-3 {slow_ms:g} ms: over the blocking model"
        yield _close(name, step_ms / simulated.makespan_ms, 0.05)


def _with_configured_links(profile: Profile, config: Config) -> Profile:
    """The profile with emulated links' latencies as they were configured, not as measured."""
    configured = {
        Link(*link.between): LinkDelay(link.latency_ms, link.latency_ms)
        for link in config.emulation.links
    }
    return replace(profile, links={**profile.links, **configured})


def _close(claim: str, ratio: float, off: float) -> Bar:
    return Bar(claim, ratio, at_least=1 - off, at_most=1 + off)


QUESTIONS: dict[str, Callable[[Path], Iterator[Bar]]] = {
    "paced": paced, "delegated": delegated, "blocking": blocking,
}  # fmt: skip


def main() -> int:
    """Print a line per run, then the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := {*arguments.questions} - {*QUESTIONS}:
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(QUESTIONS)}")
    values, bars = provenance("benchmarks.pace"), []
    with tempfile.TemporaryDirectory() as folder:
        for question in arguments.questions or QUESTIONS:
            bars += QUESTIONS[question](Path(folder))
    return finish(bars, arguments.json, values)


if __name__ == "__main__":
    sys.exit(main())
