"""`docs/reference/run-files.md`: its tables are those that the types give."""

from dataclasses import fields

import pytest

from jaxmorph.records import Event, EventKind, StepRecord
from tests.reference import PAGE, meanings, table, with_tables


def test_the_page_has_the_tables_of_the_types():
    page = PAGE.read_text(encoding="utf-8")
    assert all(table(kind) in page for kind in (StepRecord, Event, EventKind))
    assert with_tables(page) == page, "make reference writes the page anew"


@pytest.mark.parametrize("kind", [StepRecord, Event])
def test_every_field_says_what_it_is(kind):
    assert list(meanings(kind)) == [item.name for item in fields(kind)]


def test_every_kind_of_events_says_what_has_happened():
    assert meanings(EventKind).keys() == EventKind.__members__.keys()
    assert [kind.value for kind in EventKind] == [name.lower() for name in EventKind.__members__]
