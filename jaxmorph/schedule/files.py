"""Reads and writes schedules as torch's CSV, as JSON or as the printed grid, by file suffix.

The CSV is torch.distributed.pipelining's: a row per rank, a column per turn. A cell such as ``5F2``
is stage 5, action F, microbatch 2; an empty cell is idle. The actions are F, I (gradient of the
input, our B), W, and B for a full backward (our BW). Older files have no I and write B for the
gradient of the input beside W. ``(5F2;0B1)OVERLAP_F_B`` is two actions: torch runs them side by
side, we run one after the other. Torch's stages are our virtual stages. We write compute-only
files, which have only these actions. Other files also have messages and actions on a stage's
parameters; we skip both when reading, because they follow from the order of ops.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmorph.errors import UserError, quoted
from jaxmorph.placement import Place, Placement
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import StageTimes, replay
from jaxmorph.schedule.schedule import Schedule

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

    ``.csv`` is torch's CSV, and its schedule gets the file's name; ``.json`` is a
    saved schedule or an answer of ``jaxmorph plan --json``; any other file is a printed grid.

    Raises:
        UserError: A file that cannot be read or does not hold a schedule.
    """
    text = _text_of(path)
    try:
        if path.suffix == ".csv":
            return parse_torch_csv(text, path.stem)
        if path.suffix == ".json":
            return _from_json(json.loads(text))
        return Schedule.parse(text)
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path}: {error}") from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, expected a schedule") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _from_json(data: Any) -> Schedule:
    """A saved schedule, or an answer of the planner, which has no ``num_microbatches``."""
    expected = 'expected a saved schedule: {"name", "num_microbatches", "orders"}'
    if not isinstance(data, Mapping) or "orders" not in data:
        raise ValueError(f"got a JSON {type(data).__name__} without 'orders', {expected}")
    try:
        rows = [" ".join(row) for row in data["orders"]]
        schedule = Schedule.from_rows(str(data.get("schedule", data.get("name"))), rows)
        num_microbatches = data.get("num_microbatches", schedule.num_microbatches)
        sizes = {"name": schedule.name, "num_microbatches": int(num_microbatches)}
        return Schedule.from_json({**data, **sizes})
    except (TypeError, OverflowError) as error:
        raise ValueError(f"got {error}, {expected}") from error


_CELL = re.compile(r"(\d+)([FIBW])(\d+)", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_NO_OP = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_ACTIONS = {OpKind.F: "F", OpKind.B: "I", OpKind.W: "W", OpKind.BW: "B"}
_SPLIT = {"F": (OpKind.F,), "I": (OpKind.B,), "W": (OpKind.W,), "B": (OpKind.B, OpKind.W)}
_WHOLE = _SPLIT | {"B": (OpKind.BW,)}
_OLD = _SPLIT | {"B": (OpKind.B,)}
# Every op takes one turn, so that what an op needs is in an earlier column.
_SPLIT_TURNS = StageTimes(1.0, 1.0, 1.0, 0.0, 0.0)
_WHOLE_TURNS = StageTimes(1.0, 1.0, 0.0, 0.0, 0.0)


class _Cell(NamedTuple):
    stage: int
    action: str
    microbatch: int


def parse_torch_csv(text: str, name: str) -> Schedule:
    """Reads a CSV of either kind, without validating the schedule.

    In a file that splits some backwards, full ones are read as B followed by W.

    Raises:
        ValueError: An unknown action, or a stage on another rank than expected.
        csv.Error: Not a CSV, or a cell of over 128 KiB, as an unclosed quote makes.
    """
    lines = list(csv.reader(io.StringIO(text)))
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    if not lines:
        raise ValueError("got no rows, expected one per rank with cells such as 0F0")
    rows = [list(_cells(rank, line)) for rank, line in enumerate(lines)]
    placement = _placement(rows)
    kinds = _kinds_of({cell.action for row in rows for cell in row})
    orders = tuple(
        tuple(
            Op(kind, cell.microbatch, placement.place(cell.stage).chunk)
            for cell in row
            for kind in kinds[cell.action]
        )
        for row in rows
    )
    microbatches = max((cell.microbatch for row in rows for cell in row), default=-1) + 1
    return Schedule(name, microbatches, orders, placement.kind)


def format_torch_csv(schedule: Schedule) -> str:
    """Writes a schedule as compute-only CSV, which ``parse_torch_csv`` reads back.

    A W of several microbatches becomes one for each, as torch has no groups. An op is in a later
    column than its dependencies, as torch's runtime requires.

    Raises:
        ScheduleError: The schedule's stages wait for each other for ever.
    """
    turns = _SPLIT_TURNS if schedule.splits_backward else _WHOLE_TURNS
    placement = schedule.placement
    times = [turns] * placement.num_virtual_stages
    ran = replay(schedule.orders, schedule.num_microbatches, placement, times)
    schedule.require_complete(ran.ends)
    width = int(max(end for ends in ran.ends for end in ends))
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    for rank, (order, starts) in enumerate(zip(schedule.orders, ran.starts, strict=True)):
        row = [""] * width
        for op, start in zip(order, starts, strict=True):
            stage = placement.virtual_stage(Place(rank, op.chunk))
            for turn, microbatch in enumerate(op.microbatches, int(start)):
                row[turn] = f"{stage}{_ACTIONS[op.kind]}{microbatch}"
        writer.writerow(row)
    return written.getvalue()


def _cells(rank: int, line: Iterable[str]) -> Iterator[_Cell]:
    for column, cell in enumerate(line):
        both = _OVERLAPPED.fullmatch(cell.strip())
        for word in both[1].split(";") if both else [cell.strip()]:
            if not word or _NO_OP.fullmatch(word):
                continue
            match = _CELL.fullmatch(word)
            if match is None:
                raise ValueError(
                    f"row {rank}, column {column}: got {quoted(word)}, expected an empty cell or a "
                    "computation such as 0F0, 1I3, 2W0 or 3B1"
                )
            stage, action, microbatch = match.groups()
            yield _Cell(int(stage), action, int(microbatch))


def _placement(rows: Sequence[Sequence[_Cell]]) -> Placement:
    """The placement whose virtual stages the rows have.

    Raises:
        ValueError: The stages are placed neither around the ranks nor in a V.
    """
    last = max((cell.stage for row in rows for cell in row), default=0)
    wrapped = Placement(len(rows), 1 + last // len(rows))
    misplaced = _first_misplaced(rows, wrapped)
    if misplaced is None:
        return wrapped
    in_a_v = Placement(len(rows), 2, "v")
    if wrapped.num_chunks == 2 and _first_misplaced(rows, in_a_v) is None:
        return in_a_v
    rank, stage = misplaced
    raise ValueError(
        f"row {rank}: got stage {stage} on rank {rank}, expected it on rank "
        f"{wrapped.place(stage).rank}: of {len(rows)} ranks, stage s must be on rank s mod "
        f"{len(rows)}, or two stages of each rank in a V"
    )


def _first_misplaced(
    rows: Sequence[Sequence[_Cell]], placement: Placement
) -> tuple[int, int] | None:
    """The first rank with stages that a placement has on another rank, and the lowest of these."""
    for rank, row in enumerate(rows):
        for stage in sorted({cell.stage for cell in row}):
            if placement.place(stage).rank != rank:
                return rank, stage
    return None


def _kinds_of(actions: set[str]) -> dict[str, tuple[OpKind, ...]]:
    """The ops of each action, in a file with these actions."""
    if "I" in actions:
        return _SPLIT
    return _OLD if "W" in actions else _WHOLE
