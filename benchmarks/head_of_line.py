"""Whether delegation ends head-of-line blocking: `python -m benchmarks.head_of_line [RUN_DIR]`.

Runs configs/hol.yaml, or takes a run of it, and holds its median steps against one another and
against what was predicted. Wants an otherwise idle machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEALTHY, SLOW = "healthy", "2-3 30 ms"
Runs = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    """Something that should hold, and whether it does."""

    claim: str
    value: float
    least: float = 0.0
    most: float = float("inf")

    @property
    def holds(self) -> bool:
        """Whether the value is between its limits."""
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        limit = f">= {self.least:g}" if self.least else f"<= {self.most:g}"
        return f"{self.claim:58}{self.value:8.3f}  ({limit}){'' if self.holds else '  MISSED'}"


def measure(folder: Path) -> Path:
    """Run the comparison, and say where it wrote."""
    command = [sys.executable, "-m", "jaxmorph", "compare", "configs/hol.yaml"]
    subprocess.run([*command, f"run.dir={folder / 'hol'}"], cwd=ROOT, check=True)
    return folder / "hol"


def bars(runs: Runs) -> Iterator[Bar]:
    """What should hold between the runs."""
    healthy_ms = runs["zb", HEALTHY]["step_ms"]["median"]
    direct, delegated, adaptive = (runs[name, SLOW] for name in ("zb", "zb-delegated", "adaptive"))
    slow_ms = {run["system"]: run["step_ms"]["median"] for run in (direct, delegated, adaptive)}
    yield Bar("zb direct over the healthy step", slow_ms["zb"] / healthy_ms, least=2.0)
    replayed = slow_ms["zb-delegated"] / delegated["predicted_ms"]
    yield Bar("zb-delegated over its replay in the simulator", replayed, most=1.06)
    over_bound = slow_ms["adaptive"] / adaptive["lower_bound_ms"]
    yield Bar("adaptive over the least step there can be", over_bound, most=1.04)
    yield Bar("adaptive over the healthy step", slow_ms["adaptive"] / healthy_ms, most=1.12)
    blocked, otherwise = delegated["blocking_stall_rate"], delegated["other_idle_rate"]
    yield Bar("share of its step that a stage of zb-delegated is blocked", max(blocked), most=0.01)
    waiting = max(map(sum, zip(blocked, otherwise, strict=True)))  # copies and dispatch count
    yield Bar("share that a ready op of it waits for whatever reason", waiting, most=0.01)


def main() -> int:
    """Print a line per bar; 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, nargs="?", help="the directory of a run of configs/hol")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or measure(Path(folder))
        results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    found = [*bars({(run["system"], run["condition"]): run for run in results["runs"]})]
    print(*found, sep="\n")
    if arguments.json:
        values = {bar.claim: {"value": bar.value, "holds": bar.holds} for bar in found}
        arguments.json.write_text(json.dumps(values | {"notes": results["notes"]}, indent=1))
    return 0 if all(bar.holds for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
