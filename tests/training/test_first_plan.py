"""The links that an adapting run may delegate before its first step."""

import pytest

from jaxmorph.config import check_config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import LinkDelay, chain_links
from jaxmorph.training.first_plan import _agree_on_delegable, planned_links

FOUR = (0.5, 30.0, 0.4)


@pytest.mark.parametrize(
    ("adaptation", "latencies_ms", "links"),
    [
        ({}, FOUR, []),
        ({"enabled": True}, FOUR, [Link(1, 2)]),
        ({"enabled": True}, (0.5, 30.0), [Link(1, 2)]),
        ({"enabled": True, "delegates": "any"}, FOUR, [Link(0, 1), Link(1, 2), Link(2, 3)]),
    ],
)
def test_slow_links_or_all_allowed_ones_are_delegable(adaptation, latencies_ms, links):
    stages = {"stages": len(latencies_ms) + 1}
    config = check_config({"parallelism": stages, "adaptation": adaptation})
    usual: UsualLinks = {"direct": chain_links(latencies_ms), "delegated": {}}
    assert _agree_on_delegable(config, SoleRank(), usual, ()) == links


def test_links_are_planned_as_measured_unless_named():
    measured = {Link(0, 1): LinkDelay(0.5, 0.4), Link(1, 2): LinkDelay(9.0, 9.0)}
    assert planned_links(None, measured) == measured
    links = planned_links({"1-2": 30.0, "2-3": 5.0}, measured)
    assert links == {
        Link(0, 1): LinkDelay(0.5, 0.4),
        Link(1, 2): LinkDelay(30.0, 30.0),
        Link(2, 3): LinkDelay(5.0, 5.0),
    }
