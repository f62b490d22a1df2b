import re
from itertools import product
from pathlib import Path

import pytest

from jaxmorph.transport.message_states import (
    RECEIVE_TRANSITIONS,
    SEND_TRANSITIONS,
    ProtocolError,
    ReceiveEvent,
    ReceiveState,
    SendEvent,
    SendState,
    next_receive_state,
    next_send_state,
)

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "transport.md"


def test_the_page_draws_the_tables():
    arrows = re.findall(r"^    (\w+) --> (\w+): (.*)$", PAGE.read_text(), re.MULTILINE)
    tables = [*SEND_TRANSITIONS.items(), *RECEIVE_TRANSITIONS.items()]
    assert arrows == [(state, after, event) for (state, event), after in tables]


@pytest.mark.parametrize(
    ("table", "after", "states", "events"),
    [
        (SEND_TRANSITIONS, next_send_state, SendState, SendEvent),
        (RECEIVE_TRANSITIONS, next_receive_state, ReceiveState, ReceiveEvent),
    ],
)
def test_only_transitions_in_the_table_are_possible(table, after, states, events):
    for state, event in product(states, events):
        if (state, event) in table:
            assert after(state, event) is table[state, event]
        else:
            with pytest.raises(ProtocolError, match=event.value):
                after(state, event)


@pytest.mark.parametrize(
    ("table", "last"),
    [(SEND_TRANSITIONS, SendState.RELEASED), (RECEIVE_TRANSITIONS, ReceiveState.DELIVERED)],
)
def test_every_state_leads_to_the_last(table, last):
    states = {state for state, _ in table} | set(table.values())
    reaching = {last}
    for _ in states:
        reaching |= {state for (state, _), after in table.items() if after in reaching}
    assert reaching == states
    assert last not in {state for state, _ in table}
