"""Which links a run that adapts may delegate before its first step."""

import pytest

from jaxmorph.config import check_config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.planning.first_plan import _agree_on_delegable
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import Link, chain_links

USUAL: UsualLinks = {"direct": chain_links((0.5, 30.0, 0.4)), "delegated": {}}


@pytest.mark.parametrize(
    ("adaptation", "links"),
    [
        ({}, []),
        ({"enabled": True}, [Link(1, 2)]),
        ({"enabled": True, "delegates": "any"}, [Link(0, 1), Link(1, 2), Link(2, 3)]),
    ],
)
def test_slow_links_are_delegable_or_any_where_allowed(adaptation, links):
    config = check_config({"parallelism": {"stages": 4}, "adaptation": adaptation})
    assert _agree_on_delegable(config, SoleRank(), USUAL, ()) == links


def test_the_slow_one_of_two_links_too():
    config = check_config({"parallelism": {"stages": 3}, "adaptation": {"enabled": True}})
    usual: UsualLinks = {"direct": chain_links((0.5, 30.0)), "delegated": {}}
    assert _agree_on_delegable(config, SoleRank(), usual, ()) == [Link(1, 2)]
