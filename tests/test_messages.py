"""The messages and lines of a run as JSON and back."""

import json
import math
from dataclasses import replace
from typing import get_args

import pytest
from example_step import STEP

from jaxmorph.messages import (
    EventEmitted,
    LinksChanged,
    PhaseEnded,
    ProfileUpdated,
    RunMessage,
    RunStarted,
    StepDone,
    StepTimelines,
    parse_run_message,
)
from jaxmorph.plain_json import ParseError, dump, parse_line, tagged
from jaxmorph.records import Event, EventKind, StepRecord

STEP = replace(
    STEP, step=3, bubble_rate=None, link_states={"0-1": "slow"}, link_ms={"0>1": 31.5}, skipped=True
)
EVENT = Event(1.5, 4, EventKind.PLAN_CHANGED, "2-3", "shorter", {"samples_ms": [31.0]})
LINE = STEP.metrics()


@pytest.mark.parametrize(
    "message",
    [
        RunStarted("text", 7, (1, 2), "zb-h2", (3, 1), evaluates=True), StepDone(STEP),
        EventEmitted(EVENT), StepTimelines(3, {"planned": ("{}",)}, True),
        ProfileUpdated({"links": {}}), LinksChanged({"stages": 2}, 3, ({"route": "direct"},)),
        PhaseEnded("plan", 2.5),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_messages_round_trip(message):
    assert isinstance(message, get_args(RunMessage))
    assert parse_run_message(json.loads(dump(tagged(message)))) == message


def test_a_message_of_no_known_kind_is_refused():
    with pytest.raises(ParseError, match=r"^a message of a rank: got .*, expected .* RunStarted"):
        parse_run_message({"kind": "step"})


def test_non_finite_values_round_trip():
    record = replace(STEP, loss=math.inf, grad_norm=math.nan)
    message = parse_run_message(json.loads(dump(tagged(StepDone(record)))))
    assert isinstance(message, StepDone)
    assert message.record.loss == math.inf
    assert math.isnan(message.record.grad_norm)


def test_lines_of_a_run_round_trip():
    read = parse_line(StepRecord, json.dumps(LINE), "metrics.jsonl, line 4")
    assert read == replace(STEP, planned_bubble_rate=None, link_states={})  # only shown
    assert parse_line(Event, json.dumps(EVENT.line()), "events.jsonl, line 1") == EVENT


def test_a_truncated_line_is_refused():
    with pytest.raises(ParseError, match=r"line 9: got '{\"st.*, expected a line of JSON$"):
        parse_line(StepRecord, json.dumps(LINE)[:40], "metrics.jsonl, line 9")
