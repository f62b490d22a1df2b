"""`make reference`: tables and numbers of pages from the committed results.

What stands between a marker and `<!-- end -->` on a page is made from a comparison's results.json:

    <!-- steps of hol -->               a table: a row for each system, a column for each condition
    <!-- steps of hol: zb, adaptive; healthy, 2-3 30 ms -->    some systems, some conditions
    <!-- ratios of hol: adaptive / zb -->                      one system's step over another's
    <!-- failures of nic-failure -->    whole runs, and what failures cost them
    <!-- results -->                    where all results are from, and how many bars they meet
    <!-- misses -->                     all bars that are missed, and why

In the middle of a line a marker stands for one number. `CELLS` has the other kinds of numbers. A
number of any other JSON file in docs/results is named by file, keys and format:

    <!-- value of rank0/after: parts_ms.detect .1f -->
    <!-- value of figure19/results: runs(falcon; 20 ms).moves.0.open .1f -->
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from benchmarks.judgements import (
    FOLDER,
    TABLE,
    Judgement,
    benchmark_bars,
    judgements,
    read_reasons,
)
from benchmarks.results import ROOT, Bar
from jaxmorph.report.matrix_table import WHOLE_COLUMNS, markdown_table, matrix_markdown, whole_rows
from jaxmorph.report.run_matrix import MET, MISSED, NOT_MEASURED, JudgedBar, Matrix, Run

_MARKER = (
    r"(?P<marker><!-- (?:(?P<whole>results|misses)"
    r"|(?P<what>[a-z]+) of (?P<name>[\w/-]+)(?:: (?P<chosen>[^\n]+?))?) -->)"
)
_MARKED = re.compile(rf"{_MARKER}(?P<old>(?:(?!<!-- ).)*)(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Results:
    """What pages take their numbers from.

    Attributes:
        benchmarks: The bars of the other files.
        reasons: `benchmarks.judgements.read_reasons`.
        root: The folder with docs.
    """

    judged: Mapping[str, Judgement]
    benchmarks: Mapping[str, Sequence[Bar]]
    reasons: Mapping[tuple[str, str], str]
    root: Path


def read_results(root: Path = ROOT) -> Results:
    """The committed results."""
    return Results(judgements(root), benchmark_bars(root), read_reasons(root), root)


def _step(run: Run) -> str:
    marks = f", {run.marks}" if run.marks else ""
    predicted = f" ({run.plan.predicted_ms:,.0f})" if run.plan else ""
    reference = f" *{run.reference_ms:,g}*" if run.reference_ms is not None else ""
    return f"{_median_ms(run):,.0f}{marks}{predicted}{reference}"


def _median_ms(run: Run) -> float:
    if run.step_ms is None or run.failed or run.blocks_to_come:
        raise ValueError(f"{run.system}, {run.condition}: not all steps were measured")
    return run.step_ms.median


CELLS: Mapping[str, Callable[[Run], str]] = {
    "steps": _step,
    "medians": lambda run: f"{_median_ms(run):,.0f}",
    "totals": lambda run: "-" if run.total_s is None else f"{run.total_s:,.1f}",
    "blocked": lambda run: f"{100 * max(run.blocking_stall_rate):.1f} %",
}
"""The text for a run: `steps` is the median (predicted), *published*; `blocked` the worst stage."""


def with_results(page: str, results: Results) -> str:
    """A page with its tables and numbers made again.

    Raises:
        ValueError: A marker asks for what no result has.
    """
    again, number = _MARKED.subn(lambda found: _again(found, results), page)
    if number != len(re.findall(_MARKER, page)):
        raise ValueError("a marker has no <!-- end -->")
    return again


def _again(found: re.Match[str], results: Results) -> str:
    what, name, judged = found["what"], found["name"], results.judged
    if found["whole"] == "results":
        text = _table_of_results(judged)
    elif found["whole"] == "misses":
        text = _table_of_misses(results)
    elif what == "value":
        return found["marker"] + _value(found, results.root / FOLDER / f"{name}.json")
    elif name not in judged:
        raise ValueError(f"{found['marker']}: no result of this name")
    elif what == "failures":
        text = markdown_table(WHOLE_COLUMNS, whole_rows(judged[name].matrix))
    else:
        matrix = judged[name].matrix
        systems, conditions = _chosen(found, matrix)
        rows = [[_cell(found, matrix, row, each) for each in conditions] for row in systems]
        if not found["old"].startswith("\n"):
            return found["marker"] + rows[0][0]
        labelled = zip(map(matrix.label, systems), rows, strict=True)
        text = markdown_table(["", *conditions], ([label, *row] for label, row in labelled))
    return f"{found['marker']}\n\n{text}\n"


def _chosen(found: re.Match[str], matrix: Matrix) -> tuple[list[str], list[str]]:
    """The systems and conditions of a marker; all of the result's if it names none."""
    systems, _, conditions = (found["chosen"] or "").partition("; ")
    return (
        systems.split(", ") if systems else [*matrix.systems],
        conditions.split(", ") if conditions else [*matrix.conditions],
    )


