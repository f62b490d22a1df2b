"""Reads the directory of a run or a comparison, which may be running, killed or finished."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxmorph.config import Config, load_config
from jaxmorph.errors import UserError
from jaxmorph.plain_json import parse, without_sum
from jaxmorph.records import Event, StepRecord
from jaxmorph.report.draw.trace import read_chrome_trace
from jaxmorph.report.run_directory import (
    CONFIG,
    EVENTS,
    METRICS,
    RECOVERY,
    RecoveryFile,
    find_traces,
)
from jaxmorph.report.run_matrix import RESULTS, TIMELINES, Matrix
from jaxmorph.schedule.timeline import Timeline

_Line = TypeVar("_Line")


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run directory.

    Attributes:
        config: None if this version can't read it.
        steps: In rising order, each once; only steps with a finite `step_s`.
        events: In the order of the file.
        num_unreadable: The number of lines that can't be read, such as a killed run's last.
    """

    path: Path
    config_text: str
    config: Config | None
    steps: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    traces: Mapping[int, Path]
    num_unreadable: int = 0
    goodput: float | None = None


def read_run_files(path: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        UserError: It is not a run's directory, or can't be read.
    """
    if not (path / CONFIG).is_file():
        raise UserError(f"report: got {path}, expected a run directory, with a {CONFIG}")
    try:
        steps, unreadable_steps = _read_lines(path / METRICS, StepRecord)
        events, unreadable_events = _read_lines(path / EVENTS, Event)
        config_text = (path / CONFIG).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"report: {path}: cannot read: {error.strerror}") from error
    timed = [record for record in steps if math.isfinite(record.step_s)]
    by_step = {record.step: record for record in timed}
    return RunFiles(
        path=path,
        config_text=config_text,
        config=_config(path / CONFIG),
        steps=tuple(by_step[step] for step in sorted(by_step)),
        events=tuple(events),
        traces=find_traces(path),
        num_unreadable=unreadable_steps + unreadable_events + len(steps) - len(timed),
        goodput=_goodput(path / RECOVERY),
    )


def read_trace(path: Path) -> dict[str, Timeline]:
    """A step's timelines, `planned` and `measured`; empty if the file can't be read."""
    try:
        found = read_chrome_trace(_parsed(path.read_text(encoding="utf-8"), path))
    except (OSError, ValueError):
        return {}
    return {name.split(",")[0]: timeline for name, timeline in found.items()}


def _config(path: Path) -> Config | None:
    try:
        return load_config(path)
    except UserError:
        return None


def _goodput(path: Path) -> float | None:
    try:
        found = parse(RecoveryFile, _parsed(path.read_text(encoding="utf-8"), path), str(path))
    except (OSError, ValueError):
        return None
    return finite(found.goodput)


def _read_lines(path: Path, kind: type[_Line]) -> tuple[list[_Line], int]:
    """The readable lines, and the number of others."""
    if not path.is_file():
        return [], 0
    lines: list[_Line] = []
    unreadable = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in filter(str.strip, file):
            try:
                lines.append(parse(kind, _parsed(text, path), path.name))
            except ValueError:  # no JSON, or not of this type
                unreadable += 1
    return lines, unreadable


def _parsed(text: str, path: Path) -> Any:
    """Parse JSON, compare its checksum, and replace lone surrogates, which no page can hold."""
    found = without_sum(json.loads(text), path.name)
    if "\\ud" not in text.lower():
        return found
    return json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))


def finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def in_ms(seconds: float | None) -> float | None:
    """Finite seconds as milliseconds; None for anything else."""
    known = finite(seconds)
    return None if known is None else 1e3 * known


class ShownStep(NamedTuple):
    """A step whose timelines are drawn.

    Attributes:
        name: Such as `step 41, during`.
        step_ms: From barrier to barrier, if known.
    """

    name: str
    measured: Timeline
    planned: Timeline | None = None
    step_ms: float | None = None


@dataclass(frozen=True)
class ComparisonFiles:
    """The contents of a comparison's directory.

    Attributes:
        steps: By condition, a typical step of each system.
    """

    matrix: Matrix
    steps: Mapping[str, Sequence[ShownStep]]


def is_comparison(path: Path) -> bool:
    """Whether a directory is a comparison's, with or without results."""
    if (path / RESULTS).is_file():
        return True
    # A run may have a configuration with `compare`, but has `metrics.jsonl` from its start.
    if not (path / CONFIG).is_file() or (path / METRICS).exists():
        return False
    config = _config(path / CONFIG)
    return config is not None and config.compare is not None


def read_comparison_files(path: Path) -> ComparisonFiles:
    """Read a comparison's directory.

    Raises:
        UserError: It has no results yet, or can't be read.
    """
    if not (path / RESULTS).is_file():
        raise UserError(
            f"report: {path}: no {RESULTS}, expected one: jaxmorph compare writes it after its "
            "first system"
        )
    at = path / RESULTS
    try:
        data = _parsed(at.read_text(encoding="utf-8"), at)
        matrix = Matrix.from_json(data)
        at = path / TIMELINES
        timelines = _parsed(at.read_text(encoding="utf-8"), at) if at.is_file() else {}
        steps = {
            condition: [
                ShownStep(system, Timeline.from_json(timeline), step_ms=timeline.get("step_ms"))
                for system, timeline in of_systems.items()
            ]
            for condition, of_systems in timelines.items()
        }
    except OSError as error:
        raise UserError(f"report: cannot read {at}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected what jaxmorph compare writes"
        raise UserError(f"report: {at}: got {error!r}, {expected}") from error
    return ComparisonFiles(matrix, steps)
