import pytest

from benchmarks.netns.faults import host_cut_off
from benchmarks.netns.hosts import lay_hosts
from benchmarks.netns.namespaces import why_unavailable
from benchmarks.netns.training_cases import train_on, unlike

WHY = why_unavailable()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),  # two runs, each with a limit of its own
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
]

STEPS = 8
OUTAGE_S = 2.0


@pytest.mark.long  # `make bench-netns` has it, too
def test_training_goes_on_by_itself_after_a_host_was_cut_off_and_nothing_has_changed(tmp_path):
    with lay_hosts(2) as hosts:
        expected = train_on(hosts, tmp_path / "healthy", STEPS, "direct")
        hosts.set_rate(1, 1, 20)
        outage = host_cut_off(1, "rank 1", OUTAGE_S)
        found = train_on(hosts, tmp_path / "outage", STEPS, "delegated", outage)
    assert (expected.routes, found.routes) == ({"0-1": "direct"}, {"0-1": "delegated"})
    assert len(found.losses) == STEPS
    assert unlike(found, expected) == 0
    assert max(found.steps_s) > OUTAGE_S / 2
