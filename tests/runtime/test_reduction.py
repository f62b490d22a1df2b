"""Sums over replicas: the same bits on both routes, and what happens where one fails."""

import math
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracles.loopback import LoopbackNetwork
from test_rendezvous import in_threads

from jaxmorph.placement import Layout, Replica
from jaxmorph.progress import progress
from jaxmorph.runtime import reduction
from jaxmorph.runtime.causes import WaitedInVainError
from jaxmorph.runtime.executor import StepOutcome
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.queue import sleep_until
from jaxmorph.runtime.reduction import DelegatedSum, DirectSum, sum_channels
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.routes import TransferMismatchError
from jaxmorph.runtime.shares import WHOLE, Shares
from jaxmorph.stage.mesh import AXES, DATA, TENSOR
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.names import ChannelName, PeerGoneError

SECRET = bytes(range(32))
SHAPES = [(7,), (3, 4), (), (2, 2, 5)]
SPLIT = [PartitionSpec(), PartitionSpec(None, TENSOR), PartitionSpec(), PartitionSpec(None, TENSOR)]
STEP, PATIENCE_S = 5, 30.0
# Replicas, devices of each, and the axes along which replicas divide the arrays.
DIVIDED = [
    (2, 1, [WHOLE, 1, WHOLE, 0]),
    (4, 1, [WHOLE, 1, WHOLE, WHOLE]),
    (2, 2, [WHOLE, WHOLE, WHOLE, 0]),  # devices split the other axes
]


def numbers_of(replica):
    """Gradients of one replica, with some that are too small for normal numbers."""
    random = np.random.default_rng(replica)
    made = [np.asarray(random.normal(size=shape), np.float32) for shape in SHAPES]
    made[0][:2] = 1e-39, -0.0
    return made


def summed(num_replicas, of=numbers_of):
    """In the order of replicas."""
    total = of(0)
    for replica in range(1, num_replicas):
        total = [one + other for one, other in zip(total, of(replica), strict=True)]
    return total


def placed(numbers, specs, mesh):
    """A replica's gradients on its stage's devices: two chunks."""
    leaves = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(numbers, specs, strict=True)
    ]
    return {"a": leaves[0], "b": leaves[1]}, {"c": leaves[2], "d": leaves[3]}


def own_mesh(replica, num_devices):
    devices = jax.devices()
    at = replica * num_devices % (len(devices) - num_devices + 1)
    return Mesh(np.array(devices[at : at + num_devices]).reshape(1, num_devices), AXES)


def gradients_of(replica, num_devices=1):
    specs = SPLIT if num_devices > 1 else [PartitionSpec()] * len(SHAPES)
    return placed(numbers_of(replica), specs, own_mesh(replica, num_devices))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def normal(tree):
    """Without the first leaf's smallest number, which devices may take for 0."""
    first, *others = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return bits([first[1:], *others])


def sum_direct(num_replicas, num_devices, *, divides=False):
    """The sums as each replica's devices have them, all of them in this process."""
    devices = np.array(jax.devices()[: num_replicas * num_devices])
    mesh = Mesh(devices.reshape(num_replicas, num_devices), (DATA, TENSOR))
    specs = SPLIT if num_devices > 1 else [PartitionSpec()] * len(SHAPES)
    joint = []
    for leaf, spec in enumerate(specs):
        sharding, shape = NamedSharding(mesh, spec), SHAPES[leaf]
        shards = [
            jax.device_put(numbers_of(np.argwhere(mesh.devices == device)[0][0])[leaf][at], device)
            for device, at in sharding.devices_indices_map(shape).items()
        ]
        joint.append(jax.make_array_from_single_device_arrays(shape, sharding, shards))
    shares = Shares.of(joint, Replica(0, num_replicas)) if divides else None
    sums = DirectSum(mesh, joint, shares=shares).run(joint, STEP)
    of_device = [{shard.device: shard for shard in leaf.addressable_shards} for leaf in sums]
    found = []
    for row in mesh.devices:
        whole = [np.zeros(leaf.shape, np.float32) for leaf in sums]
        for device in row:
            for array, shards in zip(whole, of_device, strict=True):
                array[shards[device].index] = shards[device].data
        found.append(whole)
    return found


