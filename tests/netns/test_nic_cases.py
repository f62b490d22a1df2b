from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.netns.faults import card_lost
from benchmarks.netns.hosts import lay_hosts
from benchmarks.netns.namespaces import why_unavailable
from benchmarks.netns.nic_cases import CASES, DIRECT_S, JOB, failure, train_through
from benchmarks.netns.tasks import job_variables
from benchmarks.netns.trainings import Training, lost, train_on, unlike

WHY = why_unavailable()
STEPS = 12
ONE_LINK, _, _, TWO_LINKS, *_ = CASES


def training(steps_s, failed=(), last_loss=1.0):
    """A run of steps that took so long, in which links failed: a step and a name each."""
    steps = [
        {"step": step, "step_s": step_s, "loss": 1.0, "grad_norm": 2.0}
        for step, step_s in enumerate(steps_s)
    ]
    steps[-1]["loss"] = last_loss
    events = [
        {"kind": "link_failed", "step": step, "link": link, "detail": "cut"}
        for step, link in failed
    ]
    return Training(tuple(steps), tuple(events), (0, 0))


def test_extra_time_is_that_of_the_step_that_failed_over_those_before_it():
    found = failure(ONE_LINK, training([9, 9, 1, 1, 1 + DIRECT_S, 2, 2], [(4, "2-3")]))
    assert (found.value, found.passes) == (1.0, True)
    assert (found.details["before_s"], found.details["after_s"]) == (1, 2)


def test_all_links_of_a_card_have_one_deadline_and_the_longest_step_counts():
    steps_s = [9, 9, 1, 1 + DIRECT_S, 1 + 1.05 * DIRECT_S, 1]
    found = failure(TWO_LINKS, training(steps_s, [(3, "0-1"), (4, "1-2")]))
    assert found.value == pytest.approx(1.05)
    assert found.passes
    steps_s[4] = 1 + 1.3 * DIRECT_S
    assert not failure(TWO_LINKS, training(steps_s, [(3, "0-1"), (4, "1-2")])).passes
    assert not failure(ONE_LINK, training(steps_s, [(3, "2-3"), (4, "2-3")])).passes


@pytest.mark.parametrize("failed", [[], [(3, "1-2")], [(3, "1-2"), (3, "2-3")]])
def test_a_run_in_which_other_links_failed_or_none_misses_its_bar(failed):
    assert not failure(ONE_LINK, training([1, 1, 1, 1, 1], failed)).passes


def test_steps_that_are_missing_and_those_that_differ_are_counted():
    expected = training([1] * 5)
    assert (lost(expected, expected), unlike(expected, expected)) == (0, 0)
    assert lost(training([1] * 3), expected) == 2
    assert unlike(training([1] * 5, last_loss=1.0000000000000002), expected) == 1


def test_each_rank_is_told_its_own_cards_addresses(tmp_path):
    hosts: Any = SimpleNamespace(
        names=("node0", "node1"), address=lambda host, nic: f"10.77.{nic}.{host + 1}"
    )
    job = replace(JOB, sidecar_nics=(1, 0))
    told = [job.command(hosts, tmp_path, rank)[-1] for rank in range(2)]
    assert told == [f'transport.addresses=["10.77.1.{n}", "10.77.0.{n}"]' for n in (1, 2)]
    unnamed = replace(JOB, sidecar_nics=None).command(hosts, tmp_path, 0)
    assert not [word for word in unnamed if "transport" in word]


@pytest.mark.netns
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
def test_hosts_that_call_themselves_alike_find_their_own_first_cards_by_that():
    with lay_hosts(2, alike=True) as hosts:
        for host, namespace in enumerate(hosts._namespaces):
            assert namespace.run("hostname").strip() == "node"
            assert namespace.run("getent hosts node").split()[0] == hosts.address(host, 0)
            assert namespace.run("getent hosts node1").split()[0] == hosts.address(1, 0)
        assert job_variables(hosts, 1, nic=1)["SLURM_STEP_NODELIST"] == "10.77.1.1,10.77.1.2"


@pytest.mark.netns
@pytest.mark.multiprocess
@pytest.mark.long  # `make bench-netns` has it, too
@pytest.mark.timeout(700)  # two runs, each with a limit of its own
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
def test_a_card_that_dies_in_mid_step_costs_no_step_and_changes_no_result(tmp_path):
    job, case = JOB.with_steps(STEPS), replace(ONE_LINK, fault=card_lost(1, "rank 1"))
    case = replace(case, links=("0-1",))
    with lay_hosts(2, alike=True) as hosts:
        expected = train_on(hosts, tmp_path / "healthy", job)
        found = train_through(hosts, tmp_path / "failing", job, case)
    assert (lost(found, expected), unlike(found, expected)) == (0, 0)
    assert failure(case, found).passes
    assert found.steps[-1]["routes"] == {"0-1": "delegated"}
