"""A device that runs programs later."""

import pytest
from oracles.fake_gpu import LaterDevice

from jaxmorph.copies.kernels import KernelProgram


@pytest.fixture
def later(monkeypatch):
    """Programs compiled from now on run when the test asks."""
    device = LaterDevice(KernelProgram.compile)
    monkeypatch.setattr(KernelProgram, "compile", lambda program: device.compile(program))
    return device
