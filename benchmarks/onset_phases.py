"""What a link that turns slow costs, early, midway and late in a step.

`python -m benchmarks.onset_phases` trains the model of configs/onset.yaml, paced, with failover.
The direct link 2-3 takes 30 ms more from a moment of a step on. The excess is what that step and
those after it take longer than those of a run that had the delay from its start, in healthy steps.
The floor is the same for a run that delegates the link as the delay begins, keeps the order of that
step, and has its new plan with the next. `--json FILE` writes the figures; exit code 1 when the bar
is missed. Wants an otherwise idle machine; takes about 8 minutes.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.results import ROOT, Bar, finish, provenance
from jaxmorph.config import load_config
from jaxmorph.program.blocking import Disturbance, simulate_blocking
from jaxmorph.program.instructions import Transfer
from jaxmorph.program.lowering import lower
from jaxmorph.records import Event, EventKind, Link, StepRecord
from jaxmorph.report.run_directory import EVENTS, METRICS, read_records
from jaxmorph.schedule.costs import Limits, LinkDelay, Links, StageCosts
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline

ROUNDS = 3
PHASES = (0.1, 0.45, 0.8)
LINK, DELAY_MS = Link(2, 3), 30.0
_CONFIG = "configs/onset.yaml"
_ONSET_STEP, _COUNTED_STEPS, _SETTLED_STEP = 12, 16, 6
_TRAINED = (
    f"run.steps={_ONSET_STEP + _COUNTED_STEPS}",
    "schedule.name=adaptive",
    "adaptation.enabled=true",  # with failover: a link is handed over in mid-step
    "adaptation.delegates=slow",  # so the link is direct until then
)


@dataclass(frozen=True)
class Onset:
    """One run whose link turned slow in mid-step.

    Attributes:
        phase: When in its step, by the steps' lengths as measured: from 0 to about 1.
        floor, excess: In healthy steps.
        steps_s: The step of the onset and those after it.
    """

    phase: float
    floor: float
    excess: float
    steps_s: tuple[float, ...]
    events: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """Steps on healthy links and with the delay from the start on, in seconds, and the onsets."""

    healthy_s: float
    informed_s: float
    onsets: tuple[Onset, ...]


def measured_round() -> Round:
    """A healthy run, one that has the delay from its start, and one for each phase."""
    healthy, _ = _trained()
    informed, _ = _trained(from_s=0.0)
    healthy_s, informed_s = (median(steps[_SETTLED_STEP:]) for steps in (healthy, informed))
    onsets = []
    for phase in PHASES:
        from_s = sum(healthy[:_ONSET_STEP]) + phase * healthy_s
        steps, events = _trained(from_s=from_s)
        step = next(at for at in range(len(steps)) if sum(steps[: at + 1]) > from_s)
        after, actual = steps[step:], (from_s - sum(steps[:step])) / healthy_s
        excess_s = sum(after) - informed_s * len(after)
        floor_s = 1e-3 * floor_ms(actual)
        onsets.append(Onset(actual, floor_s / healthy_s, excess_s / healthy_s, after, events))
    return Round(healthy_s, informed_s, tuple(onsets))


def _trained(from_s: float | None = None) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The steps of a run whose link is slow from a moment on, and what it did about that."""
    command = [sys.executable, "-m", "jaxmorph", "train", _CONFIG, *_TRAINED]
    with tempfile.TemporaryDirectory() as folder:
        path, trace = Path(folder) / "run", Path(folder) / "trace.csv"
        if from_s is not None:
            trace.write_text(f"time_s,links,latency_ms\n{from_s:.4f},{LINK},{DELAY_MS:g}\n")
            command.append(f"emulation.trace={trace}")
        subprocess.run(
            [*command, f"run.dir={path}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        steps = tuple(each.step_s for each in read_records(path / METRICS, StepRecord))
        events = read_records(path / EVENTS, Event)
    kinds = {EventKind.LINK_HANDED_OVER, EventKind.PLAN_CHANGED}
    return steps, tuple(f"{each.step} {each.kind}" for each in events if each.kind in kinds)


@dataclass
class _Begins(Disturbance):
    """The link is slower from a moment of the step on."""

    at_ms: float

    def message_ms(self, transfer: Transfer, begins_ms: float, planned_ms: float) -> float:
        """A message's duration."""
        is_slow = transfer.link == LINK and begins_ms >= self.at_ms
        return planned_ms + (DELAY_MS if is_slow else 0.0)


def floor_ms(phase: float) -> float:
    """The excess where the link is delegated as its delay begins, and planned for in the next step.

    The step of the onset keeps the order of the plan for healthy links.
    """
    slow = {LINK: LinkDelay(DELAY_MS, DELAY_MS)}
    healthy_ms, informed_ms = (_simulated(links).makespan_ms for links in ({}, slow))
    return _simulated({}, _Begins(phase * healthy_ms)).makespan_ms - informed_ms


def _simulated(links: Links, disturbance: Disturbance | None = None) -> Timeline:
    """A step planned for some delays, with the link delegated."""
    config = load_config(ROOT / _CONFIG)
    if config.emulation.accelerator is None:
        raise ValueError(f"{_CONFIG} paces no ops")
    costs = StageCosts(**config.emulation.accelerator.model_dump())
    planned = plan(costs, links, Limits(), config.microbatches, "adaptive")
    expected = simulate(planned.schedule, costs, links)
    programs = lower(planned.schedule, expected, {LINK: "delegated"})
    return simulate_blocking(programs, costs, links, disturbance)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, rounds = provenance("benchmarks.onset_phases"), []
    for number in range(ROUNDS):
        rounds.append(found := measured_round())
        print(
            f"round {number + 1}: steps of {1e3 * found.healthy_s:.1f} ms on healthy links, "
            f"{1e3 * found.informed_s:.1f} with the delay from the start"
        )
        for each in found.onsets:
            print(
                f"  from {each.phase:.2f} of a step on: {each.excess:.2f} healthy steps more, at "
                f"least {each.floor:.2f}; {', '.join(each.events)}",
                flush=True,
            )
    onsets = [onset for each in rounds for onset in each.onsets]
    values = {"provenance": began, "rounds": [asdict(each) for each in rounds]}
    return finish([*_bars(onsets)], options.json, values)


def _bars(onsets: Sequence[Onset]) -> Iterator[Bar]:
    """The median onset in each third of a step: runs' first steps differ, and so do the phases."""
    for third, name in enumerate(("first", "second", "last")):
        own = [each for each in onsets if min(2, int(3 * each.phase)) == third]
        if own:
            excess, floor = (
                median(getattr(each, of) for each in own) for of in ("excess", "floor")
            )
            claim = (
                f"30 ms from the {name} third of a step on ({len(own)} times, floor {floor:.2f})"
            )
            yield Bar(claim, excess, at_most=1.0, unit="healthy steps")


if __name__ == "__main__":
    sys.exit(main())
