"""Schedules in files: torch's CSV, JSON, or the printed grid, as the file's name says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmorph.errors import UserError
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.torch_csv import format_torch_csv, parse_torch_csv

SUFFIXES = (".csv", ".json", ".txt")


def require_schedule_file(path: Path) -> None:
    """Checks that ``save_schedule`` could write a file of this name.

    Raises:
        UserError: An unknown suffix, or a folder that does not exist.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"schedule file: got {path}, expected a name that ends in {', '.join(SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise UserError(f"schedule file: got {path}, but there is no folder {path.parent}")


def save_schedule(path: Path, schedule: Schedule) -> None:
    """Writes a schedule as torch's CSV (.csv), as JSON (.json) or as a grid (.txt).

    Raises:
        UserError: An unknown suffix, or a file that cannot be written.
    """
    require_schedule_file(path)
    if path.suffix == ".csv":
        text = format_torch_csv(schedule)
    elif path.suffix == ".json":
        text = json.dumps(schedule.to_json()) + "\n"
    else:
        text = f"{schedule}\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"schedule file: cannot write {path}: {error.strerror}") from error


def load_schedule(path: Path) -> Schedule:
    """Reads a schedule from a file, without validating it.

    Args:
        path: Torch's compute-only CSV when it ends in ``.csv``; a saved schedule or an answer of
            ``jaxmorph plan --json`` when it ends in ``.json``; else a printed grid.

    Returns:
        The schedule; one from a CSV is called by the file's name.

    Raises:
        UserError: A file that cannot be read, or does not hold a schedule.
    """
    text = _read(path)
    try:
        if path.suffix == ".csv":
            return parse_torch_csv(text, path.stem)
        if path.suffix == ".json":
            return _from_json(json.loads(text))
        return Schedule.parse(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, expected a schedule") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _from_json(data: Any) -> Schedule:
    """A saved schedule, or an answer: it names its schedule, and its orders tell how many ops."""
    expected = 'expected a saved schedule: {"name", "num_microbatches", "orders"}'
    if not isinstance(data, Mapping) or "orders" not in data:
        raise ValueError(f"got a JSON {type(data).__name__} without 'orders', {expected}")
    try:
        rows = [" ".join(row) for row in data["orders"]]
        schedule = Schedule.from_rows(str(data.get("schedule", data.get("name"))), rows)
        num_microbatches = data.get("num_microbatches", schedule.num_microbatches)
        return Schedule(schedule.name, int(num_microbatches), schedule.orders)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"got {error}, {expected}") from error
