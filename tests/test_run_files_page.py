"""docs/run-files.md names every field of a step's line, and every kind of event that code names."""

import re
from dataclasses import fields
from pathlib import Path

from jaxmorph.adapting import control_events, path_events
from jaxmorph.reporting import records
from jaxmorph.reporting.records import StepRecord

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "run-files.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([a-z_]+)`", PAGE))


def test_every_field_of_a_step_is_explained_and_no_other():
    written = {field.name for field in fields(StepRecord) if "shown_only" not in field.metadata}
    (table,) = re.findall(r"## Steps.*?\n\n(\|.*?)\n\n", PAGE, re.DOTALL)
    first_cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == written


def test_every_kind_of_event_is_explained():
    """Those that are told by a word of their own, and those that are constants of these modules."""
    teller = r"\b_?(?:tell_event|report|event)\(\s*(?:[\w.\[\]]+,\s*)?"
    told = re.compile(rf'(?:{teller}|"kind": |kind=)"([a-z]+_[a-z_]+)"|"(checkpoint_[a-z_]+)"')
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "jaxmorph").rglob("*.py"))
    kinds = {kind for text in texts for both in told.findall(text) for kind in both if kind}
    for module in (records, control_events, path_events):
        constants = {name: value for name, value in vars(module).items() if name.isupper()}
        kinds |= {value for value in constants.values() if isinstance(value, str)}
    assert {"lane_down", "plan_changed", "straggler_detected", "checkpoint_saved"} <= kinds
    assert kinds - NAMED == {"phase_ended"}  # which is none, but of a run's start
