"""The table of faults in docs/explanation/failures.md: each row is held by a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/failures.md").read_text(encoding="utf-8")


def test_each_row_is_held_by_a_test():
    section = PAGE.partition("## What you read\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    named = re.findall(r"^(tests/\S+\.py)::(\w+)$", section, re.MULTILINE)
    assert len(rows) == len(named)
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
