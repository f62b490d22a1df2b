"""Reads a trace of link conditions: a CSV table by time or by step."""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from jaxmorph.config.link_problems import possible_links
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.errors import UserError, quoted
from jaxmorph.placement import ALONE, Replica
from jaxmorph.records import AffectedRoute, Link

TIME, STEP = "time_s", "step"
LINKS = "links"
BEHAVIOUR = ("latency_ms", "bandwidth_mbps", "jitter_ms", "cut")
ROUTE = "route"
_COLUMNS = (*BEHAVIOUR, ROUTE)
_HEADER = f"{TIME} or {STEP}, {LINKS}, then some of {','.join(_COLUMNS)}"
_CUT = {"": False, "0": False, "false": False, "1": True, "true": True}
_COMMENT = "#"
_AROUND_SIGN = re.compile(r"\s*([->])\s*")

Row = Mapping[str, str]
Directions = tuple[tuple[int, int], int | None]
"""The ranks that a link joins, and the sending one if only one direction is meant."""
Subject = tuple[Directions, AffectedRoute]
"""The directions and the route that a row describes."""


@dataclass(frozen=True)
class _Place:
    """A line of the file, for errors."""

    path: Path
    line: int

    def error(self, column: str, got: str, expected: str) -> UserError:
        where = f"{self.path}: line {self.line}: {column}"
        return UserError(f"{where}: got {quoted(got)}, expected {expected}")


def read_link_trace(path: str | Path, replica: Replica = ALONE) -> list[LinkCondition]:
    """Reads a CSV file with a header such as `time_s,links,latency_ms` or `step,links,latency_ms`.

    - The first column is the start of a row: seconds since the origin, or a step. For each link
      and route a row applies until the next one; starts increase.
    - The second has one or more links, separated by spaces: `2-3` is both directions
      of a link, `2>3` the one from rank 2 to rank 3. A message is subject to rows of its link and
      to rows of its direction. With replicas, `r1:2-3` is the link of replica 1 alone, to which
      rows of `2-3` apply too.
    - `latency_ms`, `bandwidth_mbps`, `jitter_ms`, `cut` and `route` are optional and in any order.
      An empty cell means no latency, no limit, no jitter, no cut, both routes.
    - Empty lines and lines that begin with `#` are skipped.

    Returns:
        One condition for each link of the replica in each row, with its span of time or steps.

    Raises:
        UserError: The file can't be read, or a line is wrong; it names file, line, got, expected.
    """
    last: dict[Subject, LinkCondition] = {}
    conditions: list[LinkCondition] = []
    for place, row in _rows(Path(path)):
        for link, condition in _conditions(place, row, replica):
            key = _subject(condition)
            if key in last:
                _check_later(place, row, link, condition, last[key])
            last[key] = condition
            conditions.append(condition)
    return until_next(conditions)


def until_next(conditions: Iterable[LinkCondition]) -> list[LinkCondition]:
    """Ends each condition where the next one of the same link, direction and route begins.

    Args:
        conditions: In order for each link; all begin at a time, or all at a step.
    """
    ended = list(conditions)
    last: dict[Subject, int] = {}
    for index, condition in enumerate(ended):
        key = _subject(condition)
        if key in last:
            before = ended[last[key]]
            ended[last[key]] = replace(before, to_s=condition.from_s, to_step=condition.from_step)
        last[key] = index
    return ended


def _subject(condition: LinkCondition) -> Subject:
    return (condition.between, condition.source), condition.route


