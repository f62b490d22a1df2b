"""Facts that need no JAX: software, cores and memory, network, cluster, NVIDIA's driver."""

import math
import os
import platform
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.transport.host import (
    card_addresses,
    cores_by_quota,
    interface_address,
    num_processors,
    usable_cores,
)
from jaxmorph.transport.nixl_lanes import missing
from jaxmorph.transport.several_sidecars import sidecars_needed
from jaxmorph.transport.sidecar_trial import SidecarTrial, try_sidecars
from jaxmorph.transport.slots import Slots

_NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain", "crc32c")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDA_LIBRARIES = tuple(
    f"nvidia-{library}-cu{cuda}" for library in ("cudnn", "nccl") for cuda in (13, 12)
)
_SHARED = Path("/dev/shm")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TRIAL_BYTES = 1 << 20
_GIB = 1 << 30
_NETWORK_CLASS = Path("/sys/class/net")
_RDMA_CLASS = Path("/sys/class/infiniband")
_CLUSTERS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
}
_PREFIXES = ("JAX_", "XLA_", "NCCL_", "CUDA_", "UCX_")
_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class Fact:
    """A fact about a machine.

    Attributes:
        found: The value, with its unit.
        works: Whether it can be used; None for a plain value.
        note: Why it doesn't work, or what it is for.
    """

    name: str
    found: str
    works: bool | None = None
    note: str = ""


def run_checks(
    checks: Mapping[str, Callable[[], Iterable[Fact]]],
) -> Iterator[tuple[str, tuple[Fact, ...]]]:
    """What each check finds; one that raises becomes a fact, and the others still run.

    Results come one by one, because a check of a hung device may never return.
    """
    for about, check in checks.items():
        yield about, tuple(_checked(check))


def _checked(check: Callable[[], Iterable[Fact]]) -> Iterable[Fact]:
    facts = []
    try:
        facts.extend(check())
    except Exception as error:  # the facts before it are shown
        own = isinstance(error, UserError)  # whose text is complete
        reason = " ".join(str(error).split() if own else f"{type(error).__name__}: {error}".split())
        facts.append(Fact("check failed", "", False, reason))
    return facts


def software_facts() -> Iterator[Fact]:
    """Python, the system, and the most important packages."""
    yield Fact("python", platform.python_version())
    yield Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    version, folder = _installed("jaxmorph"), Path(__file__).parents[2]
    yield Fact("jaxmorph", version or f"not installed, run from {folder}")
    for name in _NEEDED:
        version = _installed(name)
        if version is None:
            yield Fact(name, "not installed", False, f"pip install {name}")
        else:
            yield Fact(name, version)
    plugins = {name: version for name in _PLUGINS if (version := _installed(name))}
    if not plugins:
        yield Fact("JAX for CUDA", "none", False, "pip install 'jax[cuda13]' if there is a GPU")
    libraries = {name: version for name in _CUDA_LIBRARIES if (version := _installed(name))}
    for name, version in (plugins | libraries).items():
        yield Fact(name, version)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def host_facts(
    *,
    shared: Path = _SHARED,
    quota: Path = _QUOTA,
    memory_limit: Path = _MEMORY_LIMIT,
    trial: Callable[[], SidecarTrial] = try_sidecars,
) -> Iterator[Fact]:
    """The host's size, and the limits of slots and their registration."""
    yield _cores(quota)
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Fact("memory", f"{total_bytes / _GIB:.1f} GiB{_container_memory(memory_limit)}")
    yield _slots()
    yield _sidecar(trial, quota)
    yield Fact("/dev/shm", _free(shared), note="slots don't need it, NCCL does")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    note = "ulimit -l; slots for a GPU are locked"
    yield Fact("memory that may be locked", _limit(limit), note=note)
    yield Fact("open files", _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0], "files"))


def _cores(quota: Path) -> Fact:
    found = f"{num_processors()} of {os.cpu_count()}"
    if (cores := cores_by_quota(quota)) < math.inf:
        found += f", by quota {cores:g}"
    return Fact("cores", found, note="a rank takes one and its sidecar most of another")


