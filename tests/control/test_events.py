from verdict_examples import verdict

from jaxmorph.control.events import describe_states
from jaxmorph.control.link_state import LinkHealth, PathState


def test_a_link_is_described_by_its_worse_direction():
    found = describe_states([
        verdict(0, 1, 40.0),
        verdict(1, 0, 2.0, LinkHealth.RECOVERING),
        verdict(1, 2, 30.0),
        verdict(2, 1, 60.0),
        verdict(2, 3, 1.0, LinkHealth.HEALTHY),
        verdict(3, 4, 1.0, path=PathState.FAILED),
    ])  # fmt: skip
    assert found == {"0-1": "slow, 40.0 ms (healthy: 1.1)", "1-2": "slow, 60.0 ms (healthy: 1.1)"}
