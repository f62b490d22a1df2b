"""What a benchmark writes down: where and when it ran, its bars, and JSON that can be read."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Bar:
    """Something that should hold: a value between two limits."""

    claim: str
    value: float
    at_least: float = 0.0
    at_most: float = inf
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is between its limits."""
        return self.at_least <= self.value <= self.at_most

    def to_json(self) -> dict[str, Any]:
        """In JSON's types, which have no infinity."""
        limits = {"at_least": self.at_least, "at_most": min(self.at_most, 1e9)}
        return {**vars(self), **limits, "holds": self.holds}

    def __str__(self) -> str:
        limits = [f">= {self.at_least:g}"] * (self.at_least > 0)
        limits += [f"<= {self.at_most:g}"] * (self.at_most < inf)
        verdict = "" if self.holds else "  MISSED"
        return f"{self.claim:58}{self.value:8.3f} {self.unit} ({', '.join(limits)}){verdict}"


def finish(bars: Sequence[Bar], path: Path | None, values: dict[str, Any]) -> int:
    """Print bars, and write them with other values; the exit code: 1 if one is missed."""
    print(*bars, sep="\n", flush=True)
    if path is not None:
        found = [bar.to_json() for bar in bars]
        write_json(path, {**values, "load_after": os.getloadavg()[0], "bars": found})
    return 0 if all(bar.holds for bar in bars) else 1


def provenance(module: str) -> dict[str, Any]:
    """The command (`python -m module ...`), commit, date and load of what begins now."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processors": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON with one record a line: a dictionary that has no other within."""
    path.write_text(_text(value, "") + "\n", encoding="utf-8")


def _text(value: Any, indent: str) -> str:
    inner = indent + " "
    match value:
        case dict() if any(map(_has_record, value.values())):
            lines = [f"{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
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
