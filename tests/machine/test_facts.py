import pytest

from jaxmorph.machine.facts import Fact, Section, find_out


def test_what_can_not_be_looked_at_is_a_fact_and_keeps_nothing_else_back():
    def broken():
        yield Fact("first", "1")
        raise OSError("no such\nthing")

    sections = [*find_out({"a": broken, "b": lambda: [Fact("second", "2", True)]})]
    assert sections == [
        Section(
            "a",
            (
                Fact("first", "1"),
                Fact("this could not be looked at", "", False, "OSError: no such thing"),
            ),
        ),
        Section("b", (Fact("second", "2", True),)),
    ]
    assert sections[1].to_json() == [{"name": "second", "found": "2", "works": True, "note": ""}]


def test_what_is_found_is_told_before_the_next_thing_is_looked_at():
    def hangs():
        raise KeyboardInterrupt

    found = find_out({"a": lambda: [Fact("first", "1")], "b": hangs})
    assert next(found) == Section("a", (Fact("first", "1"),))
    with pytest.raises(KeyboardInterrupt):
        next(found)
