"""A direct link that fails: what is known of its messages, and how it begins again."""

import pytest

MESSAGE_BYTES = 8 * 16 * 4

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def told(told_by_ranks):
    return sorted(
        told_by_ranks("failed_link_rank", 2, least_threads=2), key=lambda message: message["rank"]
    )


def test_a_transfer_whose_peer_does_not_come_fails_and_closes_both_directions(told):
    sender, receiver = told
    assert sender["first"] == receiver["first"] == [True, True]
    assert sender["alone"] is not None
    assert sender["closed"] is not None
    assert receiver["closed"] is not None


def test_the_sender_has_kept_what_the_receivers_count_does_not_cover(told):
    sender, receiver = told
    assert sender["kept_bytes"] == 3 * MESSAGE_BYTES
    assert sender["again"] == [2]
    assert receiver["again"] == []


def test_a_new_epoch_refuses_the_old_one_and_carries_both_directions_bit_by_bit(told):
    for message in told:
        assert message["refused"] == message["expected_refusal"]
        assert message["second"] == [True] * (2 + message["rank"])


def test_a_link_has_a_communicator_for_each_tuple_of_devices(told):
    for message in told:
        assert message["over_each"] == [[True, True]] * 6
        assert message["exhausted"].startswith("link 0-1 has failed 8 times, and a direct link can")


def test_what_comes_over_spare_devices_is_where_stages_compute(told):
    for message in told:
        assert set(message["devices"]) == {True}
