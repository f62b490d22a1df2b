"""The stamps of two ranks over one direct link that is slow, narrow, unsteady or cut."""

from itertools import pairwise

import pytest

NUM_BYTES, OP_S = 4000, 0.03  # as in slow_link_rank
MICROSECOND = 1.1e-6  # times go to the peer in whole ones

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def messages(run_as_ranks):
    return run_as_ranks("slow_link_rank", 2)


def of_both_ranks(messages, test):
    by_rank = {message["rank"]: message for message in messages if message["test"] == test}
    return by_rank[0], by_rank[1]


def transfers(message):
    return [(start, end) for label, start, end in message["stamps"] if label != "op"]


def delays(messages, test):
    """How long each transfer took once its later end had come; both ends must agree on its end."""
    sender, receiver = map(transfers, of_both_ranks(messages, test))
    assert len(sender) == len(receiver) == 3
    found = []
    for (left_s, over_s), (came_s, there_s) in zip(sender, receiver, strict=True):
        assert there_s == pytest.approx(over_s, abs=MICROSECOND)
        found.append(over_s - max(left_s, came_s))
    return found


def test_a_healthy_link_adds_no_time(messages):
    assert delays(messages, "healthy") == pytest.approx([0.0] * 3, abs=MICROSECOND)


def test_both_ends_stamps_contain_the_latency(messages):
    assert delays(messages, "latency") == pytest.approx([0.03] * 3, abs=MICROSECOND)


def test_a_slow_transfer_delays_the_next_op_at_both_ends(messages):
    for message in of_both_ranks(messages, "latency"):
        for (_, _, over_s), (label, start_s, end_s) in pairwise(message["stamps"]):
            assert start_s == over_s
            assert label != "op" or end_s - start_s >= OP_S - 1e-9


def test_both_ends_draw_the_same_jitter_per_message(messages):
    drawn = delays(messages, "jitter")
    assert all(0.015 < delay_s < 0.045 for delay_s in drawn)
    assert len({round(delay_s, 5) for delay_s in drawn}) == 3


def test_bytes_take_the_time_of_the_bandwidth(messages):
    expected_s = 8 * NUM_BYTES / 1.6e6
    assert delays(messages, "bandwidth") == pytest.approx([expected_s] * 3, abs=MICROSECOND)


def test_new_conditions_can_heal_a_cut(messages):
    delays(messages, "healed by a change")
    both = of_both_ranks(messages, "healed by a change")
    (_, first_over_s), *_ = transfers(both[0])
    # They could meet only once the conditions had changed at both ends.
    assert first_over_s >= max(message["healed_s"] for message in both) - MICROSECOND


def test_a_lasting_cut_is_a_named_error_at_both_ends(messages):
    for message in of_both_ranks(messages, "cut for good"):
        assert message["error"].startswith("activation[0] 0>1 of step 6, epoch 0: link 0-1 is cut")
    assert delays(messages, "healthy again") == pytest.approx([0.0] * 3, abs=MICROSECOND)


def test_without_pace_the_dispatching_thread_waits(messages):
    for message in of_both_ranks(messages, "unpaced"):
        arrivals_s = message["arrivals_s"]
        assert all(later - earlier >= 0.03 for earlier, later in pairwise(arrivals_s))
        for arrived_s, (_, over_s) in zip(arrivals_s, transfers(message), strict=True):
            assert over_s - arrived_s >= 0.03
