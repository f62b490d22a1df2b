"""Plain values as JSON and back, with errors that say where, got and expected."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import pytest

from jaxmorph.config.sections import Adaptation
from jaxmorph.plain_json import (
    ParseError,
    dump,
    dump_apart,
    parse,
    parse_line,
    with_parts,
    with_sum,
)


@dataclass(frozen=True)
class Part:
    """Of each type of fields one."""

    number: float
    count: int
    names: tuple[tuple[str, ...], ...]
    flags: Mapping[str, bool]
    any: Any
    perhaps: int | None = None


PART: dict[str, Any] = {
    "number": 1.5, "count": 2, "names": [["a"]], "flags": {"x": True}, "any": [None],
}  # fmt: skip


class Colour(StrEnum):
    RED = "red"


class Place(NamedTuple):
    row: int
    column: int | None


@dataclass(frozen=True)
class Waiting:
    """Of a union: nothing."""


@dataclass(frozen=True)
class Moving:
    """Of a union: what a check of its own refuses where it is negative."""

    speeds: Mapping[Place, float]

    def __post_init__(self) -> None:
        if min(self.speeds.values(), default=0.0) < 0:
            raise ValueError("speeds: got a negative one")


@dataclass(frozen=True)
class Whole(Part):
    """And of each type that JSON doesn't have."""

    state: Waiting | Moving = Waiting()
    states: tuple[Waiting | Moving | None, ...] = ()
    by_place: Mapping[Place, Waiting | Moving] = field(default_factory=dict)
    by_pair: Mapping[tuple[int, Colour], float] = field(default_factory=dict)
    by_number: Mapping[int | None, int] | None = None
    by_word: Mapping[Literal["up", "down"], Mapping[Place, int]] = field(default_factory=dict)
    section: Adaptation = field(default_factory=Adaptation)


WHOLE = Whole(1.5, 2, (("a",),), {"x": True}, [None])
MOVING = Moving({Place(0, 1): math.inf, Place(1, None): 0.5})


@pytest.mark.parametrize(
    "own",
    [
        {}, {"state": MOVING}, {"states": (MOVING, None, Waiting())},
        {"by_place": {Place(2, 3): MOVING}}, {"by_pair": {(1, Colour.RED): -math.inf}},
        {"by_number": {7: 1, None: 2}}, {"by_word": {"up": {Place(0, 0): 3}}},
        {"section": Adaptation(worth=0.5)},
    ],
)  # fmt: skip
def test_types_without_json_form_round_trip(own):
    value = replace(WHOLE, **own)
    assert parse(Whole, json.loads(dump(value)), "here") == value


def test_fields_of_every_type_are_read():
    part = parse(Part, PART | {"later": "version"}, "here")
    assert part == Part(1.5, 2, (("a",),), {"x": True}, [None])
    assert type(parse(Part, PART | {"number": 1}, "here").number) is float
    assert math.isnan(parse(Part, PART | {"number": None}, "here").number)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"number": "1"}, "number: got '1', expected a number"),
        ({"number": True}, "number: got True, expected a number"),
        ({"count": 1.5}, "count: got 1.5, expected a whole number"),
        ({"count": None}, "count: got None, expected a whole number"),
        ({"names": [["a"], "bc"]}, "names.1: got 'bc', expected a list"),
        ({"names": [["a", 2]]}, "names.0.1: got 2, expected a text"),
        ({"flags": {"y": 1}}, "flags.y: got 1, expected true or false"),
        ({"flags": "x" * 99}, f"flags: got '{'x' * 56}..., expected an object"),
        ({"perhaps": "1"}, "perhaps: got '1', expected a whole number"),
        ({"state": {"kind": "Flying"}}, "state: got {'kind': 'Flying'}, expected one of the kinds "
         "Waiting, Moving"),
        ({"state": {"kind": "Moving"}}, "state.Moving.speeds: missing"),
        ({"state": {"kind": "Moving", "speeds": [[[0, 1], -1]]}},
         "state.Moving: speeds: got a negative one"),
        ({"by_place": {"0-1": {}}}, "by_place: got {'0-1': {}}, expected a list"),
        ({"by_place": [[[0], {}]]}, "by_place.0.0: got [0], expected a list of 2"),
        ({"by_pair": [[[0, "red"], "x"]]}, "by_pair.(0, <Colour.RED: 'red'>): got 'x', expected a "
         "number"),
        ({"by_place": [[["0", 1], {}]]}, "by_place.0.0.row: got '0', expected a whole number"),
        ({"by_word": {"left": []}}, "by_word.0.0: got 'left', expected one of up, down"),
    ],
)  # fmt: skip
def test_an_error_names_place_field_got_and_expected(wrong, says):
    with pytest.raises(ParseError) as caught:
        parse(Whole, PART | wrong, "rank 2")
    assert str(caught.value) == f"rank 2: {says}"


def test_a_field_that_is_missing_is_named():
    with pytest.raises(ParseError, match=r"^rank 0: count: missing$"):
        parse(Part, {"number": 1.0}, "rank 0")
    with pytest.raises(ParseError, match=r"^rank 0: got \[1\], expected the fields of Part$"):
        parse(Part, [1], "rank 0")


def test_a_section_error_is_one_line():
    with pytest.raises(ParseError, match=r"^here: section: .*Adaptation worth.*less than 1") as it:
        parse(Whole, PART | {"section": {"worth": 2}}, "here")
    assert "\n" not in str(it.value)


@dataclass(frozen=True)
class Kept:
    """Something that a run keeps in a file."""

    loss: float
    name: str
    inner: Mapping[str, float]


KEPT = Kept(5.4321e-7, "caf\N{LATIN SMALL LETTER E WITH ACUTE} \ud800", {"a": math.inf, "b": 1.0})


def test_a_checksum_comes_back_out():
    line = with_sum(dump(KEPT))
    assert list(json.loads(line)) == ["loss", "name", "inner", "crc32"]
    assert parse_line(Kept, line, "here") == KEPT
    assert parse_line(Kept, json.dumps(json.loads(line), indent=1), "here") == KEPT
    assert parse_line(Kept, dump(KEPT), "here") == KEPT  # as earlier versions wrote


def test_any_flipped_bit_is_refused_or_changes_nothing():
    line, refused = with_sum(dump(KEPT)).encode(), 0
    for bit in range(8 * len(line)):
        changed = bytearray(line)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert parse_line(Kept, changed.decode(errors="replace"), "here") == KEPT
        except ParseError:
            refused += 1
    # White space between keys may become other white space, and the name of the sum another key.
    assert refused > 7.2 * len(line)


def test_changed_values_name_their_place():
    line = with_sum(dump(KEPT)).replace("5.4", "5.5")
    with pytest.raises(
        ParseError, match=r"^here: got other values than were written, by their crc"
    ):
        parse_line(Kept, line, "here")


def test_bytes_apart_come_back():
    value = {"first": b"\0\xff", "rest": [b"", {"last": b"two\n"}], "none": 1}
    text, parts = dump_apart(value)
    assert parts == b"\0\xfftwo\n"
    read = with_parts(json.loads(text), io.BytesIO(parts).read, "here")
    assert read == value
    with pytest.raises(EOFError):
        with_parts(json.loads(text), io.BytesIO(parts[:-1]).read, "here")
    with pytest.raises(ParseError, match=r"^here: got other bytes than were written"):
        with_parts(json.loads(text), io.BytesIO(parts.upper()).read, "here")