def _rows(path: Path) -> Iterator[tuple[_Place, Row]]:
    """Each row's cells by column."""
    columns: tuple[str, ...] | None = None
    for line, cells in _lines(path):
        place = _Place(path, line)
        cells = [cell.strip() for cell in cells]
        if not any(cells) or cells[0].startswith(_COMMENT):
            continue
        if columns is None:
            columns = _columns(place, cells)
        elif len(cells) == len(columns):
            yield place, dict(zip(columns, cells, strict=True))
        else:
            expected = f"{len(columns)} cells: {','.join(columns)}"
            raise place.error("row", ",".join(cells), expected)
    if columns is None:
        raise _Place(path, 1).error("header", "", _HEADER)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each line's number and cells."""
    lines = csv.reader(_text(path).splitlines())
    try:
        for cells in lines:
            yield lines.line_num, cells
    except csv.Error as error:
        raise UserError(f"{path}: line {lines.line_num}: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(f"{path}: {reason}, expected a table of {_HEADER}")


def _columns(place: _Place, header: Sequence[str]) -> tuple[str, ...]:
    is_known = (
        len(header) > 2
        and header[0] in (TIME, STEP)
        and header[1] == LINKS
        and set(header[2:]) <= set(_COLUMNS)
        and len(set(header)) == len(header)
    )
    if not is_known:
        raise place.error("header", ",".join(header), _HEADER)
    return tuple(header)


def _conditions(place: _Place, row: Row, replica: Replica) -> Iterator[tuple[str, LinkCondition]]:
    """The condition of each link of the replica in a row, with the link as written."""
    when = STEP if STEP in row else TIME
    bandwidth_mbps = _number(place, row, "bandwidth_mbps")
    if bandwidth_mbps == 0:
        raise place.error("bandwidth_mbps", row["bandwidth_mbps"], "a number above 0, or nothing")
    cut = row.get("cut", "")
    if cut.lower() not in _CUT:
        raise place.error("cut", cut, "0, 1, false, true, or nothing")
    route = row.get(ROUTE) or "both"
    if route not in get_args(AffectedRoute):
        raise place.error(ROUTE, route, "both, direct, delegated, or nothing")
    for link in _AROUND_SIGN.sub(r"\1", row[LINKS]).split() or [""]:
        found = _directions(place, link, replica)
        if found is None:
            continue
        between, source = found
        yield (
            link,
            LinkCondition(
                between,
                latency_ms=_number(place, row, "latency_ms") or 0.0,
                bandwidth_mbps=bandwidth_mbps,
                jitter_ms=_number(place, row, "jitter_ms") or 0.0,
                cut=_CUT[cut.lower()],
                from_step=_step(place, row) if when == STEP else None,
                from_s=_time_s(place, row) if when == TIME else None,
                source=source,
                route=cast(AffectedRoute, route),
            ),
        )


def _directions(place: _Place, text: str, replica: Replica) -> Directions | None:
    """The directions that a text names; None if the link is another replica's."""
    names = [f"r{index}" for index in range(0 if replica.is_alone else replica.count)]
    name, colon, link = text.rpartition(":")
    expected = "two ranks such as 2-3, or 2>3 for one direction"
    if colon and name not in names:
        known = f", of replica {' or '.join(names)}" if names else ""
        raise place.error(LINKS, text, expected + known)
    if colon and name != f"r{replica.index}":
        return None
    sign = ">" if ">" in link else "-"
    left, _, right = link.partition(sign)
    one, other = (
        int(rank) if rank.isascii() and rank.isdecimal() and len(rank) < 6 else -1
        for rank in (left, right)
    )
    if min(one, other) < 0 or one == other:
        raise place.error(LINKS, text, expected)
    between = (min(one, other), max(one, other))
    return between, one if sign == ">" else None


def _step(place: _Place, row: Row) -> int:
    text = row[STEP]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise place.error(STEP, text, "a whole number of at least 0")
    return int(text)


def _time_s(place: _Place, row: Row) -> float:
    time_s = _number(place, row, TIME)
    if time_s is None:
        raise place.error(TIME, "", "a number of at least 0")
    return time_s


def _number(place: _Place, row: Row, column: str) -> float | None:
    """The number in a cell; None if the cell is empty or missing."""
    text = row.get(column, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise place.error(column, text, "a number of at least 0")
    return number


def _check_later(
    place: _Place, row: Row, link: str, condition: LinkCondition, before: LinkCondition
) -> None:
    column = STEP if STEP in row else TIME
    begins, began = (
        each.from_s if each.from_step is None else each.from_step for each in (condition, before)
    )
    if begins is not None and began is not None and begins <= began:
        expected = f"more than the {began:.15g} of the row before it of {link}"
        raise place.error(column, row[column], expected)


MOST_CHANGES = 60_000
"""The most changes of a link: a sidecar gets the conditions of all its links in one record.

Regime A changes a link 48,000 times in an hour.
"""


def require_links_of(num_stages: int, links: Iterable[Link], key: str) -> None:
    """Raises `UserError` for a link that the pipeline doesn't have; it names the trace's key."""
    possible = possible_links(num_stages)
    unknown = set(links).difference(possible)
    if unknown:
        links_text = ", ".join(map(str, possible))
        expected = f"one of {links_text}" if possible else "no links, for one stage"
        raise UserError(f"{key}: got link {min(unknown)}, expected {expected}")


def require_few_changes(links: Iterable[Link], key: str) -> None:
    """Raises `UserError` for a link with more than `MOST_CHANGES` changes."""
    for link, count in Counter(links).most_common(1):
        if count > MOST_CHANGES:
            got = f"got {count} changes of link {link}"
            raise UserError(f"{key}: {got}, expected at most {MOST_CHANGES}: a shorter trace")
