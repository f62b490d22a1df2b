"""What a rank agrees on with the others before it opens its stage."""

from typing import Any

import pytest

from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.training import open_stage


class Meeting:
    """Rank 0 of two; the other one is of the same host, and has this mistake."""

    def __init__(self, mistake):
        self._answers = [None, {"value": mistake}]

    def exchange(self, message):
        return [message, self._answers.pop(0) or message]


def agreed(mistake, addresses: Any = "auto"):
    config = check_config({"transport": {"addresses": addresses}})
    return open_stage._agreed_transport(config, Meeting(mistake))  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def nobody_to_ask(monkeypatch):
    monkeypatch.setattr(open_stage, "coordinator_host", lambda: "127.0.0.1")


def test_what_one_host_lacks_is_the_mistake_of_all_ranks():
    assert agreed("").addresses == ("127.0.0.1",)
    with pytest.raises(UserError, match=r"^theirs$"):
        agreed("theirs")
    with pytest.raises(UserError, match=r"^transport.addresses: got 255.255.255.255/32, expected"):
        agreed("", ["255.255.255.255/32"])
