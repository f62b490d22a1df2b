"""Plain values as JSON and back, with errors that say where, got and expected."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest

from jaxmorph.messages import (
    EventEmitted,
    LinksChanged,
    ParseError,
    PhaseEnded,
    ProfileUpdated,
    RunMessage,
    RunStarted,
    StepDone,
    StepTimelines,
    dump,
    parse,
    parse_line,
    parse_run_message,
    tagged,
)
from jaxmorph.records import Event, EventKind, StepRecord

STEP = StepRecord(
    step=3, loss=5.0, grad_norm=1.5, step_s=0.4, tokens_per_s=10_240.0, schedule="zb-h2",
    warmup_forwards=(3, 1), routes={"0-1": "direct"}, predicted_step_s=0.39, bubble_rate=None,
    peak_live=(3, 1), compilations=0, planned_bubble_rate=0.11, link_states={"0-1": "slow"},
    link_ms={"0>1": 31.5}, skipped=True,
)  # fmt: skip
EVENT = Event(1.5, 4, EventKind.PLAN_CHANGED, "2-3", "shorter", {"samples_ms": [31.0]})
LINE = STEP.metrics()


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


@pytest.mark.parametrize(
    "message",
    [
        RunStarted("text", 7, (1, 2), "zb-h2", (3, 1), evaluates=True), StepDone(STEP),
        EventEmitted(EVENT), StepTimelines(3, {"planned": {"stages": []}}, True),
        ProfileUpdated({"links": {}}), LinksChanged({"stages": 2}, 3, ({"route": "direct"},)),
        PhaseEnded("plan", 2.5),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_comes_back_as_it_was_sent(message):
    assert isinstance(message, get_args(RunMessage))
    assert parse_run_message(json.loads(dump(tagged(message)))) == message


def test_a_message_of_no_known_kind_is_refused():
    with pytest.raises(ParseError, match=r"^a message of a rank: got .*, expected .* RunStarted"):
        parse_run_message({"kind": "step"})


def test_a_value_that_is_not_finite_comes_back():
    record = replace(STEP, loss=math.inf, grad_norm=math.nan)
    message = parse_run_message(json.loads(dump(tagged(StepDone(record)))))
    assert isinstance(message, StepDone)
    assert message.record.loss == math.inf
    assert math.isnan(message.record.grad_norm)


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
    ],
)
def test_an_error_names_place_field_got_and_expected(wrong, says):
    with pytest.raises(ParseError) as caught:
        parse(Part, PART | wrong, "rank 2")
    assert str(caught.value) == f"rank 2: {says}"


def test_a_field_that_is_missing_is_named():
    with pytest.raises(ParseError, match=r"^rank 0: count: missing$"):
        parse(Part, {"number": 1.0}, "rank 0")
    with pytest.raises(ParseError, match=r"^rank 0: got \[1\], expected the fields of Part$"):
        parse(Part, [1], "rank 0")


def test_lines_of_a_run_are_read_back():
    read = parse_line(StepRecord, json.dumps(LINE), "metrics.jsonl, line 4")
    assert read == replace(STEP, planned_bubble_rate=None, link_states={})  # only shown
    assert parse_line(Event, json.dumps(EVENT.line()), "events.jsonl, line 1") == EVENT


def test_a_line_that_was_cut_off_is_no_record():
    with pytest.raises(ParseError, match=r"line 9: got '{\"st.*, expected a line of JSON$"):
        parse_line(StepRecord, json.dumps(LINE)[:40], "metrics.jsonl, line 9")
