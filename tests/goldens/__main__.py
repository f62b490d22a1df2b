"""What a refactoring must not change: `make goldens`, or `python -m tests.goldens`.

Captures answers of the planner, lowered programs, traced programs of stages and short runs, and
compares them with what is committed in `plans.jsonl`, `programs.jsonl`, `stages.jsonl` and
`runs.jsonl`, value by value. Whatever depends on timing is left out; of events the order of each
link's is compared, where that is always the same. Losses are compared to the bit, and parameters by
digests, where JAX and the processor are those that `runs.jsonl` names; elsewhere losses within
1e-4, and no digests. `tests/stage/test_build.py` compares the programs of stages too.

    make goldens                        compare with what is committed
    make goldens AGAINST=COMMIT         with what COMMIT does here and now: all of it to the bit
    make goldens ONLY=runs              one part: plans, programs, stages or runs
    make goldens UPDATE=1               commit what is so now: say in the commit why it changed
"""

import argparse
import contextlib
import difflib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.old_and_new import checked_out
from tests.goldens import capture

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PARTS = ("plans", "programs", "stages", "runs")
_TOLERANCE = 1e-4
_MOST_SHOWN = 12
Records = dict[str, Any]


def captured(tree: Path, part: str) -> Records:
    """What a tree does, by the name of each case; a line that has no name, by its number."""
    print(f"{part} of {tree}", file=sys.stderr, flush=True)
    match part:
        case "plans":
            records = capture.plans(tree)
        case "programs":
            records = capture.programs(tree)
        case "stages":
            records = capture.stages(tree)
        case _:
            records = capture.runs(tree)
    return _by_name(records)


def _by_name(records: Any) -> Records:
    return {record["name"] or f"line {at}": record for at, record in enumerate(records)}


def differences(was: Any, now: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """What differs, a line for each, of values made of JSON."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            if key not in was or key not in now:
                yield f"{where}/{key}: {'gone' if key in was else 'new'}"
            else:
                yield from differences(was[key], now[key], tolerance, f"{where}/{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for at, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from differences(one, other, tolerance, f"{where}[{at}]")
    elif isinstance(was, float) and isinstance(now, float):
        if was != now and not math.isclose(was, now, rel_tol=tolerance):
            yield f"{where}: was {was!r}, is {now!r}"
    elif isinstance(was, str) and isinstance(now, str) and "\n" in was + now:
        lines = difflib.unified_diff(was.splitlines(), now.splitlines(), lineterm="", n=1)
        yield from (f"{where}: {line}" for line in list(lines)[2:] if was != now)
    elif was != now:
        yield f"{where}: was {was!r}, is {now!r}"


def compare(was: Records, now: Records) -> list[str]:
    """What differs between two captures of one part."""
    if was.pop("environment", None) == now.pop("environment", None):
        return list(differences(was, now, tolerance=0.0))
    print(f"another environment: losses within {_TOLERANCE}, no digests", file=sys.stderr)
    for record in (*was.values(), *now.values()):
        record.pop("parameters", None)
    return list(differences(was, now, _TOLERANCE))


def committed(part: str) -> Records:
    """What is committed of a part."""
    lines = (HERE / f"{part}.jsonl").read_text().splitlines()
    return _by_name(map(json.loads, lines))


def write(part: str, records: Records) -> None:
    """Writes what is to be committed, a line for each case."""
    lines = (json.dumps(record) + "\n" for record in records.values())
    (HERE / f"{part}.jsonl").write_text("".join(lines))


def main() -> int:
    """Prints what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument("--against", metavar="COMMIT", help="compare with a commit, captured here")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--update", action="store_true", help="write what is so now")
    options = parser.parse_args()
    found = []
    with checked_out(options.against) if options.against else contextlib.nullcontext() as old:
        for part in [options.only] if options.only else PARTS:
            now = captured(ROOT, part)
            if options.update:
                write(part, now)
                continue
            was = committed(part) if old is None else captured(old, part)
            found += [f"{part}: {line}" for line in compare(was, now)]
    for line in found[:_MOST_SHOWN]:
        print(line)
    if not options.update:
        print(f"{len(found)} differences" if found else "nothing differs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