@pytest.fixture(params=["one bucket", "a bucket for each array"])
def buckets(request, monkeypatch):
    if request.param != "one bucket":
        monkeypatch.setattr(reduction, "BUCKET_BYTES", 4)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize(("replicas", "devices"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_direct_sums_add_in_the_order_of_replicas(replicas, devices):
    for found in sum_direct(replicas, devices):
        assert normal(found) == normal(summed(replicas))


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize(
    ("replicas", "devices", "axes"),
    DIVIDED,
)
def test_replicas_may_get_their_shares_of_direct_sums(replicas, devices, axes):
    for index, found in enumerate(sum_direct(replicas, devices, divides=True)):
        shares = Shares(Replica(index, replicas), axes)
        assert normal(found) == normal(shares.take(summed(replicas)))


class Delegated:
    """Each replica's `DelegatedSum`, in a thread of its own."""

    def __init__(
        self, network, num_replicas, num_devices=1, timeout_s=PATIENCE_S, start=None, axes=None
    ):
        self.gradients = [gradients_of(each, num_devices) for each in range(num_replicas)]
        owns = [Replica(index, num_replicas) for index in range(num_replicas)]
        start = start or network.plane
        self.planes: list[Any] = [
            start(own.index, *sum_channels(gradients, own))
            for own, gradients in zip(owns, self.gradients, strict=True)
        ]
        for own, plane in zip(owns, self.planes, strict=True):
            peers = {each: self.planes[each].addresses() for each in range(num_replicas)}
            plane.connect({each: peers[each] for each in peers if each != own.index}, SECRET)
        members = range(1, 2 * num_replicas, 2)  # of the second of two stages
        self.sums = [
            DelegatedSum(plane, own, members, gradients, timeout_s, axes and Shares(own, axes))
            for own, plane, gradients in zip(owns, self.planes, self.gradients, strict=True)
        ]

    def run(self, step=STEP):
        found: list[Any] = [None] * len(self.sums)

        def work(index):
            found[index] = self.sums[index].run(self.gradients[index], step)

        threads = [threading.Thread(target=work, args=(at,)) for at in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        return found

    def close(self):
        for plane in self.planes:
            plane.close()


@pytest.fixture
def delegated():
    with ExitStack() as made:
        yield lambda *sizes, **options: made.enter_context(
            closing(Delegated(LoopbackNetwork(), *sizes, **options))
        )


@pytest.mark.parametrize("part_bytes", [4, 20, reduction.PART_BYTES])
@pytest.mark.parametrize(("replicas", "devices"), [(2, 1), (3, 1), (2, 2)])
def test_delegated_sums_have_the_bits_of_direct_ones(
    delegated, monkeypatch, replicas, devices, part_bytes
):
    monkeypatch.setattr(reduction, "PART_BYTES", part_bytes)
    sums = delegated(replicas, devices)
    expected = sum_direct(replicas, devices)
    for _ in range(2):
        for found, given, direct in zip(sums.run(), sums.gradients, expected, strict=True):
            assert jax.tree.structure(found) == jax.tree.structure(given)
            assert bits(found) == bits(direct)
            for leaf, before in zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True):
                assert leaf.sharding == before.sharding
                for shard in leaf.addressable_shards:
                    whole = np.asarray(leaf)[shard.index]
                    assert np.asarray(shard.data).tobytes() == whole.tobytes()


def count_totals(monkeypatch):
    """The numbers that replicas have sent as totals."""
    sent = []
    post = DelegatedSum._post

    def counted(own, other, number, part, step, values, *of):
        if number == 1:
            sent.append(values.size)
        post(own, other, number, part, step, values, *of)

    monkeypatch.setattr(DelegatedSum, "_post", counted)
    return sent


@pytest.mark.parametrize("part_bytes", [4, 20, reduction.PART_BYTES])
@pytest.mark.parametrize(
    ("replicas", "devices", "axes"),
    DIVIDED,
)
def test_replicas_may_get_their_shares_of_delegated_sums(
    delegated, monkeypatch, replicas, devices, axes, part_bytes
):
    monkeypatch.setattr(reduction, "PART_BYTES", part_bytes)
    direct = sum_direct(replicas, devices, divides=True)
    sums = delegated(replicas, devices, axes=axes)
    totals = count_totals(monkeypatch)
    for found, given, expected in zip(sums.run(), sums.gradients, direct, strict=True):
        assert bits(found) == bits(expected)
        for leaf, before in zip(*map(jax.tree.leaves, (found, given)), strict=True):
            assert leaf.sharding == before.sharding
    sizes = [math.prod(shape) for shape in SHAPES]
    whole = sum(size for size, axis in zip(sizes, axes, strict=True) if axis == WHOLE)
    share = math.ceil(whole / replicas)
    length = min(share, part_bytes // 4)
    assert sum(totals) == replicas * (replicas - 1) * math.ceil(share / length) * length


def test_sidecars_carry_a_sum(delegated, monkeypatch):
    monkeypatch.setattr(reduction, "PART_BYTES", 20)
    sums = delegated(2, start=SidecarPlane)
    assert [normal(found) for found in sums.run()] == [normal(summed(2))] * 2


def test_a_part_of_another_step_is_refused(delegated):
    sums = delegated(2)
    slot = sums.planes[1].reserve(ChannelName(0, 1, 0), reduction.time.monotonic() + PATIENCE_S)
    slot.post(4, (0, STEP - 1, 0))
    slot.complete()
    with pytest.raises(TransferMismatchError, match=r"got .*4, 0.* of a sum, expected .*5, 0"):
        sums.sums[0].run(sums.gradients[0], STEP)


def test_a_gone_replica_is_named_by_its_rank_in_the_run(delegated):
    sums = delegated(2)
    sums.planes[1].close()
    with pytest.raises(PeerGoneError, match="rank 3 is gone, of replica 1") as gone:
        sums.sums[0].run(sums.gradients[0], STEP)
    assert gone.value.waited_for == 3


def test_a_late_replica_is_named_by_its_rank_in_the_run(delegated):
    sums = delegated(3, timeout_s=0.05)
    with pytest.raises(WaitedInVainError, match="from rank 3 of replica 1") as late:
        sums.sums[0].run(sums.gradients[0], STEP)
    assert late.value.waited_for == 3


TIMED_OUT = jax.errors.JaxRuntimeError("Gloo all-to-all failed: timed out")


class Direct:
    """A direct sum that fails in some of the replicas."""

    def __init__(self, gradients, fails, error):
        self.sums, self.fails = jax.tree.map(lambda leaf: leaf * 0, gradients), fails
        self.error = error

    def run(self, gradients, step):
        if self.fails:
            raise self.error
        return self.sums


class Stage:
    """Has gradients that can be replaced."""

    shares = None

    def __init__(self, gradients):
        self.gradients = gradients

    def replace_gradients(self, gradients):
        self.gradients = gradients


@pytest.fixture
def sum_in_threads(delegated):
    """Two replicas sum twice; the routes, gradients and events of each, or its error."""

    def run(fails, *, fails_over=True, error=TIMED_OUT):
        sums = delegated(2)

        def body(rendezvous):
            rank = rendezvous.rank
            stage: Any = Stage(sums.gradients[rank])
            direct: Any = None if fails is None else Direct(stage.gradients, rank in fails, error)
            of_hosts = sums.sums[rank] if fails_over else None
            total = GradientSum(Replicas.of(rendezvous, Layout.first(1, 2)), direct, of_hosts)
            try:
                outcome, _ = total.run(stage, StepOutcome(0.5, (), []), [], STEP)
            except (jax.errors.JaxRuntimeError, ValueError) as raised:
                return raised
            found = bits(stage.gradients)
            stage.gradients = sums.gradients[rank]
            total.run(stage, StepOutcome(0.5, (), []), [], STEP + 1)
            assert outcome.loss == 1.0
            assert bits(stage.gradients) == found
            is_direct, events = total.direct is not None, total.take_events()
            return SimpleNamespace(is_direct=is_direct, found=found, events=events)

        return in_threads(2, body), sums

    return run


def test_a_failed_direct_sum_continues_delegated_in_all_replicas(sum_in_threads):
    found, sums = sum_in_threads(fails={1})
    expected = bits(sums.run(STEP + 2)[0])
    for each in found:
        assert not each.is_direct
        assert each.found == expected
        assert [event.kind for event in each.events] == ["route_changed"]
    details = [each.events[0].detail for each in found]
    assert details[0].endswith("from now on: it failed in another replica")
    assert details[1].endswith("from now on: JaxRuntimeError: Gloo all-to-all failed: timed out")


def test_a_sum_that_fails_when_it_is_dispatched_continues_delegated(sum_in_threads):
    error = ValueError("UNKNOWN: Gloo all-to-all failed: connection closed by peer")
    found, _ = sum_in_threads(fails={0, 1}, error=error)
    assert [each.is_direct for each in found] == [False] * 2


def test_a_replica_without_memory_is_no_failed_path(sum_in_threads):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    found, _ = sum_in_threads(fails={0, 1}, error=error)
    assert found == [error] * 2


def test_a_late_replica_is_no_failed_path(delegated):
    """The deadline of a direct sum begins when all have come."""
    sums, has_begun, has_come = delegated(2), threading.Event(), threading.Event()

    class DirectOfTwo(Direct):
        def run(self, gradients, step):
            has_begun.set()
            self.fails = not has_come.is_set()
            return super().run(gradients, step)

    def body(rendezvous):
        rank = rendezvous.rank
        stage: Any = Stage(sums.gradients[rank])
        direct: Any = DirectOfTwo(stage.gradients, False, TIMED_OUT)
        replicas = Replicas.of(rendezvous, Layout.first(1, 2))
        total = GradientSum(replicas, direct, sums.sums[rank])
        if rank == 1:
            assert not has_begun.wait(0.2)
            has_come.set()
        total.run(stage, StepOutcome(0.5, (), []), [], STEP)
        return total.direct is direct, total.take_events()

    assert in_threads(2, body) == [(True, [])] * 2


def test_each_part_of_a_delegated_sum_is_progress(delegated, monkeypatch):
    monkeypatch.setattr(reduction, "PART_BYTES", 16)
    sums, before = delegated(2), progress.stamps
    sums.run(STEP)
    num_parts = -(-sum(each.nbytes for each in numbers_of(0)) // 16)
    assert progress.stamps - before >= 2 * num_parts


def test_lost_connections_with_other_replicas_are_events(delegated):
    sums = delegated(2)
    lost = [{"time_s": 2.0, "kind": "lane_down", "peer": 1, "lane": 0}]
    plane: Any = SimpleNamespace(events=lambda: [lost.pop()] if lost else [])

    def body(rendezvous):
        replicas = Replicas.of(rendezvous, Layout.first(1, 2))
        return GradientSum(replicas, None, sums.sums[rendezvous.rank], plane=plane)

    total = in_threads(2, body)[0]
    (event,) = total.take_events()
    assert (event.kind, event.peer) == ("lane_down", None)
    assert event.detail == "sums with rank 1: lane 0"
    assert total.take_events() == []


def test_a_sound_direct_sum_stays_direct(sum_in_threads):
    found, _ = sum_in_threads(fails=())
    assert [(each.is_direct, each.events) for each in found] == [(True, [])] * 2


def test_a_sum_may_be_delegated_from_the_start(sum_in_threads):
    found, sums = sum_in_threads(fails=None)
    assert [(each.is_direct, each.events) for each in found] == [(False, [])] * 2
    assert found[0].found == bits(sums.run(STEP + 2)[0])


def test_a_slow_pair_is_found_by_delegated_sums_over_two_replicas(delegated):
    sums, late_s = delegated(3), 0.2
    take = sums.sums[2]._take

    def take_late(index, *rest):
        if index == 1:
            sleep_until(time.monotonic() + late_s)
        return take(index, *rest)

    sums.sums[2]._take = take_late

    def probe(rendezvous):
        replicas = Replicas.of(rendezvous, Layout.first(1, 3))
        total = GradientSum(replicas, None, sums.sums[rendezvous.rank])
        return total.probe(sums.gradients[rendezvous.rank], STEP)

    took_s = [*in_threads(3, probe)]
    assert [[*each] for each in took_s] == [["0-1", "0-2"], ["0-1", "1-2"], ["0-2", "1-2"]]
    assert took_s[2]["1-2"] > 2 * late_s
    assert max(took_s[2], key=took_s[2].get) == "1-2"


def test_a_failed_direct_sum_ends_a_run_without_failover(sum_in_threads):
    found, _ = sum_in_threads(fails={0, 1}, fails_over=False)
    assert [str(each) for each in found] == ["Gloo all-to-all failed: timed out"] * 2
