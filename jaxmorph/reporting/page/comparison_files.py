"""What a comparison's directory says."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxmorph.config import load_config
from jaxmorph.errors import UserError
from jaxmorph.reporting.page.timelines import ShownStep
from jaxmorph.reporting.run_directory import CONFIG, METRICS
from jaxmorph.reporting.run_matrix import Matrix
from jaxmorph.schedule.timeline import Timeline

RESULTS, TIMELINES = "results.json", "timelines.json"


@dataclass(frozen=True)
class ComparisonFiles:
    """A comparison's directory as read.

    Attributes:
        steps: By condition and system, a typical step.
    """

    matrix: Matrix
    steps: Mapping[str, Mapping[str, ShownStep]]


def is_comparison(path: Path) -> bool:
    """Whether a directory is a comparison's, though it may have no results yet.

    Every run has a `metrics.jsonl` from its start, even one of a configuration that compares.

    Args:
        path: What `jaxmorph train` or `jaxmorph compare` has written.
    """
    if (path / RESULTS).is_file():
        return True
    if not (path / CONFIG).is_file() or (path / METRICS).exists():
        return False
    try:
        return load_config(path / CONFIG).compare is not None
    except UserError:
        return False


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
        matrix = Matrix.from_json(json.loads(at.read_text(encoding="utf-8")))
        at = path / TIMELINES
        timelines = json.loads(at.read_text(encoding="utf-8")) if at.is_file() else {}
        steps = {
            condition: {
                system: ShownStep(
                    system, Timeline.from_json(timeline), step_ms=timeline.get("step_ms")
                )
                for system, timeline in of_systems.items()
            }
            for condition, of_systems in timelines.items()
        }
    except OSError as error:
        raise UserError(f"report: cannot read {at}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected what jaxmorph compare writes"
        raise UserError(f"report: {at}: got {error!r}, {expected}") from error
    return ComparisonFiles(matrix, steps)
