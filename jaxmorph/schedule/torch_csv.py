"""Schedules as torch.distributed.pipelining's compute-only CSV: a row per rank, a column per turn.

A cell such as ``5F2`` is stage 5, action F, microbatch 2; an empty one is idle. The actions are F,
I (gradient of the input, our B), W, and B for a full backward (our BW). Files from before torch
wrote I have B for the gradient of the input: they have W, but no I.

Its stages are our virtual stages: with S ranks, stage s is chunk s // S of rank s % S.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import StageTimes, replay
from jaxmorph.schedule.schedule import Schedule

_CELL = re.compile(r"(\d+)([FIBW])(\d+)", re.ASCII)
_ACTIONS = {OpKind.F: "F", OpKind.B: "I", OpKind.W: "W", OpKind.BW: "B"}
_SPLIT = {"F": (OpKind.F,), "I": (OpKind.B,), "W": (OpKind.W,), "B": (OpKind.B, OpKind.W)}
_WHOLE = _SPLIT | {"B": (OpKind.BW,)}
_OLD = _SPLIT | {"B": (OpKind.B,)}
# A turn is as long as any op, so that what an op needs stands in an earlier column.
_SPLIT_TURNS = StageTimes(1.0, 1.0, 1.0, 0.0, 0.0)
_WHOLE_TURNS = StageTimes(1.0, 1.0, 0.0, 0.0, 0.0)


class _Cell(NamedTuple):
    stage: int
    action: str
    microbatch: int


def parse_torch_csv(text: str, name: str) -> Schedule:
    """Reads a compute-only CSV.

    Full backwards in a file that also splits some are read as B and W right after each other.

    Returns:
        The schedule, not validated; it has as many microbatches as the cells name.

    Raises:
        ValueError: A cell that is no such action, or a stage on another rank than expected.
    """
    lines = list(csv.reader(io.StringIO(text)))
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    if not lines:
        raise ValueError("got no rows, expected one per rank with cells such as 0F0")
    rows = [list(_cells(rank, line)) for rank, line in enumerate(lines)]
    _require_loop_placement(rows)
    kinds = _kinds_of({cell.action for row in rows for cell in row})
    orders = tuple(
        tuple(
            Op(kind, cell.microbatch, cell.stage // len(rows))
            for cell in row
            for kind in kinds[cell.action]
        )
        for row in rows
    )
    microbatches = max((cell.microbatch for row in rows for cell in row), default=-1) + 1
    return Schedule(name, microbatches, orders)


def format_torch_csv(schedule: Schedule) -> str:
    """Writes a schedule as compute-only CSV, which ``parse_torch_csv`` reads back.

    Returns:
        The CSV. An op stands in a later column than all it needs, as torch's runtime wants it.

    Raises:
        ScheduleError: The schedule's stages wait for each other for ever.
    """
    turns = _SPLIT_TURNS if schedule.splits_backward else _WHOLE_TURNS
    times = [turns] * schedule.num_stages
    ran = replay(schedule.orders, schedule.num_microbatches, times, num_chunks=schedule.num_chunks)
    schedule.require_complete(ran.ends)
    width = 1 + max(int(start) for starts in ran.starts for start in starts)
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    for rank, (order, starts) in enumerate(zip(schedule.orders, ran.starts, strict=True)):
        row = [""] * width
        for op, start in zip(order, starts, strict=True):
            stage = op.chunk * schedule.num_stages + rank
            row[int(start)] = f"{stage}{_ACTIONS[op.kind]}{op.microbatch}"
        writer.writerow(row)
    return written.getvalue()


def _cells(rank: int, line: Iterable[str]) -> Iterator[_Cell]:
    for column, cell in enumerate(line):
        word = cell.strip()
        if not word:
            continue
        match = _CELL.fullmatch(word)
        if match is None:
            raise ValueError(
                f"row {rank}, column {column}: got {word!r}, expected an empty cell or a "
                "computation such as 0F0, 1I3, 2W0 or 3B1"
            )
        stage, action, microbatch = match.groups()
        yield _Cell(int(stage), action, int(microbatch))


def _require_loop_placement(rows: Sequence[Sequence[_Cell]]) -> None:
    """Refuses V-shaped and other placements: they have other neighbours and other links."""
    num_ranks = len(rows)
    for rank, row in enumerate(rows):
        for stage in sorted({cell.stage for cell in row}):
            if stage % num_ranks != rank:
                raise ValueError(
                    f"row {rank}: got stage {stage} on rank {rank}, expected it on rank "
                    f"{stage % num_ranks}: of {num_ranks} ranks, stage s must be on rank "
                    f"s mod {num_ranks} (V-shaped placements are not supported)"
                )


def _kinds_of(actions: set[str]) -> dict[str, tuple[OpKind, ...]]:
    """What each action stands for in a file that has these."""
    if "I" in actions:
        return _SPLIT
    return _OLD if "W" in actions else _WHOLE
