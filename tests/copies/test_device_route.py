"""The delegated route with copies by a fake device, from one end of a link to the other.

Its driver runs enqueued work on a thread of its own, as do the callbacks in place of kernels; the
data plane is in memory and polls for signals, as sidecars do.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import LIMIT_S, FakeGpu, FakeKernels, placed_here, view_here
from oracles.loopback import LoopbackNetwork

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.copy_engine import CopyEngineSend
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory
from jaxmorph.copies.dlpack_memory import CPU
from jaxmorph.copies.host_memory import HostReceive, PinnedHostSend
from jaxmorph.copies.kernels import KernelReceive, KernelSend
from jaxmorph.copies.registered_receive import RegisteredReceive
from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.payloads import channel_name
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.transport.names import PeerGoneError
from jaxmorph.transport.plane import ChannelSpec

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
SHAPE = (3, 5)


def activation(microbatch, epoch=0):
    return TransferIdentity(epoch, 0, Transfer(Payload.ACTIVATION, 0, 1, microbatch))


class Ends:
    """Both ends of a link in one process."""

    def __init__(self, device, backend_name):
        payload = PayloadShape(SHAPE, jnp.dtype("float32"))
        uses = {channel_of(activation(0).transfer): SlotUse(payload, 15)}
        specs = [ChannelSpec(channel_name(each), use.slot_bytes, 2) for each, use in uses.items()]
        network = LoopbackNetwork()
        self.planes = [network.plane(0, specs, []), network.plane(1, [], specs)]
        for rank, plane in enumerate(self.planes):
            plane.connect({1 - rank: self.planes[1 - rank].addresses()}, b"secret")
        driver = CudaDriver(device.library, 0)
        self.memory = RegisteredMemory(driver)
        for plane in self.planes:
            plane.report_memory(self.memory)
        self.pinned = PinnedHostSend()
        self.kernels = FakeKernels(device.library)
        make = {"copy_engine": self._by_copy_engine, "pallas": self._by_kernels}[backend_name]
        self.backend, self.receive = make(driver)
        self.sender, self.receiver = (
            DelegatedRoute(plane, uses, rank, PLACEMENT, self.backend, receive_backend=self.receive)
            for rank, plane in enumerate(self.planes)
        )

    def _by_copy_engine(self, driver):
        receive = RegisteredReceive(self.memory, 0, HostReceive(), CPU, placed_here)
        return CopyEngineSend(driver, self.memory, self.pinned, view_here), receive

    def _by_kernels(self, _):
        to, out_of = self.kernels.copy_to_host, self.kernels.copy_from_host
        receive = KernelReceive(self.memory, HostReceive(), out_of, _anywhere)
        return KernelSend(self.memory, self.pinned, to, _anywhere), receive

    def send(self, identity, value):
        return self.sender.post(identity, value, time.monotonic())

    def take(self, identity, wait_s=LIMIT_S):
        now_s = time.monotonic()
        return self.receiver.take(identity, now_s, now_s + wait_s)

    def close(self):
        self.backend.close()
        self.receive.close()
        self.pinned.close()
        for plane in self.planes:
            plane.close()


@pytest.fixture
def device():
    device = FakeGpu()
    yield device
    device.close()


def _anywhere(device):
    """Kernels support any device here."""


@pytest.fixture(params=["copy_engine", "pallas"])
def backend_name(request):
    return request.param


@pytest.fixture
def ends(device, backend_name):
    ends = Ends(device, backend_name)
    yield ends
    device.go.set()
    ends.close()
    assert device.library.registered == {}


def values(seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), jnp.float32)


def test_messages_arrive_bit_by_bit_however_late_the_copies(ends, device, backend_name):
    device.go.set()
    taken = []
    for microbatch in range(40):
        ends.send(activation(microbatch), values(microbatch))
        taken.append(ends.take(activation(microbatch)).value)
    ends.sender.settle()
    ends.receiver.settle()
    for microbatch, value in enumerate(taken):  # slots have been reused many times by now
        assert np.asarray(value).tobytes() == np.asarray(values(microbatch)).tobytes()
    assert ends.sender.send_backend == ends.receiver.receive_backend == backend_name


def test_a_late_copy_does_not_count_as_link_latency(ends, device):
    sent_s = time.monotonic()
    ends.send(activation(0), values(0))
    with pytest.raises(TimeoutError):
        ends.take(activation(0), wait_s=0.2)
    device.go.set()
    moved = ends.take(activation(0))
    assert np.array_equal(np.asarray(moved.value), np.asarray(values(0)))
    assert sent_s + 0.2 <= moved.peer_arrived_s <= moved.over_s


@pytest.mark.parametrize("backend_name", ["copy_engine"])
def test_a_failed_copy_raises_at_both_ends_and_blocks_nothing(ends, device):
    ends.send(activation(0), values(0))
    device.library.failing.update(cuEventQuery=700, cuEventSynchronize=700)
    with pytest.raises(CudaError, match="cuEventSynchronize gave 700"):
        ends.sender.settle()
    with pytest.raises(PeerGoneError, match="rank 0 failed before it could send it"):
        ends.take(activation(0))
    device.library.failing.clear()
    for route in (ends.sender, ends.receiver):
        route.abandon(0)
    device.go.set()
    ends.send(activation(0, epoch=1), values(7))
    taken = ends.take(activation(0, epoch=1)).value
    assert np.array_equal(np.asarray(taken), np.asarray(values(7)))
    ends.receiver.settle()
