"""Whether training computes the same whatever fails: `python -m benchmarks.chaos`.

Trains `configs/chaos.yaml` once undisturbed, and then again and again through faults, until there
were enough of them, and of each kind. Each must be named by what the run reports, none may stop it
for longer than `step_s` + 10 s beside what its ranks need to start, nothing may be left behind, and
losses of all steps and the last parameters must be the same bits. Before that a run is ended in
every way there is, and what it leaves is counted. `--kill-everything N` kills only, all processes
at once, N times at moments of all sorts. Linux only.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from benchmarks.chaos.disturbed_run import DisturbedRun, disturbed, undisturbed
from benchmarks.chaos.endings import ENDINGS, left_by
from benchmarks.chaos.faults import KINDS, LINK_KINDS, Dealer
from benchmarks.chaos.injection import has_own_mounts
from benchmarks.chaos.judgement import (
    WHOLE_RUN,
    Outcome,
    Table,
    in_words,
    missed,
    provenance,
    table_of,
)
from benchmarks.chaos.watched_run import ROOT, EndedError, HungError

_SHOWN = 12  # lines of what went wrong
_MOST_FAILED = 5  # runs, then it's over


def main() -> int:
    """Print a line per ending and per run, then the table; 1 if anything is missed."""
    arguments = _parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with it
    own_disk = has_own_mounts()
    kinds = [kind for kind in (*KINDS, *LINK_KINDS) if kind in arguments.only]
    if "disk full" in kinds and not own_disk:
        print("left out: disk full, because this process may not mount one")
        kinds.remove("disk full")
    each: int = arguments.each
    least = dict.fromkeys(kinds, each)
    if arguments.kill_everything:
        least = {"everything killed": arguments.kill_everything}
    values = provenance(ROOT, "benchmarks.chaos")
    print(f"load {values['load_before']:.2f}; kinds of faults: {', '.join(kinds)}", flush=True)
    bad_endings = 0 if arguments.no_endings else _end_in_all_ways()
    runs: list[DisturbedRun] = []
    for run in _disturbed_runs(arguments, Dealer(random.Random(arguments.seed), kinds), least):
        runs.append(run)
        _print(run)
        if arguments.json:  # after each run, so that one that is ended early has its results
            values |= {"load_after": os.getloadavg()[0], "table": _table(runs, kinds)}
            values["runs"] = [each.to_json() for each in runs]
            arguments.json.write_text(json.dumps(values, indent=1))
    table, num_faults = _table(runs, kinds), sum(run.num_faults for run in runs)
    wanted = {**least, "faults in all": arguments.faults}
    found = Counter({kind: int(row["count"] or 0) for kind, row in table.items()})
    found["faults in all"] = num_faults
    few = [f"{name}: {found[name]} of {n}" for name, n in wanted.items() if found[name] < n]
    print(*in_words(table), *(f"not reached: {each}" for each in few), sep="\n")
    print(f"{num_faults} faults in {len(runs)} runs; {bad_endings} endings leave something")
    return 1 if missed(table) or bad_endings or few else 0


def _parsed() -> argparse.Namespace:
    kinds = [*KINDS, *LINK_KINDS]
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=400, help="at least so many, over all runs")
    parser.add_argument("--each", type=int, default=10, help="at least so many of each kind")
    parser.add_argument("--only", action="append", choices=kinds, metavar="KIND")
    parser.add_argument("--kill-everything", type=int, metavar="N", help="only that, N times")
    parser.add_argument("--minutes", type=float, default=1e6, help="then no more faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; then one more each")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--no-endings", action="store_true", help="only the faults")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.only = arguments.only or kinds
    if arguments.kill_everything:
        arguments.only = ["everything killed", *LINK_KINDS]
        arguments.no_endings = True
        arguments.faults = 0
    return arguments


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


def _disturbed_runs(
    arguments: argparse.Namespace, dealer: Dealer, least: Mapping[str, int]
) -> Iterator[DisturbedRun]:
    until_s, failed = time.monotonic() + 60 * arguments.minutes, 0
    expected, own_disk = undisturbed(arguments.steps), "disk full" in dealer.wanted

    def enough() -> bool:
        reached = all(dealer.counts[kind] >= number for kind, number in least.items())
        return time.monotonic() > until_s or (reached and dealer.counts.total() >= arguments.faults)

    for seed in count(arguments.seed):
        if enough() or failed == _MOST_FAILED:
            return
        run = disturbed(seed, arguments.steps, expected, dealer, enough, own_disk=own_disk)
        failed += not run.passes
        yield run


def _table(runs: Sequence[DisturbedRun], kinds: Sequence[str]) -> Table:
    outcomes = [each for run in runs for each in run.outcomes]
    outcomes += [Outcome(kind) for run in runs for kind in run.link_faults.elements()]
    return table_of(outcomes, [*kinds, WHOLE_RUN])


def _print(run: DisturbedRun) -> None:
    verdict = "as it should be" if run.passes else "MISSED"
    print(f"seed {run.seed}: {run.num_faults} faults in {run.seconds:.0f} s: {verdict}")
    print("  events: " + ", ".join(f"{name} {n}" for name, n in sorted(run.events.items())))
    for each in run.outcomes:
        if each.detail or not each.holds:
            unnamed = "; its cause is not named" if each.unnamed else ""
            print(f"  after step {each.step}: {each.kind}{unnamed}: {each.detail}")
        _show([*([each.hang] if each.hang else []), *each.leaks])
    _show(run.wrong)
    sys.stdout.flush()


def _show(problems: Sequence[str]) -> None:
    for problem in problems[:_SHOWN]:
        print("  | " + problem.replace("\n", "\n  | "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
