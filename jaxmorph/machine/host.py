"""Cores, memory, and what a process may do with them."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from jaxmorph.machine.facts import Fact
from jaxmorph.transport.slots import Slots

_MEMORY = Path("/proc/meminfo")
_SHARED = Path("/dev/shm")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TRIAL_BYTES = 1 << 20
_NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "true")
_PATIENCE_S = 10.0
_GIB = 1 << 30


def host_facts(
    *,
    memory: Path = _MEMORY,
    shared: Path = _SHARED,
    quota: Path = _QUOTA,
    memory_limit: Path = _MEMORY_LIMIT,
) -> Iterator[Fact]:
    """The host's size, and the limits that slots and their registration meet.

    Args:
        memory: Where Linux tells its memory.
        shared: Where POSIX shared memory is; ranks' slots need none of it.
        quota: Where a container's share of the processors is told.
        memory_limit: Where its share of the memory is.
    """
    yield _cores(quota)
    yield Fact("memory", f"{_total_memory(memory)}{_container_memory(memory_limit)}")
    yield _slots()
    yield Fact("/dev/shm", _free(shared), note="slots don't need it, NCCL does")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    note = "ulimit -l; slots for a GPU are locked"
    yield Fact("memory that may be locked", _limit(limit), note=note)
    yield Fact("open files", _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0], "files"))


def privilege_facts() -> Iterator[Fact]:
    """What benchmarks with network namespaces, and nothing else, need."""
    yield Fact("root", "yes" if os.geteuid() == 0 else f"no, user {os.geteuid()}")
    reason = _no_namespaces()
    yield Fact(
        "network namespaces", "yes" if reason is None else "no", reason is None, reason or ""
    )


def _cores(quota: Path) -> Fact:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{usable} of {os.cpu_count()}"
    try:
        share, period = quota.read_text().split()
        found += "" if share == "max" else f", by quota {int(share) / int(period):g}"
    except (OSError, ValueError):  # no such container
        pass
    return Fact("cores", found, note="a rank takes one and its sidecar most of another")


def _total_memory(memory: Path) -> str:
    try:
        lines = dict(line.split(":", 1) for line in memory.read_text().splitlines() if ":" in line)
        return f"{int(lines['MemTotal'].split()[0]) * 1024 / _GIB:.1f} GiB"
    except (OSError, KeyError, ValueError):
        return "unknown"


def _container_memory(limit: Path) -> str:
    """What a container may use; nothing where it may use all, or there is none."""
    try:
        return f", by limit {int(limit.read_text()) / _GIB:.1f} GiB"
    except (OSError, ValueError):  # "max"
        return ""


def _slots() -> Fact:
    try:
        with closing(Slots.create(2, _TRIAL_BYTES)):
            return Fact("shared memory for slots", "works", True)
    except Exception as error:  # whatever it is, it is the answer
        return Fact("shared memory for slots", "none", False, str(error))


def _free(shared: Path) -> str:
    try:
        usage = shutil.disk_usage(shared)
    except OSError:
        return "none"
    return f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"


def _limit(limit: int, unit: str = "bytes") -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} {unit}"


def _no_namespaces() -> str | None:
    """Why this user can't make a network namespace; None: it can."""
    if shutil.which(_NAMESPACES[0]) is None:
        return "there is no command unshare"
    try:
        tried = subprocess.run(_NAMESPACES, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if tried.returncode == 0 else " ".join(tried.stderr.split())
