"""Which versions are installed."""

import platform
from collections.abc import Iterator
from importlib import metadata

from jaxmorph.machine.facts import Fact

_NEEDED = ("jaxmorph", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
_FOR_CUDA = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def software_facts() -> Iterator[Fact]:
    """Python, the system, and the packages that matter most."""
    yield Fact("python", platform.python_version())
    yield Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for name in _NEEDED:
        version = _version(name)
        if version is None:
            yield Fact(name, "not installed", False, f"pip install {name}")
        else:
            yield Fact(name, version)
    for name in _FOR_CUDA:
        if version := _version(name):
            yield Fact(name, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
