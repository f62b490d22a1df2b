"""The agreement of ranks before they open their stages."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.training import open_stage


class Exchange:
    """Rank 0 of two; the other rank is on the same host, and has this error."""

    def __init__(self, mistake):
        self._answers = [None, {"value": mistake}]

    def exchange(self, message):
        return [message, self._answers.pop(0) or message]


def agreed(mistake, addresses: Any = "auto"):
    config = check_config({"transport": {"addresses": addresses}})
    return open_stage._agreed_transport(config, Exchange(mistake))  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def nobody_to_ask(monkeypatch):
    monkeypatch.setattr(open_stage, "coordinator_host", lambda: "127.0.0.1")


def test_an_error_on_one_host_is_raised_on_all():
    assert agreed("").addresses == ("127.0.0.1",)
    with pytest.raises(UserError, match=r"^theirs$"):
        agreed("theirs")
    with pytest.raises(UserError, match=r"^transport.addresses: got 255.255.255.255/32, expected"):
        agreed("", ["255.255.255.255/32"])


@pytest.mark.parametrize(
    ("sections", "wait_s"),
    [
        ({}, 0.25),
        ({"limits": {"host_gib": 1}, "timeouts": {"step_s": 7}}, 3.5),
        ({"transport": {"backend": "nixl"}}, None),
        (
            {
                "limits": {"host_gib": 1},
                "timeouts": {"step_s": 7},
                "transport": {"backend": "nixl"},
            },
            3.5,
        ),
    ],
)
def test_slots_are_freed_where_that_is_cheap_or_memory_is_limited(sections, wait_s):
    assert open_stage.free_slots_s(check_config(sections)) == wait_s


def test_no_receiver_has_fewer_slots_than_its_sender_and_none_grows_before_it():
    done = []

    def note(what):
        return lambda slots, sending, keep=(): done.append((what, sending)) or ("kept",)

    def exchange(message):
        done.append("exchange")
        return [message]

    stage: Any = SimpleNamespace(delegated=None, free_slots=note("free"), add_slots=note("add"))
    rendezvous: Any = SimpleNamespace(rank=0, exchange=exchange)
    assert open_stage.resize_slots(rendezvous, stage, {}) == ""
    assert done == [
        ("free", True), "exchange",
        ("free", False), ("add", True), "exchange",
        ("add", False), "exchange",
    ]  # fmt: skip
