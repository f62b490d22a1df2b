"""The processor cores of this host that a process may use."""

import math
import os
from pathlib import Path

from jaxmorph.transport.network_cards import loopback_identity

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_processors() -> int:
    """Processors that this process may use: `taskset` or a container may allow only some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_by_quota(quota: Path = _QUOTA) -> float:
    """How many cores a container's quota amounts to; infinity: it has none."""
    try:
        share, period = quota.read_text().split()
        return int(share) / int(period)
    except (OSError, ValueError):  # "max", or no cgroup with a quota
        return math.inf


def usable_cores(quota: Path = _QUOTA) -> float:
    """How many cores this process may use, with others of the same `cores_identity`."""
    return min(float(num_processors()), cores_by_quota(quota))


def cores_identity() -> str:
    """A string that is the same for processes that use the same cores of the same host."""
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ""
    return f"{loopback_identity()} {own}"
