"""The paper's figures 14 to 17, run for real: `python -m benchmarks.paper_figures [FIGURE ...]`.

Runs configs/FIGURE.yaml for each (about 50 minutes for all), or takes the run of it that is in the
folder that `--runs` names, and holds the median steps against one another: adaptive against its
healthy step and against delegation alone. Wants an otherwise idle machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.head_of_line import ROOT, Bar

FIGURES = ("figure14", "figure15", "figure16", "figure16_14b", "figure17")
MOST_AT_60_MS = 1.13  # the paper's own figure for 14B
Runs = dict[tuple[str, str], dict[str, Any]]


def measured(figure: str, folder: Path) -> Runs:
    """The runs of a figure's comparison, which is run unless the folder has it."""
    directory = folder / figure
    if not (directory / "results.json").exists():
        command = [sys.executable, "-m", "jaxmorph", "compare", f"configs/{figure}.yaml"]
        subprocess.run([*command, f"run.dir={directory}"], cwd=ROOT, check=True)
    results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return {(run["system"], run["condition"]): run for run in results["runs"]}


def median_ms(runs: Runs, system: str, condition: str) -> float:
    """A run's step."""
    return runs[system, condition]["step_ms"]["median"]


def bars(figure: str, runs: Runs) -> Iterator[Bar]:
    """What should hold between a figure's runs."""
    conditions = dict.fromkeys(condition for _, condition in runs)
    healthy, *slow = conditions
    for condition in slow:
        adaptive_ms = median_ms(runs, "adaptive", condition)
        ratio = adaptive_ms / median_ms(runs, "zb-delegated", condition)
        yield Bar(f"{figure}, {condition}: adaptive over zb-delegated", ratio, most=1.0)
    if figure == "figure15":
        ratio = median_ms(runs, "adaptive", slow[-1]) / median_ms(runs, "adaptive", healthy)
        yield Bar(f"{figure}, {slow[-1]}: adaptive over healthy", ratio, most=MOST_AT_60_MS)


def over_prediction(runs: Runs) -> str:
    """How far the measured steps are from the predicted ones."""
    ratios = [run["step_ms"]["median"] / run["predicted_ms"] for run in runs.values()]
    return f"measured over predicted: {min(ratios):.3f} to {max(ratios):.3f}"


def main() -> int:
    """Print a line per bar; 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--runs", type=Path, help="where runs are, or are to be kept")
    arguments = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).resolve()
        for figure in arguments.figures or FIGURES:
            runs = measured(figure, folder)
            found = [*bars(figure, runs)]
            print(*found, f"{figure}: {over_prediction(runs)}", sep="\n", flush=True)
            missed |= not all(bar.holds for bar in found)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
