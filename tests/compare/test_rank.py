from jaxmorph.compare.rank import with_measured
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay

NEAR, FAR = Link(0, 1), Link(1, 2)
USUAL: UsualLinks = {
    "direct": {NEAR: LinkDelay(1.0, 1.0), FAR: LinkDelay(2.0, 2.0)},
    "delegated": {NEAR: LinkDelay(3.0, 3.0), FAR: LinkDelay(4.0, 4.0)},
}
MEASURED = {NEAR: LinkDelay(1.5, 1.5), FAR: LinkDelay(4.5, 4.5)}


def test_new_delays_count_for_their_route():
    usual = with_measured(USUAL, MEASURED, {NEAR: "direct", FAR: "delegated"})
    assert usual["direct"] == {NEAR: LinkDelay(1.5, 1.5), FAR: LinkDelay(2.0, 2.0)}
    assert usual["delegated"] == {NEAR: LinkDelay(3.0, 3.0), FAR: LinkDelay(4.5, 4.5)}


def test_an_unmeasured_route_stays_unknown():
    assert with_measured({}, MEASURED, {}) == {}
    assert with_measured({"direct": {}}, MEASURED, {}) == {"direct": MEASURED}
