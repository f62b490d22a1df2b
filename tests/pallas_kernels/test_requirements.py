"""What is said where the kernels can't be had."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxmorph.pallas_kernels import NoKernelsError, require_kernels, requirements

pytestmark = pytest.mark.one_jax


def gpu(capability: str | None = "9.0", kind="NVIDIA H100") -> Any:
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    return device


@pytest.fixture
def cuda(monkeypatch):
    """Has JAX say that a device is one of CUDA's."""

    def say(device):
        def devices(platform):
            assert platform == "cuda"
            return [device]

        monkeypatch.setattr(jax, "devices", devices)
        return device

    return say


@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.1"])
@pytest.mark.parametrize("host", ["x86_64", "AMD64"])
def test_hopper_and_later_on_x86_will_do(cuda, capability, host):
    require_kernels(cuda(gpu(capability)), host)


@pytest.mark.parametrize(
    ("device", "host", "reason"),
    [
        (gpu("8.0", "NVIDIA A100"), "x86_64", r"got sm_80 \(NVIDIA A100\), expected sm_90 or"),
        (gpu("8.9", "NVIDIA L40"), "x86_64", r"got sm_89 \(NVIDIA L40\), expected sm_90 or"),
        (gpu(None), "x86_64", r"got compute capability None \(NVIDIA H100\), expected 9.0"),
        (gpu("gfx942"), "x86_64", r"got compute capability gfx942 .*, expected 9.0"),
        (gpu(), "aarch64", "got a host of aarch64, expected x86_64: "),
    ],
)
def test_other_devices_and_hosts_are_named(cuda, device, host, reason):
    with pytest.raises(NoKernelsError, match=f"^{reason}"):
        require_kernels(cuda(device), host)


def test_a_gpu_that_is_not_cudas_is_refused(cuda):
    cuda(gpu())
    with pytest.raises(NoKernelsError, match=r"^got Instinct \(gpu\), expected a CUDA GPU"):
        require_kernels(gpu("9.0", "Instinct"), "x86_64")


def test_a_cpu_is_refused():
    with pytest.raises(NoKernelsError, match=r"^got cpu \(cpu\), expected a CUDA GPU"):
        require_kernels(jax.devices("cpu")[0])


def test_a_jax_without_mosaic_is_refused_last(cuda, monkeypatch):
    def fail():
        raise ImportError("no Mosaic")

    monkeypatch.setattr(requirements, "require_mosaic", fail)
    with pytest.raises(ImportError, match="no Mosaic"):
        require_kernels(cuda(gpu()), "x86_64")
