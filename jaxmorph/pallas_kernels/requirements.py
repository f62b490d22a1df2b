"""What the kernels need of a device, of its host and of JAX: told before any of them is traced."""

import platform
import re
from typing import Any

import jax

from jaxmorph.pallas_kernels.mosaic import require_mosaic

_LEAST = (9, 0)
_HOSTS = ("x86_64", "amd64")


class NoKernelsError(RuntimeError):
    """The kernels are not for this device, or not for its host."""


def require_kernels(device: Any, host: str | None = None) -> None:
    """Raise unless the kernels can be traced for a device, and their order holds on its host.

    None is tried here.

    Args:
        device: Where they would run, one of JAX's.
        host: The kind of machine that sees what they write, as `platform.machine()`; None: this.

    Raises:
        NoKernelsError: If they are for other devices or hosts; it says which.
        ImportError: If JAX has no Mosaic GPU backend here.
    """
    _require_cuda(device)
    _require_capability(device)
    _require_order(platform.machine() if host is None else host)
    require_mosaic()


def _require_cuda(device: Any) -> None:
    try:
        is_cuda = device in jax.devices("cuda")
    except RuntimeError:  # JAX has no such platform
        is_cuda = False
    if not is_cuda:
        raise NoKernelsError(f"got {device.device_kind} ({device.platform}), expected a CUDA GPU")


def _require_capability(device: Any) -> None:
    told = str(getattr(device, "compute_capability", None))
    found = re.fullmatch(r"(\d+)\.(\d+)", told)
    if found is None:
        raise NoKernelsError(
            f"got compute capability {told} ({device.device_kind}), expected 9.0 or later"
        )
    major, minor = map(int, found.groups())
    if (major, minor) < _LEAST:
        raise NoKernelsError(
            f"got sm_{major}{minor} ({device.device_kind}), expected sm_90 or later"
        )


def _require_order(host: str) -> None:
    if host.lower() not in _HOSTS:
        raise NoKernelsError(
            f"got a host of {host}, expected x86_64: that who sees a signal there sees the payload "
            "is argued for that alone"
        )
