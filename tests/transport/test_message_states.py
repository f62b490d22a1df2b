import re
from itertools import product
from pathlib import Path

import pytest

from jaxmorph.transport.message_states import (
    RECEIVING,
    SENDING,
    ProtocolError,
    Received,
    Receiving,
    Sending,
    Sent,
    after_received,
    after_sent,
)

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "transport.md"


def test_the_page_draws_the_tables():
    arrows = re.findall(r"^    (\w+) --> (\w+): (.*)$", PAGE.read_text(), re.MULTILINE)
    tables = [*SENDING.items(), *RECEIVING.items()]
    assert arrows == [(state, after, event) for (state, event), after in tables]


@pytest.mark.parametrize(
    ("table", "after", "states", "events"),
    [(SENDING, after_sent, Sending, Sent), (RECEIVING, after_received, Receiving, Received)],
)
def test_what_is_not_in_the_table_cannot_happen(table, after, states, events):
    for state, event in product(states, events):
        if (state, event) in table:
            assert after(state, event) is table[state, event]
        else:
            with pytest.raises(ProtocolError, match=event.value):
                after(state, event)


def test_every_state_leads_to_the_last_and_none_out_of_it():
    for table, last in ((SENDING, Sending.RELEASED), (RECEIVING, Receiving.DELIVERED)):
        states = {state for state, _ in table} | set(table.values())
        reaching = {last}
        for _ in states:
            reaching |= {state for (state, _), after in table.items() if after in reaching}
        assert reaching == states
        assert last not in {state for state, _ in table}
