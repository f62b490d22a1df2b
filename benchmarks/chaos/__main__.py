"""Whether training computes the same whatever fails: `python -m benchmarks.chaos`.

Trains `configs/chaos.yaml` once undisturbed, and then again and again through faults, until there
were enough of them, and of each kind. Each must be named by what the run reports, none may stop it
for longer than `step_s` + 10 s beside what its ranks need to start, nothing may be left behind, and
losses of all steps and the last parameters must be the same bits. Before that a run is ended in
every way there is, and what it leaves is counted. `--kill-everything N` kills only, all processes
at once, N times at moments of all sorts. Linux only.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
    table_of,
    too_few,
)
from benchmarks.chaos.watched_run import EndedError, HungError
from benchmarks.results import provenance, write_json
from jaxmorph.compare.provenance import load_averages

_SHOWN = 12  # lines of what went wrong
_MOST_FAILED = 5  # runs, then it's over


def main() -> int:
    """Print a line per ending and per run, then the table; 1 if anything is missed."""
    arguments = _parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with it
    own_disk = has_own_mounts()
    needed = {kind: arguments.each for kind in (*KINDS, *LINK_KINDS) if kind in arguments.only}
    if arguments.kill_everything:
        needed = {"everything killed": arguments.kill_everything, **dict.fromkeys(LINK_KINDS, 0)}
    possible = {kind: n for kind, n in needed.items() if own_disk or kind != "disk full"}
    values = provenance("benchmarks.chaos")
    load, kinds = values["load_before"][0], ", ".join(possible)
    print(f"load {load:.2f}; kinds of faults: {kinds}", flush=True)
    bad_endings = 0 if arguments.no_endings else _end_in_all_ways()
    runs: list[DisturbedRun] = []
    dealer = Dealer(random.Random(arguments.seed), possible)
    for run in _disturbed_runs(arguments, dealer, own_disk=own_disk):
        runs.append(run)
        _print(run)
        if arguments.json:  # after each run, so that one that is ended early has its results
            table = _table(runs, [*needed])
            values |= {"load_after": load_averages(), "table": table}
            values["too_few"] = too_few(table, needed, arguments.faults)
            values["runs"] = [each.to_json() for each in runs]
            write_json(arguments.json, values)
    table, num_faults = _table(runs, [*needed]), sum(run.num_faults for run in runs)
    few = too_few(table, needed, arguments.faults)
    print(*in_words(table), *(f"MISSED: {each}" for each in few), sep="\n")
    if not own_disk and "disk full" in needed:
        print("this process may not mount a disk to fill")
    print(f"{num_faults} faults in {len(runs)} runs; {bad_endings} endings leave something")
    return 1 if missed(table) or bad_endings or few else 0


def _parsed() -> argparse.Namespace:
    kinds = [*KINDS, *LINK_KINDS]
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=400, help="at least so many, over all runs")
    parser.add_argument("--each", type=int, default=10, help="at least so many of each kind")
    parser.add_argument("--only", action="append", choices=kinds, metavar="KIND")
    parser.add_argument("--kill-everything", type=int, metavar="N", help="only that, N times")
    parser.add_argument("--minutes", type=float, default=60.0, help="then no more faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; then one more each")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--no-endings", action="store_true", help="only the faults")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.only = arguments.only or kinds
    if arguments.kill_everything:
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
    arguments: argparse.Namespace, dealer: Dealer, *, own_disk: bool
) -> Iterator[DisturbedRun]:
    until_s, failed = time.monotonic() + 60 * arguments.minutes, 0
    expected = undisturbed(arguments.steps)

    def enough() -> bool:
        reached = not dealer.missing() and dealer.counts.total() >= arguments.faults
        return reached or time.monotonic() > until_s

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
