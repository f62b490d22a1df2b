"""The devices that the kernels support; Mosaic is imported in one module, and only when needed."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import jaxmorph.pallas_kernels
from jaxmorph.pallas_kernels import mosaic
from jaxmorph.pallas_kernels.mosaic import NoKernelsError, require_kernels

pytestmark = pytest.mark.one_jax

PACKAGE = Path(jaxmorph.pallas_kernels.__file__).parent
SHIM = "mosaic.py"
NOT_PUBLIC = ("jax._src", "jaxlib", "jax.interpreters", "jax.experimental.mosaic")
MOSAIC = (*NOT_PUBLIC, "jax.experimental.pallas.mosaic_gpu")


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(path, packages):
    return {
        name for name in _imports(path) if f"{name}.".startswith(tuple(f"{p}." for p in packages))
    }


def test_only_the_shim_imports_mosaic_or_private_jax():
    naming = {path.name for path in PACKAGE.rglob("*.py") if _named(path, MOSAIC)}
    assert naming == {SHIM}


def test_the_shim_imports_nothing_from_jaxs_private_package():
    assert not _named(PACKAGE / SHIM, ["jax._src"])


def test_importing_the_package_imports_no_pallas():
    code = (
        "import sys, jaxmorph.pallas_kernels; "
        "sys.exit(any(name.startswith('jax.experimental.pallas') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parents[1])


def test_copies_on_a_cpu_import_no_pallas():
    code = (
        "import sys, jax\n"
        "from jax.sharding import SingleDeviceSharding\n"
        "from jaxmorph.copies.choosing import open_copies\n"
        "copies = open_copies(SingleDeviceSharding(jax.devices('cpu')[0]), lambda registry: None)\n"
        "print(copies.outgoing.name, copies.incoming.name)\n"
        "copies.close()\n"
        "sys.exit(any(name.startswith('jax.experimental.pallas') for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parents[1], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "buffer_callback host\n"), done.stderr


def test_without_mosaic_the_error_names_what_is_missing():
    code = (
        "import sys, jax.numpy as jnp\n"
        "from jaxmorph.pallas_kernels.control import new_arrivals\n"
        "from jaxmorph.pallas_kernels.kernels import copy_to_host\n"
        "sys.modules['jax.experimental.pallas.mosaic_gpu'] = None\n"
        "try:\n"
        "    copy_to_host(jnp.zeros(4), jnp.zeros(5, jnp.uint32), new_arrivals())\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parents[1], capture_output=True, text=True
    )
    assert "the copy kernels need Pallas's Mosaic GPU backend, and with JAX" in done.stdout
    assert done.stderr == ""


def gpu(capability: str | None = "9.0", kind="NVIDIA H100") -> Any:
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    return device


@pytest.fixture
def cuda(monkeypatch):
    """Makes JAX list a device as a CUDA device."""

    def listed(device):
        def devices(platform):
            assert platform == "cuda"
            return [device]

        monkeypatch.setattr(jax, "devices", devices)
        return device

    return listed


@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.1"])
@pytest.mark.parametrize("host", ["x86_64", "AMD64"])
def test_hopper_and_later_on_x86_are_supported(cuda, capability, host):
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


def test_a_gpu_without_cuda_is_refused(cuda):
    cuda(gpu())
    with pytest.raises(NoKernelsError, match=r"^got Instinct \(gpu\), expected a CUDA GPU"):
        require_kernels(gpu("9.0", "Instinct"), "x86_64")


def test_a_cpu_is_refused():
    with pytest.raises(NoKernelsError, match=r"^got cpu \(cpu\), expected a CUDA GPU"):
        require_kernels(jax.devices("cpu")[0])


def test_a_jax_without_mosaic_is_refused_last(cuda, monkeypatch):
    def fail():
        raise ImportError("no Mosaic")

    monkeypatch.setattr(mosaic, "_mosaic", fail)
    with pytest.raises(ImportError, match="no Mosaic"):
        require_kernels(cuda(gpu()), "x86_64")
