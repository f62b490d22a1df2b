"""Three ranks whose direct path 0-1 fails within a step, which must not change the step's results.

On either queue an emulated cut fails it once. Then a rank is stopped in a transfer until long after
the deadline, so that Gloo fails. Then it is cut twice at one end only, so that the other end's
collective fails, and the link is restored over other devices.
"""

import pytest

CUT = [("unpaced", "cut"), ("paced", "cut")]
STOPPED = [("paced", "stopped")]
CLOSED = [("paced", f"closed {number}") for number in range(2)]
FAILED = [*CUT, *STOPPED, *CLOSED]
UNDISTURBED = "undisturbed"
COMMUNICATORS = 8  # of two processes with two devices each

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def messages(run_as_ranks):
    return run_as_ranks("failover_rank", 3, least_threads=2)


def of_step(messages, queue, step):
    found = [each for each in messages if (each["queue"], each["step"]) == (queue, step)]
    assert len(found) == 3
    return sorted(found, key=lambda each: each["rank"])


def test_every_step_equals_the_undisturbed_one_bitwise(messages):
    for each in messages:
        undisturbed = of_step(messages, each["queue"], UNDISTURBED)[each["rank"]]
        assert each["digest"] == undisturbed["digest"], (each["queue"], each["step"])


@pytest.mark.parametrize(("queue", "step"), FAILED)
def test_both_ends_report_the_failure_once(messages, queue, step):
    one, other, bystander = of_step(messages, queue, step)
    for end in (one, other):
        assert [failure["link"] for failure in end["failures"]] == ["0-1"]
        assert not end["on_direct"]
    assert bystander["failures"] == []
    for each in messages:
        if (each["queue"], each["step"]) not in FAILED:
            assert each["failures"] == []


@pytest.mark.parametrize(("queue", "step"), CUT)
def test_a_cut_leaves_the_devices_as_they_were(messages, queue, step):
    for end in of_step(messages, queue, step)[:2]:
        (failure,) = end["failures"]
        assert not failure["began"]
        assert failure["restores_left"] == COMMUNICATORS


def test_a_failed_collective_uses_up_a_communicator(messages):
    running, stopped, _ = of_step(messages, "paced", "stopped")
    assert running["failures"][0]["began"]
    for end in (running, stopped):
        assert end["failures"][0]["restores_left"] == COMMUNICATORS - 1


@pytest.mark.parametrize("number", range(2))
def test_a_link_survives_each_failed_collective(messages, number):
    waiting, cut, _ = of_step(messages, *CLOSED[number])
    assert waiting["failures"][0]["began"]
    assert not cut["failures"][0]["began"]
    for end in (waiting, cut):
        assert end["failures"][0]["restores_left"] == COMMUNICATORS - 2 - number


@pytest.mark.parametrize(
    ("queue", "step"),
    [
        ("paced", UNDISTURBED),  # it had failed before the run was started again
        ("unpaced", "restored"),
        ("paced", "restored"),
        ("paced", "restored after"),
        *((queue, f"{step}, restored") for queue, step in CLOSED),
    ],
)
def test_a_restored_link_stays_direct(messages, queue, step):
    assert all(each["on_direct"] for each in of_step(messages, queue, step))
