"""Whether training computes the same whatever fails: `python -m benchmarks.chaos`.

Trains `configs/chaos.yaml` once undisturbed, and then again and again through faults that are drawn
from seeds, until there were enough. Losses of all steps and the last parameters must be the same
bits, no step may take longer than the watchdog's patience, and nothing may be left behind. Before
that a run is ended in every way there is, and what it leaves is counted. Linux only.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path

from benchmarks.chaos.endings import ENDINGS, left_by
from benchmarks.chaos.features import Features, known_features
from benchmarks.chaos.storm import Storm, run_storm, undisturbed
from benchmarks.chaos.watched_run import EndedError, HungError

_SHOWN = 12  # lines of what went wrong


def main() -> int:
    """Print a line per ending and per run, then the bars; 1 if one of them is missed."""
    arguments = _parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with it
    features = known_features()
    print(f"{_can(features)}; load {os.getloadavg()[0]:.2f}", flush=True)
    bad_endings = 0 if arguments.no_endings else _end_in_all_ways()
    storms = _storms(arguments, features)
    if arguments.json:
        values = {"features": asdict(features), "storms": [storm.to_json() for storm in storms]}
        arguments.json.write_text(json.dumps(values, indent=1))
    return _judge(storms, bad_endings, arguments.faults, features)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=300, help="at least so many, over all runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; then one more each")
    parser.add_argument("--steps", type=int, default=240, help="of each run")
    parser.add_argument("--patience-s", type=float, default=90.0, help="from one step to the next")
    parser.add_argument("--no-endings", action="store_true", help="only the faults")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _can(features: Features) -> str:
    missing = [
        what
        for what, is_known in (
            ("a rank killed: no restart_policy", features.restarts),
            ("a card down: no route of emulated links", features.direct_cuts),
        )
        if not is_known
    ]
    return f"left out here: {'; '.join(missing)}" if missing else "all kinds of faults"


def _end_in_all_ways() -> int:
    bad = 0
    for ending in ENDINGS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                left = left_by(ending, Path(folder))
            except (EndedError, HungError) as error:
                left = [str(error)]
        print(f"{ending.name:38}{'leaves nothing' if not left else 'MISSED'}", flush=True)
        _show(left)
        bad += bool(left)
    return bad


def _storms(arguments: argparse.Namespace, features: Features) -> list[Storm]:
    expected = undisturbed(arguments.steps, arguments.patience_s)
    storms: list[Storm] = []
    for seed in count(arguments.seed):
        own = features.of_run(seed)
        storm = run_storm(seed, arguments.steps, expected, own, arguments.patience_s)
        storms.append(storm)
        _print(storm)
        if _num_faults(storms) >= arguments.faults or not storm.passes:
            return storms
    raise AssertionError("there is always another seed")


def _print(storm: Storm) -> None:
    verdict = "the same bits, nothing left" if storm.passes else "MISSED"
    print(f"seed {storm.seed}: {storm.faults.total()} faults in {storm.seconds:.0f} s: {verdict}")
    print(f"  faults: {_counts(storm.faults)}")
    print(f"  events: {_counts(storm.events)}", flush=True)
    for problems in (storm.wrong, storm.hangs, storm.leaks):
        _show(problems)


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counted.items()) if number)


def _show(problems: list[str]) -> None:
    for problem in problems[:_SHOWN]:
        print("  | " + problem.replace("\n", "\n  | "), flush=True)


def _num_faults(storms: list[Storm]) -> int:
    return sum(storm.faults.total() for storm in storms)


def _judge(storms: list[Storm], bad_endings: int, wanted: int, features: Features) -> int:
    events = sum((storm.events for storm in storms), Counter())
    own = [features.of_run(storm.seed) for storm in storms]
    had = Features(any(each.restarts for each in own), any(each.direct_cuts for each in own))
    figures = (
        ("faults", _num_faults(storms), wanted, _num_faults(storms) >= wanted),
        *_least("links that fail in mid-step", events["link_failed"], had.direct_cuts),
        *_least("restarts", events["restarted"], had.restarts),
        ("runs with wrong results", sum(bool(storm.wrong) for storm in storms), 0, None),
        ("hangs", sum(len(storm.hangs) for storm in storms), 0, None),
        ("leaks", sum(len(storm.leaks) for storm in storms), 0, None),
        ("endings that leave something", bad_endings, 0, None),
    )
    missed = 0
    for name, figure, bar, passes in figures:
        passed = figure == bar if passes is None else passes
        missed += not passed
        print(f"{name:30}{figure:6}  bar {bar}{'' if passed else '  MISSED'}")
    return 1 if missed else 0


def _least(name: str, figure: int, can_be: bool) -> Iterator[tuple[str, int, int, bool]]:
    """What has to happen at least once where it can."""
    if can_be:
        yield name, figure, 1, figure >= 1


if __name__ == "__main__":
    sys.exit(main())
