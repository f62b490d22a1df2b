"""What ranks of several replicas agree on at the end of a step, and each replica's share of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from test_rendezvous import in_threads

from jaxmorph.messages import EventEmitted, StepTimelines
from jaxmorph.placement import Layout, Replica
from jaxmorph.records import Event, EventKind, ReplicaStep
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.rendezvous import RendezvousError, SoleRank, gather
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.report import OfReplicas, SumTook
from jaxmorph.training.callbacks import SaveRequest


@dataclass(frozen=True)
class OfStage:
    """A part of a report that stays with its replica."""

    number: int = 0


def step_of(index):
    return ReplicaStep("zb-h2", (2, 1), {"0-1": "direct"}, None, float(index))


def messages_of(index):
    event = Event(0.5, index, EventKind.PLAN_CHANGED, f"r{index}:0-1")
    return EventEmitted(event), StepTimelines(index, {"measured": ("{}",)}, replica=index)


def test_ranks_are_grouped_by_replica_and_by_stage():
    def groups(rendezvous):
        replicas = Replicas.of(rendezvous, Layout.first(2, 3))
        own, others = replicas.pipeline, replicas.peers
        assert replicas.all_ranks is rendezvous
        return (
            replicas.own,
            [[each.rank, *each.members] for each in (own, others)],
            [gather(each, int, rendezvous.rank) for each in (own, others)],
        )

    found = in_threads(6, groups)
    assert found[0] == (Replica(0, 3), [[0, 0, 1], [0, 0, 2, 4]], [[0, 1], [0, 2, 4]])
    assert found[5] == (Replica(2, 3), [[1, 4, 5], [2, 1, 3, 5]], [[4, 5], [1, 3, 5]])


def test_a_replica_of_one_stage_exchanges_with_its_peers_alone():
    def groups(rendezvous):
        replicas = Replicas.of(rendezvous, Layout.first(1, 2))
        assert isinstance(replicas.pipeline, SoleRank)
        return [*replicas.pipeline.members], [*replicas.peers.members], replicas.peers.rank

    assert in_threads(2, groups) == [([0], [0, 1], 0), ([1], [0, 1], 1)]


def test_ranks_may_be_divided_again():
    def divide(rendezvous):
        found = [Replicas.of(rendezvous, Layout.first(4 // n, n)) for n in (2, 4, 2)]
        assert found[2].peers is found[0].peers
        return [[*each.peers.members] for each in found]

    assert in_threads(4, divide)[1] == [[1, 3], [0, 1, 2, 3], [1, 3]]


def test_a_rank_that_is_gone_is_named_by_its_number_in_the_run():
    def leave(rendezvous):
        replicas = Replicas.of(rendezvous, Layout.first(2, 2))
        group = {2: replicas.pipeline, 1: replicas.peers}.get(rendezvous.rank)
        if group is None:
            return None
        with pytest.raises(RendezvousError, match="rank 3 is gone") as gone:
            group.exchange({})
        return gone.value.waited_for

    assert in_threads(4, leave) == [None, 3, 3, None]


def test_a_rank_that_never_comes_to_its_group_is_named_by_its_number_in_the_run():
    def come(rendezvous):
        if rendezvous.rank != 2:
            return None
        rendezvous.limit(0.2)
        with pytest.raises(RendezvousError, match=r"ranks \[3\] did not come to") as late:
            rendezvous.group("last two", range(2, 4))
        return late.value.waited_for

    assert in_threads(4, come) == [None, None, 3, None]


def joined(rendezvous, parts, *, is_summed=True):
    replicas = Replicas.of(rendezvous, Layout.first(1, rendezvous.num_ranks))
    losses = (0.1, 0.2, 0.7)[rendezvous.rank]
    outcome = StepOutcome(losses, (), [], aux={"balance": float(rendezvous.rank)})
    sum_s = 0.1 * (1 + rendezvous.rank)
    return replicas.join(outcome, parts, SumTook(sum_s), is_summed=is_summed)


def test_losses_add_up_in_the_order_of_replicas():
    found = in_threads(3, lambda rendezvous: joined(rendezvous, []))
    assert [outcome.loss for outcome, _, _ in found] == [(0.1 + 0.2) + 0.7] * 3
    assert [outcome.aux for outcome, _, _ in found] == [{"balance": 1.0}] * 3
    assert [all_have for _, _, all_have in found] == [True] * 3


def test_one_replica_without_a_sum_counts_for_all():
    found = in_threads(3, lambda each: joined(each, [], is_summed=each.rank != 1))
    assert [all_have for _, _, all_have in found] == [False] * 3


def test_parts_for_all_replicas_are_joined_and_others_kept():
    def body(rendezvous):
        rank = rendezvous.rank
        asks = SaveRequest(is_time=rank == 0, stop_asked=rank == 2)
        own = OfReplicas((step_of(rank),), messages_of(rank) if rank else ())
        return joined(rendezvous, [asks, OfStage(rank), own])[1]

    steps, messages = tuple(map(step_of, range(3))), (*messages_of(1), *messages_of(2))
    for rank, (asks, of_stage, of_all, took) in enumerate(in_threads(3, body)):
        assert took == SumTook(0.1)  # of the replica that came last
        assert asks == SaveRequest(is_time=True, stop_asked=True)
        assert of_stage == OfStage(rank)
        assert of_all == OfReplicas(steps, messages)


def test_parts_that_equal_their_default_are_joined_too():
    def body(rendezvous):
        return joined(rendezvous, [SaveRequest(), OfReplicas()])[1]

    assert in_threads(3, body) == [[SaveRequest(), OfReplicas(), SumTook(0.1)]] * 3


@dataclass(frozen=True)
class Counted:
    loss: float
    counted: int


def test_evaluations_get_each_replicas_values():
    def body(rendezvous):
        replicas = Replicas.of(rendezvous, Layout.first(1, 2))
        return replicas.of_stage(Counted, Counted(0.5, rendezvous.rank))

    assert in_threads(2, body) == [[Counted(0.5, 0), Counted(0.5, 1)]] * 2


def test_replicas_divide_the_microbatches_of_all_arrays():
    tokens = np.arange(6 * 2 * 3).reshape(6, 2, 3)
    whole = StepInputs({"ids": tokens}, None, 0.25, {"mask": tokens > 4}, length_index=1)
    shares: list[Any] = [whole.of_replica(Replica(index, 3)) for index in range(3)]
    for index, share in enumerate(shares):
        np.testing.assert_array_equal(share.inputs["ids"], tokens[2 * index : 2 * index + 2])
        np.testing.assert_array_equal(share.extras["mask"], share.inputs["ids"] > 4)
        assert (share.targets, share.loss_weight, share.length_index) == (None, 0.25, 1)
        assert share.replica == Replica(index, 3)
    assert whole.of_replica(Replica()) is whole
