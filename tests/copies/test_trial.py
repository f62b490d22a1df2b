"""A device that signals wrongly is found by the trial of a copy backend."""

from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import FakeKernels, FakeLibrary, on_a_stream, view_here

from jaxmorph.copies.copy_engine import CopyEngineSend, StreamCallbackSend
from jaxmorph.copies.cuda_driver import CudaDriver, RegisteredMemory
from jaxmorph.copies.host_memory import PinnedHostSend
from jaxmorph.copies.kernels import KernelSend
from jaxmorph.copies.trial import try_send

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
ENGINE, KERNELS, CALLBACK = WAYS = "copy_engine", "pallas", "buffer_callback"


def trial_of(way, library, fake=None):
    driver = CudaDriver(library, 0)
    memory, pinned = RegisteredMemory(driver), PinnedHostSend()
    kernel = (fake or FakeKernels(library)).copy_to_host
    make: dict[str, Any] = {
        ENGINE: lambda: CopyEngineSend(driver, memory, pinned, view_here),
        KERNELS: lambda: KernelSend(memory, pinned, kernel, lambda _: None),
        CALLBACK: lambda: StreamCallbackSend(driver, memory, pinned, on_a_stream),
    }
    backend = make[way]()
    try:
        try_send(backend, PLACEMENT, memory)
    finally:
        if way != CALLBACK:
            backend.close()
        pinned.close()
    assert library.registered == {}


@pytest.mark.parametrize("way", WAYS)
def test_it_passes_its_trial_and_leaves_nothing_registered(way):
    trial_of(way, FakeLibrary())


class HastyLibrary(FakeLibrary):
    """Writes words before the copies that stand in front of them."""

    def _cuMemcpyDtoHAsync_v2(self, *arguments):  # noqa: N802
        self.copies = [lambda: FakeLibrary._cuMemcpyDtoHAsync_v2(self, *arguments)]

    def _cuEventSynchronize(self, event):  # noqa: N802
        while self.copies:
            self.copies.pop()()


class SilentLibrary(FakeLibrary):
    """Never writes a word."""

    def _cuStreamWriteValue32_v2(self, *arguments):  # noqa: N802
        pass


class HastyKernels(FakeKernels):
    """Signals before it copies."""

    def copy(self, payload, told):
        super().copy(payload[:1], told)


class SilentKernels(FakeKernels):
    """Signals nothing."""

    def copy(self, payload, told):
        super().copy(payload, told._replace(signal_address=0))


@pytest.mark.parametrize(
    ("way", "library", "kernels", "reason"),
    [
        (ENGINE, HastyLibrary, FakeKernels, "the bytes that came"),
        (ENGINE, SilentLibrary, FakeKernels, "has signalled nothing"),
        (KERNELS, FakeLibrary, HastyKernels, "the bytes that came"),
        (KERNELS, FakeLibrary, SilentKernels, "has signalled nothing"),
    ],
)
def test_a_device_that_signals_wrongly_fails_the_trial(way, library, kernels, reason):
    with pytest.raises(RuntimeError, match=reason):
        trial_of(way, device := library(), kernels(device))
