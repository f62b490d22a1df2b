"""The agreement of ranks before they open their stages."""

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
