"""Bars on comparisons, mostly the paper's: `python -m benchmarks.paper_figures [FIGURE ...]`.

Runs configs/FIGURE.yaml for each (about 100 minutes for all), or takes the run of it that is in the
folder that `--runs` names, and holds steps against one another: adaptive against its prediction,
against delegation alone, on healthy links too, and, for 14B, against its healthy step;
adaptive-detecting against its prediction, delegation alone and adaptive, which knows the delays;
where they change (`figure18`, `table3`) both, against the paper's speed-ups over 1f1b and zb;
`ablation` row by row; `memory` against its budget and the step without one; `hol`: whether
delegation ends head-of-line blocking. Wants an otherwise idle machine. Words such as
`compare.steps=2` change the runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Bar

STEADY = ("figure14", "figure15", "figure16", "figure16_14b", "figure17")
FIGURES = ("hol", *STEADY, "figure18", "table3", "ablation", "memory")
SLOWEST_LAST_LINK = {"figure15": "60 ms", "figure16_14b": "6-7 60 ms"}  # of the 14B model
MOST_AT_60_MS = 1.10  # no order does it in less than 1.07; the paper's own step is 1.13
MOST_OVER_TOLD = MOST_OVER_PREDICTED = MOST_OVER_UNLIMITED = 1.03
MOST_AS_LONG = 1.03  # steps whose plans are as long: what runs of one plan differ by
WHOLE_TRACE_MINUTES = {"1f1b": 45.4, "zb": 46.9, "adaptive": 33.2}  # the paper's, for table 3
Runs = dict[tuple[str, str], dict[str, Any]]


def measured(figure: str, folder: Path, overrides: Sequence[str] = ()) -> Runs:
    """The runs of a figure's comparison, which is run unless the folder has it."""
    directory = folder / figure
    if not (directory / "results.json").exists():
        command = [sys.executable, "-m", "jaxmorph", "compare", f"configs/{figure}.yaml"]
        subprocess.run([*command, f"run.dir={directory}", *overrides], cwd=ROOT, check=True)
    results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return {(run["system"], run["condition"]): run for run in results["runs"]}


def median_ms(runs: Runs, system: str, condition: str) -> float:
    """A run's step."""
    return runs[system, condition]["step_ms"]["median"]


def ratio_bar(
    figure: str, runs: Runs, condition: str, system: str, other: str, at_most: float = 1.0
) -> Bar:
    """A system's step over another's under one condition."""
    ratio = median_ms(runs, system, condition) / median_ms(runs, other, condition)
    return Bar(f"{figure}, {condition}: {system} over {other}", ratio, at_most=at_most)


def bars(figure: str, runs: Runs) -> Iterator[Bar]:
    """What should hold between a figure's runs."""
    healthy, *slow = dict.fromkeys(condition for _, condition in runs)
    match figure:
        case "hol":
            yield from blocking_bars(runs, healthy, *slow)
        case "table3":
            yield from total_bars(runs)
        case "ablation":
            yield from ablation_bars(runs, slow)
        case "memory":
            yield from memory_bars(runs, slow)
        case "figure18":
            yield from delegation_bars(figure, runs, healthy, slow)
            yield from speed_up_bars(figure, runs, slow)
        case _:
            found = "adaptive", "adaptive-detecting"
            yield from delegation_bars(figure, runs, healthy, slow, found)
            yield from detection_bars(figure, runs, (healthy, *slow))
            yield from prediction_bars(figure, runs, found)
            yield from healthy_bars(figure, runs, healthy)


def blocking_bars(runs: Runs, healthy: str, slow: str) -> Iterator[Bar]:
    """A slow link blocks direct ops, delegated ones not; adaptive's step is nearly the shortest."""
    healthy_ms, adaptive_ms = median_ms(runs, "zb", healthy), median_ms(runs, "adaptive", slow)
    direct_ms = median_ms(runs, "zb", slow)
    yield Bar("hol: zb direct over its healthy step", direct_ms / healthy_ms, at_least=2.0)
    delegated = runs["zb-delegated", slow]
    over_predicted = median_ms(runs, "zb-delegated", slow) / delegated["predicted_ms"]
    yield Bar("hol: zb-delegated over its prediction", over_predicted, at_most=1.06)
    over_bound = adaptive_ms / runs["adaptive", slow]["lower_bound_ms"]
    yield Bar("hol: adaptive over the least step there can be", over_bound, at_most=1.04)
    yield Bar("hol: adaptive over zb's healthy step", adaptive_ms / healthy_ms, at_most=1.12)
    blocked, otherwise = delegated["blocking_stall_rate"], delegated["other_idle_rate"]
    yield Bar("hol: share that a stage of zb-delegated is blocked", max(blocked), at_most=0.01)
    waiting = max(map(sum, zip(blocked, otherwise, strict=True)))  # copies and dispatch count
    yield Bar("hol: share that a ready op of it waits at all", waiting, at_most=0.01)


def delegation_bars(
    figure: str,
    runs: Runs,
    healthy: str,
    slow: Sequence[str],
    systems: Sequence[str] = ("adaptive",),
) -> Iterator[Bar]:
    """Adaptive systems are never slower than delegation alone, whose healthy plan is as long."""
    for system in systems:
        pair = system, "zb-delegated"
        yield ratio_bar(figure, runs, healthy, *pair, at_most=MOST_AS_LONG)
        for condition in slow:
            yield ratio_bar(figure, runs, condition, *pair)


