"""One table of what jaxmorph costs: `python -m benchmarks.speed_table [--json FILE]`.

Runs the benchmarks of single costs and of whole training loops one after the other, and puts their
figures under each other, with what they are to be. Wants an otherwise idle machine for about ten
minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
        benchmark: Where it comes from.
        name: What was measured.
        value: With its unit.
        wanted: What it is to be; empty where nothing is asked.
        holds: Whether it is.
    """

    benchmark: str
    name: str
    value: str
    wanted: str = ""
    holds: bool = True

    def __str__(self) -> str:
        verdict = "" if self.holds else "  MISSED"
        return f"{self.benchmark:16}{self.name:74}{self.value:>12}  {self.wanted}{verdict}".rstrip()


def of_split(told: Any) -> Iterator[Figure]:
    """What the split of the backward costs."""
    for name, value in told["ratios"].items():
        bar = told["bars"][name]
        yield Figure("split_cost", name, f"{value:.3f}", f"<= {bar:g}", value <= bar)


def of_pace(told: Any) -> Iterator[Figure]:
    """How far paced steps are from their prediction."""
    for case in told:
        for over, bar in (("over_predicted", "predicted_bar"), ("over_nominal", "nominal_bar")):
            name, most = f"{case['config']}: step {over.replace('_', ' ')}", case[bar]
            holds = abs(case[over]) <= most
            yield Figure("pace", name, f"{case[over]:.1%}", f"<= {most:.0%}", holds)


def of_dispatch(told: Any) -> Iterator[Figure]:
    """What an instruction costs, and where it goes."""
    for name, value in told.items():
        if name != "load":
            yield Figure("dispatch", name, f"{value:.0f} us")


def of_training(told: Any) -> Iterator[Figure]:
    """Whole training loops, side by side."""
    for row in told["rows"]:
        rate, alone = row["tokens_per_s"], row["of_alone"]
        yield Figure("training_speed", f"{row['name']}: tokens/s", f"{rate:.0f}")
        yield Figure("training_speed", f"{row['name']}: CPU us/token", f"{row['cpu_us']:.0f}")
        if alone is not None:
            per_core = f"{row['name']}: per core, of its own one process"
            yield Figure("training_speed", per_core, f"{alone:.3f}")
    for bar in told["bars"]:
        wanted = f">= {bar['least']:g}" if bar["least"] else f"<= {bar['most']:g}"
        value = f"{bar['value']:.3f}"
        yield Figure("training_speed", bar["claim"], value, wanted, bar["holds"])


PARTS: dict[str, Callable[[Any], Iterator[Figure]]] = {
    "split_cost": of_split,
    "dispatch": of_dispatch,
    "pace": of_pace,
    "training_speed": of_training,
}


def measure(name: str, words: Sequence[str]) -> list[Figure]:
    """Run one benchmark; its figures, or that it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", f"--json={path}", *words]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if not path.is_file():
            return [Figure(name, "it failed", f"exit {done.returncode}", holds=False)]
        figures = [*PARTS[name](json.loads(path.read_text(encoding="utf-8")))]
    if done.returncode and all(figure.holds for figure in figures):
        figures.append(Figure(name, "it failed", f"exit {done.returncode}", holds=False))
    return figures


def main() -> int:
    """Print the table; 1 if a bar is missed or a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--torch-python", default="", help="a Python that has torch and numpy")
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    figures = []
    for name in options.parts.split(","):
        print(f"--- {name}", flush=True)
        torch = name == "training_speed" and options.torch_python
        figures += measure(name, [f"--torch-python={options.torch_python}"] if torch else [])
    print(f"\nload average before: {load_average:.2f}", *figures, sep="\n")
    if options.json:
        told = {"load": load_average, "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(told, indent=1))
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
