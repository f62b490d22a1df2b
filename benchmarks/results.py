"""What a benchmark writes down: where and when it ran, its bars, and JSON that can be read."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxmorph.compare.provenance import load_averages
from jaxmorph.compare.provenance import provenance as begin
from jaxmorph.report.run_matrix import MET, MISSED

ROOT = Path(__file__).parent.parent


NO_LIMIT = 1e9
"""More than any value; JSON has no infinity."""


@dataclass(frozen=True)
class Bar:
    """Something that should hold: a value between two limits."""

    claim: str
    value: float
    at_least: float = -NO_LIMIT
    at_most: float = NO_LIMIT
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is between its limits."""
        return self.at_least <= self.value <= self.at_most

    @property
    def verdict(self) -> str:
        """Whether it is met."""
        return MET if self.holds else MISSED

    @property
    def limits(self) -> str:
        """Its limits in words."""
        low = [f"at least {self.at_least:g}"] * (self.at_least > 0)
        high = [f"at most {self.at_most:g}"] * (self.at_most < NO_LIMIT)
        return " ".join([", ".join(low + high), self.unit]).strip()

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**vars(self), "holds": self.holds}

    def __str__(self) -> str:
        return f"{self.claim:64} {self.value:8.3f}  {self.limits}: {self.verdict}"


def finish(bars: Sequence[Bar], path: Path | None, values: dict[str, Any]) -> int:
    """Print bars, and write them with other values; the exit code: 1 if one is missed."""
    print(*bars, sep="\n", flush=True)
    if path is not None:
        found = [bar.to_json() for bar in bars]
        write_json(path, {**values, "load_after": load_averages(), "bars": found})
    return 0 if all(bar.holds for bar in bars) else 1


def bars_of(path: Path) -> list[Bar]:
    """The bars that `finish` has written to a file; none where something else did."""
    values = json.loads(path.read_text(encoding="utf-8"))
    found = values.get("bars", ()) if isinstance(values, dict) else ()
    return [Bar(**{name: each[name] for name in each if name != "holds"}) for each in found]


def provenance(module: str) -> dict[str, Any]:
    """The provenance of what begins now, `python -m module ...`, in JSON's types."""
    values = asdict(begin(" ".join([f"python -m {module}", *sys.argv[1:]])))
    return {name: value for name, value in values.items() if value is not None}


def write_json(path: Path, value: Any) -> None:
    """Write JSON with one record a line: a dictionary that has no other within."""
    path.write_text(_text(value, "") + "\n", encoding="utf-8")


def _text(value: Any, indent: str) -> str:
    inner = indent + " "
    match value:
        case dict() if any(map(_has_record, value.values())):
            lines = [f"{json.dumps(str(key))}: {_text(each, inner)}" for key, each in value.items()]
        case list() | tuple() if any(map(_has_record, value)):
            lines = [_text(each, inner) for each in value]
        case _:
            return json.dumps(value)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return start + ",".join(f"\n{inner}{line}" for line in lines) + f"\n{indent}{end}"


def _has_record(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(map(_has_record, value))
    )
