"""The GPUs that NVIDIA's driver has found, whether or not JAX can use them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jaxmorph.machine.facts import Fact

_DRIVER = Path("/proc/driver/nvidia")


def nvidia_facts(driver: Path = _DRIVER) -> Iterator[Fact]:
    """The kernel's driver and its GPUs; nothing where it isn't loaded.

    Args:
        driver: Where it tells of itself.
    """
    if (version := _version(driver)) is None:
        return
    yield Fact("NVIDIA's driver", version)
    models = Counter(map(_model, sorted(driver.glob("gpus/*/information"))))
    told = ", ".join(f"{count} x {model}" for model, count in models.items())
    yield Fact("its GPUs", told or "none", bool(models), "" if models else "it has found none")


def _version(driver: Path) -> str | None:
    """The number in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun ...`."""
    try:
        words = (driver / "version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit()), " ".join(words))


def _model(information: Path) -> str:
    try:
        lines = information.read_text().splitlines()
    except OSError:
        return "unknown"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return next(named, "unknown")
