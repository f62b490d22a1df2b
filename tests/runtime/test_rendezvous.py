import threading

import jax
import pytest

from jaxmorph.runtime.rendezvous import (
    CoordinationRendezvous,
    RendezvousTimeoutError,
    SoleRank,
)


class Store:
    """A key-value store in memory, with the coordination service's manners."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            assert key.endswith("/")
            self.values = {k: v for k, v in self.values.items() if not k.startswith(key)}


def meet(num_ranks, rounds, store, deadline_s=20.0):
    """What each rank heard, round by round."""
    heard = [[] for _ in range(num_ranks)]

    def run(rank):
        meeting = CoordinationRendezvous(deadline_s, store, rank, num_ranks)
        for number in range(rounds):
            heard[rank].append(meeting.exchange({"rank": rank, "round": number}))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return heard


def test_every_rank_hears_all_in_rank_order():
    heard = meet(3, rounds=2, store=Store())
    expected = [[{"rank": rank, "round": number} for rank in range(3)] for number in range(2)]
    assert heard == [expected] * 3


def test_the_store_does_not_grow_with_the_run():
    store = Store()
    heard = meet(2, rounds=400, store=store)
    assert [len(rounds) for rounds in heard] == [400, 400]
    assert len(store.values) <= 2 * 2 * 64


def test_a_rank_that_does_not_come_is_named():
    meeting = CoordinationRendezvous(0.05, Store(), rank=0, num_ranks=3)
    with pytest.raises(
        RendezvousTimeoutError, match=r"rank 1 did not come to meeting 0 within 0\.05 s"
    ):
        meeting.exchange({})


def test_a_rank_alone_hears_itself_as_if_from_the_network():
    assert SoleRank().exchange({"x": (1, 2)}) == [{"x": [1, 2]}]
