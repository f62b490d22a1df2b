"""Every bar and what was measured for it: `python -m benchmarks.judge [FOLDER]`.

Reads what `jaxmorph compare` wrote to FOLDER/NAME for configs/NAME.yaml, by default the committed
results, and runs nothing. For committed results it also has the bars of all benchmarks, and says
which results are older than their configuration, and what contradicts them: bars that were
loosened, tables and pages with other numbers (`make reference` writes those again), and misses
without a reason in docs/results/misses.yaml. The exit code is 1 if a bar is missed, a result older
than its configuration, or anything contradicts.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from benchmarks.judgements import judgements, without_reason
from benchmarks.result_pages import Results, other_pages, read_results
from benchmarks.results import ROOT
from jaxmorph.report.run_matrix import MISSED, NOT_MEASURED


def problems(results: Results) -> list[str]:
    """All that contradicts the committed results."""
    return [
        *(problem for each in results.judged.values() for problem in each.problems),
        *without_reason(results.judged, results.benchmarks, results.reasons),
        *other_pages(results),
    ]


def main() -> int:
    """Print each bar and each contradiction.

    Returns:
        1 if a bar is missed, for a contradiction or a result older than its configuration, or if
        results in a given folder are incomplete.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="of results; the committed ones if not"
    )
    folder = parser.parse_args().folder
    results = (
        read_results()
        if folder is None
        else Results(judgements(ROOT, folder.resolve()), {}, {}, ROOT)
    )
    judged, benchmarks = results.judged, results.benchmarks
    for each in judged.values():
        print(each.headline, *each.bars, sep="\n")
    for name, bars in benchmarks.items():
        print(f"== {name}", *bars, sep="\n")
    contradictions = problems(results) if folder is None else []
    counts = Counter(bar.verdict for each in judged.values() for bar in each.bars)
    counts.update(bar.verdict for bars in benchmarks.values() for bar in bars)
    print(*contradictions, ", ".join(f"{n} {verdict}" for verdict, n in counts.items()), sep="\n")
    if older := [name for name, each in judged.items() if each.outdated_by]:
        print(f"older than its configuration: {', '.join(older)}")
    is_incomplete = folder is not None and (counts[NOT_MEASURED] or not judged)
    return 1 if counts[MISSED] or contradictions or older or is_incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
