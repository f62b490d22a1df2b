"""A direct link that fails: what is known of its messages, and how it begins again."""

import pytest

MESSAGE_BYTES = 8 * 16 * 4

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def messages(run_as_ranks):
    return sorted(
        run_as_ranks("failed_link_rank", 2, least_threads=2), key=lambda message: message["rank"]
    )


def test_an_unmatched_transfer_closes_both_directions(messages):
    sender, receiver = messages
    assert sender["first"] == receiver["first"] == [True, True]
    assert sender["alone"] is not None
    assert sender["closed"] is not None
    assert receiver["closed"] is not None


def test_the_sender_keeps_what_the_count_lacks(messages):
    sender, receiver = messages
    assert sender["kept_bytes"] == 3 * MESSAGE_BYTES
    assert sender["again"] == [2]
    assert receiver["again"] == []


def test_a_new_epoch_carries_both_directions(messages):
    for message in messages:
        assert message["refused"] == message["expected_refusal"]
        assert message["second"] == [True] * (2 + message["rank"])


def test_each_tuple_of_devices_has_a_communicator(messages):
    for message in messages:
        assert message["over_each"] == [[True, True]] * 6
        assert message["exhausted"].startswith("link 0-1 has failed 8 times, and a direct link can")


def test_payloads_over_spare_devices_end_on_the_first(messages):
    for message in messages:
        assert set(message["devices"]) == {True}
