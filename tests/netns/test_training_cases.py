from dataclasses import replace

import pytest

from benchmarks.netns.faults import card_lost
from benchmarks.netns.hosts import lay_hosts
from benchmarks.netns.namespaces import why_unavailable
from benchmarks.netns.nic_cases import CASES, JOB, train_through
from benchmarks.netns.trainings import lost, train_on, unlike
from jaxmorph.records import EventKind

WHY = why_unavailable()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.long,  # `make bench-netns` has it, too
    pytest.mark.timeout(900),  # two runs, each with a limit of its own
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
]


def test_a_card_that_dies_in_mid_step_costs_no_step_and_changes_no_result(tmp_path):
    job = replace(JOB, num_steps=12)
    case = replace(CASES[0], fault=card_lost(1, "rank 1"), links=("0-1",))
    with lay_hosts(2, alike=True) as hosts:
        expected = train_on(hosts, tmp_path / "healthy", job)
        found = train_through(hosts, tmp_path / "failing", job, case)
    assert (lost(found, expected), unlike(found, expected)) == (0, 0)
    assert {event.link for event in found.events_of(EventKind.LINK_FAILED)} == {"0-1"}
    assert found.steps[-1].routes == {"0-1": "delegated"}
