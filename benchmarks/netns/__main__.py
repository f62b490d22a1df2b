"""The data plane and training on a real network: `python -m benchmarks.netns [--out FILE]`.

Every host is a set of network, host name and mount namespaces, with two cards that can be slowed
down and taken away; it takes root, and little other work on the machine. Exit code 1 where a bar is
missed, 0 where all are kept or where namespaces can't be made, with one line that says so.
"""

import argparse
import itertools
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.netns.namespaces import why_unavailable
from benchmarks.netns.nic_cases import nic_outcomes
from benchmarks.netns.outcomes import HEADING
from benchmarks.netns.stream_cases import stream_outcomes
from benchmarks.netns.training_cases import training_outcomes
from benchmarks.results import provenance, write_json

_PARTS = {"streams": stream_outcomes, "training": training_outcomes, "nic": nic_outcomes}


def main() -> int:
    """Print a row per figure; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(_PARTS))
    parser.add_argument("--out", type=Path, help="a JSON file with all details")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in _PARTS]
    if unknown:
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(_PARTS)}")
    if (why := why_unavailable()) is not None:
        print(f"skipped: {why}")
        return 0
    values = provenance("benchmarks.netns")
    print(HEADING)
    outcomes = []
    for outcome in itertools.chain(*(_PARTS[part]() for part in arguments.parts or _PARTS)):
        outcomes.append(outcome)
        print(outcome.row(), flush=True)
        if arguments.out:
            found = [asdict(each) | {"passes": each.passes} for each in outcomes]
            write_json(arguments.out, values | {"outcomes": found})
    return 0 if all(outcome.passes for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
