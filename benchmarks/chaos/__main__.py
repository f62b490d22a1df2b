"""Whether training computes the same whatever fails: `python -m benchmarks.chaos`.

Trains `configs/chaos.yaml` once undisturbed, and then again and again through faults, until there
were enough of them, and of each kind. Each must be named by what the run says, none may stop it for
longer than `step_s` + 10 s beside what its ranks need to start, nothing may be left behind, and
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
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.chaos.endings import ENDINGS, left_by
from benchmarks.chaos.faults import CUTS, KINDS, TROUBLES, Dealer
from benchmarks.chaos.harm import has_own_mounts
from benchmarks.chaos.judgement import (
    WHOLE_RUN,
    Outcome,
    Table,
    in_words,
    missed,
    of_this_go,
    table_of,
)
from benchmarks.chaos.storm import Storm, run_storm, undisturbed
from benchmarks.chaos.watched_run import ROOT, EndedError, HungError

_SHOWN = 12  # lines of what went wrong
_MOST_FAILED = 5  # runs, then it's over


def main() -> int:
    """Print a line per ending and per run, then the table; 1 if anything is missed."""
    arguments = _parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with it
    own_disk = has_own_mounts()
    kinds = _wanted(arguments, own_disk=own_disk)
    go = of_this_go(ROOT, "benchmarks.chaos")
    print(f"load {go['load_before']:.2f}; kinds of faults: {', '.join(kinds)}", flush=True)
    bad_endings = 0 if arguments.no_endings else _end_in_all_ways()
    storms = []
    for storm in _storms(arguments, kinds, own_disk=own_disk):
        storms.append(storm)
        _print(storm)
        if arguments.json:  # after each run, so that one that is ended early has its results
            runs = [each.to_json() for each in storms]
            values = {"load_after": os.getloadavg()[0], "table": _table(storms, kinds)}
            arguments.json.write_text(json.dumps({**go, **values, "runs": runs}, indent=1))
    table = _table(storms, kinds)
    faults = sum(storm.num_faults for storm in storms)
    few = list(_not_reached(table, faults, arguments.faults, _least(arguments, kinds)))
    for line in (*in_words(table), *few):
        print(line)
    print(f"{faults} faults in {len(storms)} runs; {bad_endings} endings leave something")
    return 1 if missed(table) or bad_endings or few else 0


def _table(storms: list[Storm], kinds: list[str]) -> Table:
    outcomes = [each for storm in storms for each in storm.outcomes]
    outcomes += [Outcome(kind) for storm in storms for kind in storm.troubles.elements()]
    return table_of(outcomes, [*kinds, WHOLE_RUN])


def _not_reached(table: Table, faults: int, wanted: int, least: dict[str, int]) -> Iterator[str]:
    for kind, number in least.items():
        if (found := table[kind]["count"] or 0) < number:
            yield f"not reached: {kind}: {found:g} of {number}"
    if faults < wanted:
        yield f"not reached: faults in all: {faults} of {wanted}"


def _least(arguments: argparse.Namespace, kinds: list[str]) -> dict[str, int]:
    """How often each kind must happen."""
    if arguments.kill_everything:
        return {"everything killed": arguments.kill_everything}
    each: int = arguments.each
    return dict.fromkeys(kinds, each)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=400, help="at least so many, over all runs")
    parser.add_argument("--each", type=int, default=10, help="at least so many of each kind")
    parser.add_argument("--only", action="append", choices=[*KINDS, *TROUBLES], metavar="KIND")
    parser.add_argument("--kill-everything", type=int, metavar="N", help="only that, N times")
    parser.add_argument("--minutes", type=float, default=1e6, help="then no more faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; then one more each")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--no-endings", action="store_true", help="only the faults")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.kill_everything:
        arguments.only = ["everything killed", *TROUBLES]
        arguments.no_endings = True
        arguments.faults = 0
    return arguments


def _wanted(arguments: argparse.Namespace, *, own_disk: bool) -> list[str]:
    wanted = [
        kind for kind in (*KINDS, *TROUBLES) if kind in (arguments.only or (*KINDS, *TROUBLES))
    ]
    if "disk full" in wanted and not own_disk:
        print("left out: disk full, because this process may not mount one")
        wanted.remove("disk full")
    return wanted


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


def _storms(arguments: argparse.Namespace, kinds: list[str], *, own_disk: bool) -> Iterator[Storm]:
    until_s = time.monotonic() + 60 * arguments.minutes
    expected = undisturbed(arguments.steps)
    dealer, failed = Dealer(random.Random(arguments.seed), kinds), 0
    enough = partial(_enough, dealer, arguments.faults, _least(arguments, kinds), until_s)
    for seed in count(arguments.seed):
        if enough() or failed == _MOST_FAILED:
            return
        storm = Storm(seed, ranks_end=_ranks_end(seed, kinds))
        run_storm(storm, arguments.steps, expected, dealer, enough, own_disk=own_disk)
        for kind, times in storm.troubles.items():
            dealer.met[kind] = dealer.met.get(kind, 0) + times
        failed += not storm.passes
        yield storm


def _ranks_end(seed: int, kinds: list[str]) -> bool:
    """Ranks end in every other run, and in the others links are cut, where both are wanted."""
    if not any(KINDS[kind].ends == "ranks" for kind in kinds if kind in KINDS):
        return False
    return seed % 2 == 0 or not any(kind in CUTS for kind in kinds)


def _enough(dealer: Dealer, faults: int, least: dict[str, int], until_s: float) -> bool:
    met = dealer.met
    reached = all(met.get(kind, 0) >= number for kind, number in least.items())
    return time.monotonic() > until_s or (reached and sum(met.values()) >= faults)


def _print(storm: Storm) -> None:
    verdict = "as it should be" if storm.passes else "MISSED"
    print(f"seed {storm.seed}: {storm.num_faults} faults in {storm.seconds:.0f} s: {verdict}")
    print("  events: " + ", ".join(f"{name} {n}" for name, n in sorted(storm.events.items())))
    for each in storm.outcomes:
        if each.told or not each.holds:
            unnamed = "; its cause is not named" if each.unnamed else ""
            print(f"  after step {each.step}: {each.kind}{unnamed}: {each.told}")
        _show([*([each.hang] if each.hang else []), *each.leaks])
    _show(storm.wrong)
    sys.stdout.flush()


def _show(problems: list[str]) -> None:
    for problem in problems[:_SHOWN]:
        print("  | " + problem.replace("\n", "\n  | "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
