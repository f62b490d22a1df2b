"""The table of faults in docs/how-to/recover.md: each row is held by a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/recover.md").read_text(encoding="utf-8")


def test_each_row_is_held_by_a_test():
    section = PAGE.partition("## How a run ends\n")[2]
    rows = re.findall(r"^\| (.*?) (?<!\\)\| ", section, re.MULTILINE)[1:]
    held = re.findall(r"^(.+): (tests/\S+\.py)::(\w+)$", section, re.MULTILINE)
    assert [fault.replace("\\|", "|") for fault in rows] == [fault for fault, *_ in held]
    for _, path, test in held:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