def _cell(found: re.Match[str], matrix: Matrix, row: str, condition: str) -> str:
    try:
        if found["what"] == "ratios":
            run, over = (matrix.runs[system, condition] for system in row.split(" / "))
            return f"{_median_ms(run) / _median_ms(over):.2f}"
        return CELLS[found["what"]](matrix.runs[row, condition])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{found['marker']}: the result has no {row}, {condition}") from error


def _value(found: re.Match[str], path: Path) -> str:
    keys, _, form = (found["chosen"] or "").rpartition(" ")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return format(reduce(_inner, re.findall(_KEY, keys), content), form)
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise ValueError(f"{found['marker']}: {path.name} has no such number: {error!r}") from error


_NAMING = ("system", "condition", "over", "value")  # what runs and bars are called by
_KEY = r"[^.()]+(?:\([^()]+\))?"  # such as `moves` or `runs(falcon; 20 ms)`


def _inner(within: Any, key: str) -> Any:
    """A field, or the item of a list, by its number or by values that it alone has."""
    name, _, values = key.removesuffix(")").partition("(")
    if isinstance(within, list):
        if isinstance(within[0], dict) and "condition" in within[0]:
            raise ValueError(f"got number {key} of runs or bars, which may change: name them")
        return within[int(key)]
    if not values:
        return within[name]
    wanted = set(values.split("; "))
    (item,) = (each for each in within[name] if wanted <= {str(each.get(key)) for key in _NAMING})
    return item


def _table_of_results(judged: Mapping[str, Judgement]) -> str:
    """A row for each result: where it is from, and how many bars it meets."""
    verdicts = (MET, MISSED, NOT_MEASURED)
    heads = ("result", "commit", "date", "load before", "load after", *verdicts, "")
    return markdown_table(heads, (_result_cells(each, verdicts) for each in judged.values()))


def _result_cells(each: Judgement, verdicts: tuple[str, ...]) -> list[str]:
    source, counts = each.matrix.provenance, Counter(bar.verdict for bar in each.bars)
    if source is None:
        raise ValueError(f"{each.name}: its result has no provenance")
    loads = (source.load_before, source.load_after or ())
    older = (
        f"older than its configuration: {'; '.join(each.outdated_by)}" if each.outdated_by else ""
    )
    return [
        f"[{each.name}](../results/{each.name}/{TABLE})",
        source.commit,
        source.date.removesuffix(" UTC"),
        *(f"{load[0]:.1f}" if load else "-" for load in loads),
        *(str(counts[verdict]) for verdict in verdicts),
        older,
    ]


def _table_of_misses(results: Results) -> str:
    """A row for each claim that is missed: under which conditions, by how much, and why."""
    groups: dict[tuple[str, str, str], list[JudgedBar]] = {}
    for each in results.judged.values():
        for bar in each.missed:
            groups.setdefault((each.name, bar.claim, bar.limits), []).append(bar)
    found = [
        (
            name,
            f"{name}/{TABLE}",
            claim,
            limits,
            [f"{bar.condition}: {bar.measured:.3f}" for bar in bars],
        )
        for (name, claim, limits), bars in groups.items()
    ]
    found += [
        (name, f"{name}.json", bar.claim, bar.limits, [f"{bar.value:.3f}"])
        for name, bars in results.benchmarks.items()
        for bar in bars
        if not bar.holds
    ]
    rows = (
        [
            f"[{name}](../results/{file})",
            claim,
            limits,
            ", ".join(measured),
            results.reasons.get((name, claim), ""),
        ]
        for name, file, claim, limits, measured in found
    )
    return markdown_table(("result", "bar", "limit", "missed", "why"), rows)


def pages(root: Path) -> list[Path]:
    """Where markers may be."""
    folder = root / FOLDER
    docs = (page for page in (root / "docs").rglob("*.md") if not page.is_relative_to(folder))
    return sorted([root / "README.md", *docs])


def other_pages(results: Results) -> Iterator[str]:
    """Pages with other tables or numbers than results give."""
    root = results.root
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        try:
            again = with_results(text, results)
        except ValueError as error:
            yield f"{page.relative_to(root)}: {error}"
            continue
        lines = zip(text.splitlines(), again.splitlines(), strict=False)
        if text != again:
            line = next((number for number, (a, b) in enumerate(lines, 1) if a != b), 0)
            where = f"{page.relative_to(root)}:{line}"
            yield f"{where}: not what its result gives; make reference writes it again"


def main() -> None:
    """Write the results' tables, and the pages that have some of their numbers."""
    results = read_results()
    for name, each in results.judged.items():
        (ROOT / FOLDER / name / TABLE).write_text(matrix_markdown(each.matrix), encoding="utf-8")
    for page in pages(ROOT):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_results(text, results), encoding="utf-8")


if __name__ == "__main__":
    main()