def _sidecar(trial: Callable[[], SidecarTrial], quota: Path) -> Fact:
    try:
        moved = trial()
    except Exception as error:  # any error is the answer
        return Fact("a sidecar", "none", False, str(error))
    gb_per_s, of_a_core = moved.bytes_per_s / 1e9, moved.bytes_per_core_s / 1e9
    most = sidecars_needed(math.inf, usable_cores(quota) - 1)
    return Fact(
        "a sidecar",
        f"sends {gb_per_s:.1f} GB/s to another one here, {of_a_core:.1f} with a core of its own",
        True,
        f"a rank that is alone here has at most {most} by transport.sidecars: auto",
    )


def _container_memory(limit: Path) -> str:
    """The container's memory limit; "" if there is none."""
    try:
        return f", by limit {int(limit.read_text()) / _GIB:.1f} GiB"
    except (OSError, ValueError):  # "max"
        return ""


def _slots() -> Fact:
    try:
        with closing(Slots.create(2, _TRIAL_BYTES)):
            return Fact("shared memory for slots", "works", True)
    except Exception as error:  # any error is the answer
        return Fact("shared memory for slots", "none", False, str(error))


def _free(shared: Path) -> str:
    try:
        usage = shutil.disk_usage(shared)
    except OSError:
        return "none"
    return f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"


def _limit(limit: int, unit: str = "bytes") -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} {unit}"


def network_facts(
    *,
    network_class: Path = _NETWORK_CLASS,
    rdma_class: Path = _RDMA_CLASS,
    address_of: Callable[[str], str | None] = interface_address,
    nixl_missing: Callable[[], str | None] = missing,
    look_up: Callable[[str], str] = socket.gethostbyname,
) -> Iterator[Fact]:
    """The cards that the data plane would use, and whether RDMA is possible."""
    yield _host_name(look_up)
    used = set(card_addresses(network_class, address_of))
    for card in _entries(network_class):
        address = address_of(card.name)
        note = "carries delegated messages between hosts" if address in used else ""
        yield Fact(f"card {card.name}", f"{address or 'no address'}{_speed(card)}", note=note)
    devices = ", ".join(device.name for device in _entries(rdma_class))
    note = "" if devices else f"none in {rdma_class}"
    yield Fact("RDMA devices", devices or "none", bool(devices), note)
    reason = nixl_missing()
    yield Fact("NIXL", "installed" if reason is None else "none", reason is None, reason or "")


def cluster_facts(environment: Mapping[str, str] | None = None) -> Iterator[Fact]:
    """Environment variables of clusters, JAX and NCCL."""
    variables = os.environ if environment is None else environment
    for cluster, names in _CLUSTERS.items():
        found = [f"{name}={variables[name]}" for name in names if name in variables]
        yield Fact(cluster, ", ".join(found) or "no")
    for name in sorted(variables):
        if name.startswith(_PREFIXES):
            yield Fact(name, variables[name])


def _host_name(look_up: Callable[[str], str]) -> Fact:
    name = socket.gethostname()
    try:
        address = look_up(name)
    except OSError as error:
        note = f"Gloo must resolve this name: {error}"
        return Fact("host", f"{name}, without an address", False, note)
    if ip_address(address).is_loopback:  # as in Debian's /etc/hosts
        note = "enough for runs on this machine; Gloo can't reach other hosts by this address"
        return Fact("host", f"{name}, {address}", None, note)
    return Fact("host", f"{name}, {address}", True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _speed(card: Path) -> str:
    """A card's speed, if its driver reports it."""
    try:
        megabits = int((card / "speed").read_text())
    except (OSError, ValueError):
        return ""
    return f", {megabits:,} Mbit/s" if megabits > 0 else ""


def nvidia_facts(driver: Path = _NVIDIA) -> Iterator[Fact]:
    """The kernel's driver and its GPUs, whether or not JAX can use them; none if not loaded."""
    if (version := _driver_version(driver)) is None:
        return
    yield Fact("NVIDIA's driver", version)
    models = Counter(map(_model, sorted(driver.glob("gpus/*/information"))))
    found = ", ".join(f"{count} x {model}" for model, count in models.items())
    yield Fact("its GPUs", found or "none", bool(models), "" if models else "the driver found none")


def _driver_version(driver: Path) -> str | None:
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