def detection_bars(figure: str, runs: Runs, conditions: Sequence[str]) -> Iterator[Bar]:
    """A system that detects delays is nearly as quick as one that knows them."""
    for condition in conditions:
        pair = "adaptive-detecting", "adaptive"
        yield ratio_bar(figure, runs, condition, *pair, at_most=MOST_OVER_TOLD)


def prediction_bars(figure: str, runs: Runs, systems: Sequence[str]) -> Iterator[Bar]:
    """Steps of links that are steady take what was predicted."""
    for (system, condition), run in runs.items():
        if system in systems:
            ratio = run["step_ms"]["median"] / run["predicted_ms"]
            claim = f"{figure}, {condition}: {system} over its prediction"
            yield Bar(claim, ratio, at_most=MOST_OVER_PREDICTED)


def healthy_bars(figure: str, runs: Runs, healthy: str) -> Iterator[Bar]:
    """Adaptive's longest step over its healthy one, for the 14B model's last link."""
    if figure in SLOWEST_LAST_LINK:
        slowest = SLOWEST_LAST_LINK[figure]
        ratio = median_ms(runs, "adaptive", slowest) / median_ms(runs, "adaptive", healthy)
        yield Bar(f"{figure}, {slowest}: adaptive over healthy", ratio, at_most=MOST_AT_60_MS)


def ablation_bars(runs: Runs, conditions: Sequence[str]) -> Iterator[Bar]:
    """Each row is no slower than those that have less; adaptation alone has a plan as long."""
    for condition in conditions:
        row = "ablation", runs, condition
        yield ratio_bar(*row, "zb-delegated", "zb")
        yield ratio_bar(*row, "adaptive-direct", "zb", at_most=MOST_AS_LONG)
        yield ratio_bar(*row, "adaptive", "zb-delegated")
        yield ratio_bar(*row, "adaptive", "adaptive-direct")


def memory_bars(runs: Runs, conditions: Sequence[str]) -> Iterator[Bar]:
    """No device holds more than its budget, at hardly any cost in time."""
    for (system, condition), run in runs.items():
        if system != "adaptive":
            held = run["peak_on_device"]
            claim = f"memory, {condition}: {system}, most on a device"
            yield Bar(claim, max(held), at_most=2 * len(held) - 1)
    for condition in conditions:
        held = max(runs["adaptive", condition]["peak_on_device"])
        least = 2 * len(runs["adaptive", condition]["peak_on_device"])
        yield Bar(f"memory, {condition}: adaptive, most on a device", held, at_least=least)
        pair = "adaptive-offload", "adaptive"
        yield ratio_bar("memory", runs, condition, *pair, at_most=MOST_OVER_UNLIMITED)
        yield ratio_bar("memory", runs, condition, "adaptive-offload", "adaptive-capped")


def speed_up_bars(figure: str, runs: Runs, conditions: Sequence[str]) -> Iterator[Bar]:
    """Speed-ups over those that don't adapt, which should be no less than the paper's."""
    for system, condition in product(("1f1b", "zb"), conditions):
        slower, paper = runs[system, condition], runs["adaptive", condition]["reference_ms"]
        ratio = slower["step_ms"]["median"] / median_ms(runs, "adaptive", condition)
        least = slower["reference_ms"] / paper
        yield Bar(f"{figure}, {condition}: {system} over adaptive", ratio, at_least=round(least, 2))


def total_bars(runs: Runs) -> Iterator[Bar]:
    """All steps of the trace together, against adaptive's, and the same of the paper."""
    total_s = {system: run["total_s"] for (system, _), run in runs.items()}
    for system in ("1f1b", "zb"):
        least = WHOLE_TRACE_MINUTES[system] / WHOLE_TRACE_MINUTES["adaptive"]
        claim = f"table3: {system}, {total_s[system]:.0f} s, over adaptive"
        ratio = total_s[system] / total_s["adaptive"]
        yield Bar(claim, ratio, at_least=round(least, 2))


def incomplete(figure: str, runs: Runs) -> Iterator[str]:
    """The runs that failed, a line each: nothing can be held against them."""
    for (system, condition), run in runs.items():
        if run["failed"]:
            yield f"{figure}, {condition}: {system} failed: {run['failed']}"


def over_prediction(runs: Runs) -> str:
    """How far the measured steps are from the predicted ones."""
    ratios = [run["step_ms"]["median"] / run["predicted_ms"] for run in runs.values()]
    return f"measured over predicted: {min(ratios):.3f} to {max(ratios):.3f}"


def report(figure: str, runs: Runs) -> bool:
    """Print a line per bar, or per run that failed; whether all is as it should be."""
    failed = [*incomplete(figure, runs)]
    if failed:
        print(*failed, sep="\n", flush=True)
        return False
    found = [*bars(figure, runs)]
    print(*found, f"{figure}: {over_prediction(runs)}", sep="\n", flush=True)
    return all(bar.holds for bar in found)


def main() -> int:
    """Print a line per bar; 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.epilog = "section.key=value among the figures is handed on to `jaxmorph compare`."
    parser.add_argument("--runs", type=Path, help="where runs are, or are to be kept")
    arguments = parser.parse_args()
    overrides = [word for word in arguments.figures if "=" in word]
    figures = [word for word in arguments.figures if "=" not in word]
    is_good = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).resolve()
        for figure in figures or FIGURES:
            is_good &= report(figure, measured(figure, folder, overrides))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
