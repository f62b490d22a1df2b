"""The paper's figures 14 to 18 and its trace: `python -m benchmarks.paper_figures [FIGURE ...]`.

Runs configs/FIGURE.yaml for each (about 80 minutes for all), or takes the run of it that is in the
folder that `--runs` names, and holds steps against one another: adaptive against its healthy step,
against delegation alone and, where delays change (`figure18`, `table3`), against the paper's
speed-ups over 1f1b and zb; `ablation` has adaptation alone too. Wants an otherwise idle machine.
Words such as `compare.steps=2` change the runs.
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

from benchmarks.head_of_line import ROOT, Bar

FIGURES = (
    "figure14", "figure15", "figure16", "figure16_14b", "figure17", "figure18", "table3",
    "ablation",
)  # fmt: skip
MOST_AT_60_MS = 1.13  # the paper's own figure for 14B
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


def bars(figure: str, runs: Runs) -> Iterator[Bar]:
    """What should hold between a figure's runs."""
    if figure == "table3":
        yield from total_bars(runs)
        return
    conditions = dict.fromkeys(condition for _, condition in runs)
    healthy, *slow = conditions
    for condition in slow:
        adaptive_ms = median_ms(runs, "adaptive", condition)
        ratio = adaptive_ms / median_ms(runs, "zb-delegated", condition)
        yield Bar(f"{figure}, {condition}: adaptive over zb-delegated", ratio, most=1.0)
    if figure == "figure15":
        ratio = median_ms(runs, "adaptive", slow[-1]) / median_ms(runs, "adaptive", healthy)
        yield Bar(f"{figure}, {slow[-1]}: adaptive over healthy", ratio, most=MOST_AT_60_MS)
    if figure == "ablation":
        for condition in slow:
            ratio = median_ms(runs, "adaptive", condition)
            ratio /= median_ms(runs, "adaptive-direct", condition)
            yield Bar(f"{figure}, {condition}: adaptive over adaptive-direct", ratio, most=1.0)
    if figure == "figure18":
        yield from speed_up_bars(figure, runs, slow)


def speed_up_bars(figure: str, runs: Runs, conditions: Sequence[str]) -> Iterator[Bar]:
    """Adaptive's speed-up over the others, which should be no less than the paper's."""
    for system, condition in product(("1f1b", "zb"), conditions):
        slower, quicker = runs[system, condition], runs["adaptive", condition]
        ratio = slower["step_ms"]["median"] / quicker["step_ms"]["median"]
        least = slower["reference_ms"] / quicker["reference_ms"]
        yield Bar(f"{figure}, {condition}: {system} over adaptive", ratio, least=round(least, 2))


def total_bars(runs: Runs) -> Iterator[Bar]:
    """All steps of the trace together, against adaptive's, and the same of the paper."""
    total_s = {system: run["total_s"] for (system, _), run in runs.items()}
    for system in ("1f1b", "zb"):
        least = WHOLE_TRACE_MINUTES[system] / WHOLE_TRACE_MINUTES["adaptive"]
        claim = f"table3: {system}, {total_s[system]:.0f} s, over adaptive"
        ratio = total_s[system] / total_s["adaptive"]
        yield Bar(claim, ratio, least=round(least, 2))


def over_prediction(runs: Runs) -> str:
    """How far the measured steps are from the predicted ones."""
    ratios = [run["step_ms"]["median"] / run["predicted_ms"] for run in runs.values()]
    return f"measured over predicted: {min(ratios):.3f} to {max(ratios):.3f}"


def main() -> int:
    """Print a line per bar; 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.epilog = "section.key=value among the figures is handed on to `jaxmorph compare`."
    parser.add_argument("--runs", type=Path, help="where runs are, or are to be kept")
    arguments = parser.parse_args()
    overrides = [word for word in arguments.figures if "=" in word]
    figures = [word for word in arguments.figures if "=" not in word]
    missed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).resolve()
        for figure in figures or FIGURES:
            runs = measured(figure, folder, overrides)
            found = [*bars(figure, runs)]
            print(*found, f"{figure}: {over_prediction(runs)}", sep="\n", flush=True)
            missed |= not all(bar.holds for bar in found)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
