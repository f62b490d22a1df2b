"""The results of comparisons, held against their configurations, and the bars of other results."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path

import yaml

from benchmarks.results import ROOT, Bar, bars_of
from jaxmorph.compare.provenance import configuration_digest
from jaxmorph.config import load_config
from jaxmorph.config.compare_section import Compare
from jaxmorph.report.bars import judge
from jaxmorph.report.matrix_table import matrix_markdown
from jaxmorph.report.run_matrix import MISSED, NOT_MEASURED, RESULTS, JudgedBar, Matrix

FOLDER = Path("docs/results")
REASONS = FOLDER / "misses.yaml"
TABLE = "table.md"


@dataclass(frozen=True)
class Judgement:
    """A result, held against its configuration as it is now.

    Attributes:
        bars: With the configuration's limits.
        outdated_by: Why the configuration no longer fits the result; empty if it does.
        problems: What contradicts the result.
    """

    name: str
    matrix: Matrix
    bars: tuple[JudgedBar, ...]
    outdated_by: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def missed(self) -> list[JudgedBar]:
        """The bars that are missed."""
        return [bar for bar in self.bars if bar.verdict == MISSED]

    @property
    def headline(self) -> str:
        """Where it is from, and whether it is older than its configuration."""
        source = self.matrix.provenance
        where = "no provenance" if source is None else f"{source.commit}, {source.date}"
        why = ", ".join(self.outdated_by)
        return f"== {self.name}: {where}" + f"; older than its configuration: {why}" * bool(why)


def judgements(root: Path = ROOT, folder: Path = FOLDER) -> dict[str, Judgement]:
    """The results in a folder, by the names of their configurations."""
    with chdir(root):  # traces are named from there
        return {
            path.stem: _judgement(path, folder / path.stem)
            for path in sorted(Path("configs").glob("*.yaml"))
            if (folder / path.stem / RESULTS).is_file()
        }


def _judgement(path: Path, result: Path) -> Judgement:
    config = load_config(path)
    if config.compare is None:
        raise ValueError(f"{path}: no section compare, but {result / RESULTS} is there")
    matrix = Matrix.from_json(json.loads((result / RESULTS).read_text(encoding="utf-8")))
    bars = judge(config.compare, matrix.runs)
    return Judgement(
        name=path.stem,
        matrix=matrix,
        bars=bars,
        outdated_by=tuple(_outdated_by(matrix, config.compare, configuration_digest(config))),
        problems=(
            *(f"{path.stem}: {each}" for each in _contradictions(matrix.bars, bars)),
            *(
                f"{path.stem}: {bar.condition}: {bar.claim} is not measured"
                for bar in bars
                if bar.verdict == NOT_MEASURED
            ),
            *_other_tables(matrix, result / TABLE),
        ),
    )


def _outdated_by(matrix: Matrix, compare: Compare, digest: str) -> Iterator[str]:
    """Why a configuration no longer fits a result."""
    if matrix.provenance is None or matrix.provenance.configuration != digest:
        yield "what it measures has changed"
    names = [condition.name for condition in compare.conditions]
    wanted = product(compare.systems, names)
    missing = {system for system, name in wanted if (system, name) not in matrix.runs}
    if missing:
        yield f"no runs of {', '.join(sorted(missing))}"


def _contradictions(recorded: Sequence[JudgedBar], now: Sequence[JudgedBar]) -> Iterator[str]:
    """Bars that are looser than those that a result was judged by; new and stricter ones may be."""
    current = {_subject(bar): bar for bar in now}
    for bar in recorded:
        name, found = f"{bar.condition}: {bar.claim}", current.get(_subject(bar))
        if found is None:
            yield f"{name}: the bar ({bar.limits}) is gone from the configuration"
        elif _looser(found, bar):
            yield f"{name}: the bar was {bar.limits}, and is {found.limits} without a new result"
        elif found.measured != bar.measured:
            yield f"{name}: recorded as {bar.measured}, but the runs give {found.measured}"


def _subject(bar: JudgedBar) -> tuple[object, ...]:
    """What a bar limits, and from which sides."""
    sides = bar.at_least is None, bar.at_most is None
    return bar.system, bar.condition, bar.value, bar.over, *sides


def _looser(bar: JudgedBar, than: JudgedBar) -> bool:
    low, high = ((each.at_least, each.at_most) for each in (bar, than))
    is_lower = (-inf if low[0] is None else low[0]) < (-inf if high[0] is None else high[0])
    return is_lower or (inf if low[1] is None else low[1]) > (inf if high[1] is None else high[1])


def _other_tables(matrix: Matrix, path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    if text != matrix_markdown(matrix):
        yield f"{path}: not the table of {RESULTS}; make reference writes it again"


def benchmark_bars(root: Path = ROOT) -> dict[str, list[Bar]]:
    """The bars of all other results, by the names of their files, such as `speed/start_up`."""
    folder = root / FOLDER
    files = (path for path in sorted(folder.rglob("*.json")) if path.name != RESULTS)
    bars = {str(path.relative_to(folder).with_suffix("")): bars_of(path) for path in files}
    return {name: each for name, each in bars.items() if each}


def read_reasons(root: Path = ROOT) -> dict[tuple[str, str], str]:
    """Why bars are missed, by result and claim.

    Raises:
        ValueError: A claim has two reasons.
    """
    reasons: dict[tuple[str, str], str] = {}
    for entry in yaml.safe_load((root / REASONS).read_text(encoding="utf-8")):
        for name, claims in entry["bars"].items():
            for claim in claims:
                if (name, claim) in reasons:
                    raise ValueError(f"{REASONS}: {name}: {claim}: two reasons, expected one")
                reasons[name, claim] = " ".join(entry["reason"].split())
    return reasons


def without_reason(
    judged: Mapping[str, Judgement],
    benchmarks: Mapping[str, Sequence[Bar]],
    reasons: Mapping[tuple[str, str], str],
) -> Iterator[str]:
    """Misses without a reason, and reasons without a miss."""
    missed = {(name, bar.claim) for name, each in judged.items() for bar in each.missed}
    missed |= {
        (name, bar.claim) for name, bars in benchmarks.items() for bar in bars if not bar.holds
    }
    for name, claim in sorted(missed - reasons.keys()):
        yield f"{REASONS}: {name}: {claim} is missed, and no reason is given"
    for name, claim in sorted(reasons.keys() - missed):
        yield f"{REASONS}: {name}: {claim} is not missed, but a reason is given"
