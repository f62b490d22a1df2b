"""Reads a trace of how links behaved: a table of times, links and what each was like from then."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.transport.link_emulator import LinkCondition

COLUMNS = ("time_s", "between", "latency_ms", "bandwidth_mbps", "jitter_ms", "cut")
_CUT = {"": False, "0": False, "false": False, "1": True, "true": True}
_LONGEST_VALUE = 60  # characters of a value quoted in an error

Directions = tuple[tuple[int, int], int | None]
"""The ranks that a row's link joins, and the sending one where it is of one direction alone."""


@dataclass(frozen=True)
class _Place:
    """Where in the file something stands, for errors."""

    path: Path
    line: int

    def error(self, column: str, got: str, expected: str) -> UserError:
        shown = repr(got if len(got) <= _LONGEST_VALUE else got[: _LONGEST_VALUE - 3] + "...")
        return UserError(
            f"{self.path}: line {self.line}: {column}: got {shown}, expected {expected}"
        )


def read_link_trace(path: str | Path) -> list[LinkCondition]:
    """Reads a CSV file with the header `time_s,between,latency_ms,bandwidth_mbps,jitter_ms,cut`.

    `between` is `2-3` for both directions of a link, `2>3` for that from rank 2 to rank 3. A row
    holds until the next row of the same `between`, the last one to the end; a link of both is
    subject to both. Times of one `between` increase. Empty cells, but for `time_s` and `between`,
    mean no latency, no limit, no jitter and no cut.

    Args:
        path: The file, UTF-8.

    Returns:
        One condition for each row, with its span of time since the origin.

    Raises:
        UserError: If the file can't be read, or a line is wrong; it names file, line, what was
            got and what was expected.
    """
    path = Path(path)
    last: dict[Directions, int] = {}
    conditions: list[LinkCondition] = []
    for place, row in _rows(path):
        condition = _condition(place, row)
        key = (condition.between, condition.source)
        if key in last:
            before = conditions[last[key]]
            _check_later(place, row, before)
            conditions[last[key]] = replace(before, to_s=condition.from_s)
        last[key] = len(conditions)
        conditions.append(condition)
    return conditions


def _rows(path: Path) -> Iterator[tuple[_Place, Mapping[str, str]]]:
    """Each row's cells by column; empty lines are passed over."""
    lines = csv.reader(_text(path).splitlines())
    header = next(lines, [])
    if tuple(cell.strip() for cell in header) != COLUMNS:
        raise _Place(path, 1).error("header", ",".join(header), ",".join(COLUMNS))
    for cells in lines:
        place = _Place(path, lines.line_num)
        if any(cell.strip() for cell in cells):
            yield place, _by_column(place, cells)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(f"{path}: {reason}, expected a table of {','.join(COLUMNS)}")


def _by_column(place: _Place, cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(COLUMNS):
        raise place.error("row", ",".join(cells), f"{len(COLUMNS)} cells: {','.join(COLUMNS)}")
    return dict(zip(COLUMNS, (cell.strip() for cell in cells), strict=True))


def _condition(place: _Place, row: Mapping[str, str]) -> LinkCondition:
    between, source = _directions(place, row["between"])
    bandwidth_mbps = _number(place, row, "bandwidth_mbps")
    if bandwidth_mbps == 0:
        raise place.error("bandwidth_mbps", row["bandwidth_mbps"], "a number above 0, or nothing")
    if row["cut"].lower() not in _CUT:
        raise place.error("cut", row["cut"], "0, 1, false, true, or nothing")
    if not row["time_s"]:
        raise place.error("time_s", "", "a number of at least 0")
    return LinkCondition(
        between,
        latency_ms=_number(place, row, "latency_ms") or 0.0,
        bandwidth_mbps=bandwidth_mbps,
        jitter_ms=_number(place, row, "jitter_ms") or 0.0,
        cut=_CUT[row["cut"].lower()],
        from_s=_number(place, row, "time_s"),
        source=source,
    )


def _directions(place: _Place, text: str) -> Directions:
    sign = ">" if ">" in text else "-"
    left, _, right = text.partition(sign)
    ranks = [part.strip() for part in (left, right)]
    one, other = (
        int(rank) if rank.isascii() and rank.isdecimal() and len(rank) < 6 else -1 for rank in ranks
    )
    if min(one, other) < 0 or one == other:
        raise place.error("between", text, "two ranks such as 2-3, or 2>3 for one direction")
    between = (min(one, other), max(one, other))
    return between, one if sign == ">" else None


def _number(place: _Place, row: Mapping[str, str], column: str) -> float | None:
    """The number in a cell, None where the cell is empty."""
    if not row[column]:
        return None
    try:
        number = float(row[column])
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise place.error(column, row[column], "a number of at least 0")
    return number


def _check_later(place: _Place, row: Mapping[str, str], before: LinkCondition) -> None:
    if before.from_s is not None and float(row["time_s"]) <= before.from_s:
        expected = f"more than the {before.from_s:g} of the row before it of {row['between']}"
        raise place.error("time_s", row["time_s"], expected)
