"""Network cards, RDMA, and the cluster that has started this process."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from jaxmorph.machine.facts import Fact
from jaxmorph.transport.network_cards import card_addresses, interface_address
from jaxmorph.transport.nixl_lanes import missing

_NETWORK_CLASS = Path("/sys/class/net")
_RDMA_CLASS = Path("/sys/class/infiniband")
_CLUSTERS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
}
_PREFIXES = ("JAX_", "XLA_", "NCCL_", "CUDA_", "UCX_")


def network_facts(
    *,
    network_class: Path = _NETWORK_CLASS,
    rdma_class: Path = _RDMA_CLASS,
    address_of: Callable[[str], str | None] = interface_address,
    nixl_missing: Callable[[], str | None] = missing,
    look_up: Callable[[str], str] = socket.gethostbyname,
) -> Iterator[Fact]:
    """The cards that the data plane would use, and whether RDMA could be.

    Args:
        network_class: Where Linux describes its network interfaces.
        rdma_class: Where it describes devices that do RDMA.
        address_of: Finds an interface's address, by its name.
        nixl_missing: Says why there is no NIXL here; None: there is.
        look_up: Finds a host's address, by its name; OSError where it has none.
    """
    yield _host_name(look_up)
    used = set(card_addresses(network_class, address_of))
    for card in _entries(network_class):
        address = address_of(card.name)
        note = "carries delegated messages between hosts" if address in used else ""
        yield Fact(f"card {card.name}", f"{address or 'no address'}{_speed(card)}", note=note)
    devices = ", ".join(device.name for device in _entries(rdma_class))
    note = "" if devices else f"there are none in {rdma_class}"
    yield Fact("RDMA devices", devices or "none", bool(devices), note)
    reason = nixl_missing()
    yield Fact("NIXL", "installed" if reason is None else "none", reason is None, reason or "")


def cluster_facts(environment: Mapping[str, str] | None = None) -> Iterator[Fact]:
    """What a cluster has told this process, and what JAX and NCCL are told.

    Args:
        environment: This process's when None.
    """
    told = os.environ if environment is None else environment
    for cluster, names in _CLUSTERS.items():
        found = [f"{name}={told[name]}" for name in names if name in told]
        yield Fact(cluster, ", ".join(found) or "no")
    for name in sorted(told):
        if name.startswith(_PREFIXES):
            yield Fact(name, told[name])


def _host_name(look_up: Callable[[str], str]) -> Fact:
    name = socket.gethostname()
    try:
        address = look_up(name)
    except OSError as error:
        note = f"Gloo wants to look it up: {error}"
        return Fact("host", f"{name}, which has no address", False, note)
    if ip_address(address).is_loopback:  # Debian's /etc/hosts has it so
        note = "enough for runs on this machine; Gloo's direct links don't reach other hosts by it"
        return Fact("host", f"{name}, {address}", None, note)
    return Fact("host", f"{name}, {address}", True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _speed(card: Path) -> str:
    """A card's rate as its driver tells it; nothing where it doesn't."""
    try:
        megabits = int((card / "speed").read_text())
    except (OSError, ValueError):
        return ""
    return f", {megabits:,} Mbit/s" if megabits > 0 else ""
