"""A device that runs programs later."""

import pytest
from oracles.fake_gpu import LaterDevice

from jaxmorph.copies import kernels


@pytest.fixture
def later(monkeypatch):
    """Programs compiled from now on run when the test asks."""
    device = LaterDevice(kernels.compiled)
    monkeypatch.setattr(kernels, "compiled", device.compiled)
    return device
