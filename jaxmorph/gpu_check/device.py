"""What is installed, and which device there is."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax

from jaxmorph.byte_sizes import in_bytes
from jaxmorph.errors import UserError
from jaxmorph.gpu_check.model_flops import peak_tflops
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_ASK_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_ANSWER_S = 30.0


def find_device(*, allow_cpu: bool) -> Any:
    """The first CUDA GPU, on which JAX computes by default; to be called before JAX looks itself.

    Args:
        allow_cpu: Whether the CPU will do where there is none.

    Raises:
        UserError: If there is none, or JAX computes elsewhere; in one line.
    """
    have_cpu()
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        if allow_cpu:
            return _default_device()
        platforms = jax.config.values["jax_platforms"]
        hint = f"JAX_PLATFORMS is {platforms!r}" if platforms else "pip install 'jax[cuda13]'"
        raise UserError(
            f"got no CUDA GPU ({_reason(error)}), expected one and JAX for it "
            f"({hint}); --allow-cpu runs small sizes on the CPU"
        ) from error
    if (default := _default_device()) != device:
        raise UserError(
            f"JAX_PLATFORMS: got {jax.config.values['jax_platforms']!r}, by which JAX computes on "
            f"{default.device_kind!r}, expected cuda first, or nothing, so that it computes on "
            f"{device.device_kind!r}"
        )
    return device


def have_cpu() -> None:
    """Where the user says which platforms JAX has, the CPU becomes one: it is needed."""
    platforms = jax.config.values["jax_platforms"]
    if platforms and "cpu" not in platforms.split(","):
        jax.config.update("jax_platforms", f"{platforms},cpu")


def _default_device() -> Any:
    try:
        return jax.devices()[0]
    except RuntimeError as error:
        raise UserError(f"JAX has no device: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True)
class DeviceReport:
    """What is installed, and which device there is.

    Attributes:
        versions: Of the packages that the check imports.
        platform: What JAX computes with, and its version.
        driver: NVIDIA's; None where nvidia-smi does not say.
        compute_capability: None on a CPU.
        memory_bytes: What JAX may use of the device; None where it does not say.
        peak_tflops: Dense bfloat16 products, by NVIDIA's data sheet; None for a device that is not
            in the table.
    """

    versions: dict[str, str]
    device: str
    platform: str
    driver: str | None
    compute_capability: str | None
    memory_bytes: int | None
    peak_tflops: float | None

    def rows(self) -> Iterator[Row]:
        """A row for each."""
        for package, version in self.versions.items():
            yield Row(package, version)
        yield Row("device", self.device)
        yield Row("platform", self.platform)
        yield Row("driver", self.driver or "unknown")
        yield Row("compute capability", self.compute_capability or "none")
        memory = "unknown" if self.memory_bytes is None else in_bytes(self.memory_bytes)
        yield Row("memory for JAX", memory)
        peak = "unknown" if self.peak_tflops is None else f"{self.peak_tflops:.0f} TFLOP/s"
        yield Row("peak, dense bfloat16", peak, "" if self.peak_tflops else "so no MFU is told")


def look_at_device(settings: CheckSettings) -> DeviceReport:
    """What is installed, and which device there is."""
    del settings
    device = jax.devices()[0]
    return DeviceReport(
        versions={package: metadata.version(package) for package in _PACKAGES},
        device=device.device_kind,
        platform=" ".join(device.client.platform_version.split()),
        driver=_driver_version(),
        compute_capability=getattr(device, "compute_capability", None),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        peak_tflops=peak_tflops(device.device_kind),
    )


def _driver_version() -> str | None:
    if shutil.which(_ASK_DRIVER[0]) is None:
        return None
    try:
        asked = subprocess.run(
            _ASK_DRIVER, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(asked.stdout.split()), None)
