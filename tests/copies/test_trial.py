"""The trial of a copy backend detects a device that signals wrongly."""

from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import FakeKernels, FakeLibrary, view_here

from jaxmorph.copies.copy_engine import CopyEngineSend
from jaxmorph.copies.cuda_driver import CudaDriver, RegisteredMemory
from jaxmorph.copies.host_memory import PinnedHostSend
from jaxmorph.copies.kernels import KernelSend
from jaxmorph.copies.trial import try_send

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
ENGINE, KERNELS = BACKENDS = "copy_engine", "pallas"


def trial_of(name, library, fake=None):
    driver = CudaDriver(library, 0)
    memory, pinned = RegisteredMemory(driver), PinnedHostSend()
    kernel = (fake or FakeKernels(library)).copy_to_host
    make: dict[str, Any] = {
        ENGINE: lambda: CopyEngineSend(driver, memory, pinned, view_here),
        KERNELS: lambda: KernelSend(memory, pinned, kernel, lambda _: None),
    }
    backend = make[name]()
    try:
        try_send(backend, PLACEMENT, memory)
    finally:
        backend.close()
        pinned.close()
    assert library.registered == {}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_working_backend_passes_its_trial_and_unregisters_all(name):
    trial_of(name, FakeLibrary())


class HastyLibrary(FakeLibrary):
    """Writes words before the copies enqueued ahead of them."""

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

    def copy(self, payload, slot):
        super().copy(payload[:1], slot)


class SilentKernels(FakeKernels):
    """Signals nothing."""

    def copy(self, payload, slot):
        super().copy(payload, slot._replace(signal_address=0))


@pytest.mark.parametrize(
    ("name", "library", "kernels", "reason"),
    [
        (ENGINE, HastyLibrary, FakeKernels, "the bytes that came"),
        (ENGINE, SilentLibrary, FakeKernels, "has signalled nothing"),
        (KERNELS, FakeLibrary, HastyKernels, "the bytes that came"),
        (KERNELS, FakeLibrary, SilentKernels, "has signalled nothing"),
    ],
)
def test_a_device_that_signals_wrongly_fails_the_trial(name, library, kernels, reason):
    with pytest.raises(RuntimeError, match=reason):
        trial_of(name, device := library(), kernels(device))
