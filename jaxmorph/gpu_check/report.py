"""What a part of the check tells: a row for each figure, printed as plain text and kept as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxmorph.errors import UserError


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        value: What was found, with its unit.
        note: What it is to be compared with.
        holds: Whether it is as it must be; None where nothing is asked of it.
    """

    name: str
    value: str
    note: str = ""
    holds: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "ok", False: "FAILED"}[self.holds]
        return f"  {self.name:34}{self.value:>16}  {verdict:8}{self.note}".rstrip()


class Report(Protocol):
    """What a part found: a frozen dataclass of what JSON can hold."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def rows(self) -> Iterable[Row]:
        """The report as lines of the table."""
        ...


@dataclass(frozen=True)
class Outcome:
    """One part of the check, done or failed.

    Attributes:
        report: What it found; None if it failed.
        error: Why it failed, in one line; empty if it did not.
    """

    part: str
    seconds: float
    report: Report | None = None
    error: str = ""
    traceback: str = ""

    @property
    def holds(self) -> bool:
        """Whether the part ran and all that it asks for holds."""
        return self.report is not None and all(row.holds is not False for row in self.report.rows())

    def __str__(self) -> str:
        title = f"{self.part} ({self.seconds:.1f} s)"
        if self.report is None:
            return f"{title}\n  FAILED: {self.error}"
        return "\n".join([title, *map(str, self.report.rows())])

    def to_json(self) -> dict[str, Any]:
        """The outcome in JSON's types; of a report also each row's verdict."""
        told = {"seconds": self.seconds, "holds": self.holds}
        if self.report is None:
            return {**told, "error": self.error, "traceback": self.traceback}
        asked = {row.name: row.holds for row in self.report.rows() if row.holds is not None}
        return {**told, "figures": asdict(self.report), "asked": asked}


def write_json(path: Path, outcomes: Iterable[Outcome], *, running: str | None) -> None:
    """Write what has been found so far.

    Args:
        outcomes: One for each part that has run.
        running: The part that begins now, and may end the process; None: all have run.

    Raises:
        UserError: If the file can't be written.
    """
    parts = {outcome.part: outcome.to_json() for outcome in outcomes}
    done = running is None
    holds = done and all(part["holds"] for part in parts.values())
    told = {"done": done, "running": running, "holds": holds}
    text = json.dumps({**told, "parts": parts}, indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: {path}: cannot be written: {error.strerror}") from error
