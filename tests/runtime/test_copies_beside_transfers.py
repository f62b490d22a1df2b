"""Stashes are copied while a direct transfer waits for its peer."""

import pytest

from jaxmorph.runtime.launcher import OFFLOADING_THREADS

pytestmark = pytest.mark.multiprocess


def test_copies_do_not_wait_for_a_transfer_that_waits(told_by_ranks):
    told = told_by_ranks("waiting_link_rank", 2, least_threads=OFFLOADING_THREADS)
    assert [message["copied"] for message in told if message["rank"] == 0] == [True]
