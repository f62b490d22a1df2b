"""A direct link whose transfer fails, and the communicators that it has left."""

import pytest

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results(run_as_ranks):
    found = run_as_ranks("failed_link_rank", 2, least_threads=2)
    return sorted(found, key=lambda message: message["rank"])


def test_an_unmatched_transfer_closes_both_directions(results):
    sender, receiver = results
    assert sender["first"]
    assert receiver["first"]
    assert sender["alone"] is not None
    assert sender["closed"] is not None
    assert receiver["closed"] is not None


def test_each_tuple_of_devices_has_a_communicator(results):
    for result in results:
        assert result["over_each"] == [[True, True, True]] * 7
        assert result["exhausted"].startswith("link 0-1 has failed 8 times, and a direct link can")


def test_payloads_over_spare_devices_end_on_the_first(results):
    for result in results:
        assert set(result["devices"]) == {True}
