"""Which versions are installed."""

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jaxmorph.machine.facts import Fact

_NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain", "crc32c")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDA_LIBRARIES = tuple(
    f"nvidia-{library}-cu{cuda}" for library in ("cudnn", "nccl") for cuda in (13, 12)
)


def software_facts() -> Iterator[Fact]:
    """Python, the system, and the packages that matter most."""
    yield Fact("python", platform.python_version())
    yield Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    version, folder = _version("jaxmorph"), Path(__file__).parents[2]
    yield Fact("jaxmorph", version or f"not installed, run from {folder}")
    for name in _NEEDED:
        version = _version(name)
        if version is None:
            yield Fact(name, "not installed", False, f"pip install {name}")
        else:
            yield Fact(name, version)
    plugins = {name: version for name in _PLUGINS if (version := _version(name))}
    if not plugins:
        yield Fact("JAX for CUDA", "none", False, "pip install 'jax[cuda13]', where there is a GPU")
    libraries = {name: version for name in _CUDA_LIBRARIES if (version := _version(name))}
    for name, version in (plugins | libraries).items():
        yield Fact(name, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
