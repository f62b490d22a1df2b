"""The tables of `docs/reference/` are those that the types give."""

from dataclasses import fields

import pytest

from jaxmorph.records import Event, EventKind, StepRecord
from tests.reference import CONFIGURATION, PAGE, configuration_tables, meanings, table, with_tables


def test_the_pages_have_the_tables_of_the_types():
    page, configuration = PAGE.read_text("utf-8"), CONFIGURATION.read_text("utf-8")
    assert all(table(kind) in page for kind in (StepRecord, Event, EventKind))
    assert configuration_tables() in configuration
    for text in (page, configuration):
        assert with_tables(text) == text, "make reference writes the pages again"


def test_every_configuration_key_says_what_it_is():
    rows = [line for line in configuration_tables().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if row.endswith("|  |")]


@pytest.mark.parametrize("kind", [StepRecord, Event])
def test_every_field_says_what_it_is(kind):
    assert list(meanings(kind)) == [item.name for item in fields(kind)]


def test_every_kind_of_events_says_what_has_happened():
    assert meanings(EventKind).keys() == EventKind.__members__.keys()
    assert [kind.value for kind in EventKind] == [name.lower() for name in EventKind.__members__]
