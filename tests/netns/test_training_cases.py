from dataclasses import replace

import pytest

from benchmarks.netns import nic_cases
from benchmarks.netns.faults import card_lost, host_cut_off
from benchmarks.netns.hosts import lay_hosts
from benchmarks.netns.namespaces import why_unavailable
from benchmarks.netns.nic_cases import CASES, failure, train_through
from benchmarks.netns.training_cases import JOB
from benchmarks.netns.trainings import lost, train_on, unlike

WHY = why_unavailable()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.long,  # `make bench-netns` has it, too
    pytest.mark.timeout(900),  # three runs, each with a limit of its own
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
]

STEPS = 8
OUTAGE_S = 2.0


def test_training_goes_on_by_itself_whatever_cards_are_lost_and_nothing_has_changed(tmp_path):
    job = JOB.with_steps(STEPS)
    delegated = job.with_overrides("routes.default=delegated")
    with lay_hosts(2) as hosts:
        expected = train_on(hosts, tmp_path / "healthy", job)
        one_card = train_on(hosts, tmp_path / "card", delegated, card_lost(1, "rank 1", nic=1))
        hosts.set_rate(1, 1, 20)
        outage = host_cut_off(1, "rank 1", OUTAGE_S)
        no_card = train_on(hosts, tmp_path / "outage", delegated, outage)
    assert expected.steps[-1]["routes"] == {"0-1": "direct"}
    for found in (one_card, no_card):
        assert found.steps[-1]["routes"] == {"0-1": "delegated"}
        assert len(found.steps) == STEPS
        assert (lost(found, expected), unlike(found, expected)) == (0, 0)
    assert no_card.longest_s > OUTAGE_S / 2


def test_a_card_that_dies_in_mid_step_costs_no_step_and_changes_no_result(tmp_path):
    job = nic_cases.JOB.with_steps(12)
    case = replace(CASES[0], fault=card_lost(1, "rank 1"), links=("0-1",))
    with lay_hosts(2, alike=True) as hosts:
        expected = train_on(hosts, tmp_path / "healthy", job)
        found = train_through(hosts, tmp_path / "failing", job, case)
    assert (lost(found, expected), unlike(found, expected)) == (0, 0)
    assert failure(case, found).passes
    assert found.steps[-1]["routes"] == {"0-1": "delegated"}
