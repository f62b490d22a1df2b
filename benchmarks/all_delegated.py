"""What delegating healthy links costs: `python -m benchmarks.all_delegated [--json FILE]`.

Trains configs/pace8.yaml with all links direct and with all delegated, in turn, in rounds, so that
other work on the machine slows down both alike. Wants an otherwise idle machine.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.pace import CASES, Result, run

PACE8 = CASES[1]
BAR = 1.03
ROUTES = ("direct", "delegated")


def measure(rounds: int) -> dict[str, list[Result]]:
    """The runs of each route, with a line for each."""
    found: dict[str, list[Result]] = {route: [] for route in ROUTES}
    for _ in range(rounds):
        for route in ROUTES:
            result = run(PACE8, f"routes.default={route}")
            found[route].append(result)
            print(
                f"{route:10}{result.step_ms:8.1f} ms, {result.predicted_ms:.1f} predicted, "
                f"load before {result.load_average:.2f}",
                flush=True,
            )
    return found


def main() -> int:
    """Print the ratio of the medians; 1 if the bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    direct_ms, delegated_ms = (
        median(result.step_ms for result in found[route]) for route in ROUTES
    )
    ratio = delegated_ms / direct_ms
    verdict = "" if ratio <= BAR else "  MISSED"
    print(f"{PACE8.config}: delegated over direct {ratio:.4f} (<= {BAR}){verdict}")
    if arguments.json:
        runs = {route: [asdict(result) for result in found[route]] for route in ROUTES}
        arguments.json.write_text(json.dumps({"ratio": ratio, "runs": runs}, indent=1))
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
