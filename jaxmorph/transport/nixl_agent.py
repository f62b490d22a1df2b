"""One NIXL agent: memory that peers may write into, and writes into a peer's memory.

NIXL is NVIDIA's library over UCX; it comes as `nixl-cu12` or `nixl-cu13`, and neither needs CUDA
or PyTorch for host memory. Its agents are tied to one network card each. They have no thread of
their own here: such a thread keeps a core busy also when nothing moves.
"""

import contextlib
import importlib
import importlib.util
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxmorph.transport.lane import LaneError
from jaxmorph.transport.network_cards import interface_address

MODULES = ("nixl_cu12", "nixl_cu13")
_NETWORK_CLASS = Path("/sys/class/net")
_DEVICES, _TRANSPORTS = "UCX_NET_DEVICES", "UCX_TLS"
_FENCED_TRANSPORTS = "^tcp,sm"
_NO_RDMA = (
    "UCX finds no RDMA on the network card of {host} (UCX_TLS=tcp emulates it, for networks on "
    "which everyone is trusted)"
)
_numbers = itertools.count()


def missing() -> str | None:
    """Why there is no NIXL here; None: there is."""
    if any(importlib.util.find_spec(name) for name in MODULES):
        return None
    return f"none of the packages {', '.join(each.replace('_', '-') for each in MODULES)} is here"


class NixlAgent:
    """Memory and writes by way of one network card; it never waits.

    Raises:
        LaneError: If UCX can't use that card, or NIXL isn't here.
    """

    def __init__(self, host: str) -> None:
        module = _module()
        self._name = f"jaxmorph-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        settings = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        with _as_lane_errors(_NO_RDMA.format(host=host)), _chosen_devices(host):
            self._agent: Any = module.nixl_agent(self._name, settings)
            self._agent.create_backend("UCX", {"num_workers": "1"})
        self._memory: list[Any] = []
        self._peers: list[str] = []
        self._writes: set[Any] = set()

    def register(self, address: int, num_bytes: int) -> None:
        """Let the card read from this memory, and peers that have the `metadata` write into it."""
        with _as_lane_errors("registering memory"):
            region = [(address, num_bytes, 0, "")]
            self._memory.append(self._agent.register_memory(region, "DRAM"))

    def metadata(self) -> bytes:
        """What a peer must know to write into the memory that is registered by now."""
        with _as_lane_errors("describing memory"):
            return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer's memory known; returns its name."""
        with _as_lane_errors("a peer's description"):
            peer = self._agent.add_remote_agent(metadata)
        name = peer.decode() if isinstance(peer, bytes) else peer
        self._peers.append(name)
        return name

    def write(self, peer: str, source: int, destination: int, num_bytes: int) -> Any:
        """Begin to write; `is_done` says of what is returned when it is in the peer's memory.

        Args:
            source: An address in own memory that is registered.
        """
        agent = self._agent
        with _as_lane_errors("writing"):
            write = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([(source, num_bytes, 0)], "DRAM"),
                agent.get_xfer_descs([(destination, num_bytes, 0)], "DRAM"),
                peer,
            )
            self._writes.add(write)
            if agent.transfer(write) == "ERR":
                raise LaneError("writing failed")
        return write

    def is_done(self, write: Any) -> bool:
        """Whether a write is all in the peer's memory; once it is, `write` means nothing more."""
        with _as_lane_errors("writing"):
            state = self._agent.check_xfer_state(write)
            if state == "PROC":
                return False
            self._writes.discard(write)
            write.release()
        if state != "DONE":
            raise LaneError("writing failed")
        return True

    def progress(self) -> None:
        """Let what peers write go on, where the network card doesn't do it alone."""
        with _as_lane_errors("receiving"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Give all of it up; after this nothing is written into this memory, or read from it.

        The order matters: writes that are under way are cancelled or cut off with their peer, the
        card forgets the memory, and with the agent its connections end.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for write in self._writes:
            with contextlib.suppress(Exception):
                write.release()
        self._writes.clear()
        for peer in self._peers:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(peer)
        for region in self._memory:
            with contextlib.suppress(Exception):
                agent.deregister_memory(region)
        self._peers.clear()
        self._memory.clear()


def device_of(host: str, network_class: Path = _NETWORK_CLASS) -> str:
    """What UCX calls the network card with an address: `mlx5_0:1`, or `eth0` if it has no RDMA.

    Args:
        host: An IPv4 address of this host.
        network_class: Where Linux describes its network interfaces.

    Raises:
        LaneError: If no interface has that address.
    """
    name = _interface_of(host)
    adapters = network_class / name / "device" / "infiniband"
    if not adapters.is_dir():
        return name
    port = 1 + int((network_class / name / "dev_port").read_text())
    return f"{min(each.name for each in adapters.iterdir())}:{port}"


def _interface_of(host: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if host.startswith("127.") and "lo" in names:
        return "lo"
    for name in names:
        if interface_address(name) == host:
            return name
    raise LaneError(f"no network interface has the address {host}; UCX_NET_DEVICES can name one")


@contextlib.contextmanager
def _chosen_devices(host: str) -> Iterator[None]:
    """Tell UCX, which looks when a backend is made, which card to use, and what not to use on it.

    Where nobody has chosen transports, two kinds are left out. Those through shared memory write
    into this process whatever it has deregistered, so that they can't be fenced. And UCX's
    emulation over TCP writes wherever a connection tells it to, and anyone can connect.
    """
    chosen = {_DEVICES: os.environ.get(_DEVICES), _TRANSPORTS: os.environ.get(_TRANSPORTS)}
    os.environ[_DEVICES] = chosen[_DEVICES] or device_of(host)
    os.environ[_TRANSPORTS] = chosen[_TRANSPORTS] or _FENCED_TRANSPORTS
    try:
        yield
    finally:
        for name, value in chosen.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _as_lane_errors(what: str) -> Iterator[None]:
    """Its errors have no common ancestor, and all of them cost the lane alone."""
    try:
        yield
    except LaneError:
        raise
    except Exception as error:
        raise LaneError(f"{what}: {type(error).__name__} {error}") from error


def _module() -> ModuleType:
    for name in MODULES:
        with contextlib.suppress(ImportError):
            os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
            module = importlib.import_module(f"{name}._api")
            logging.getLogger(f"{name}._api").setLevel(logging.WARNING)
            return module
    raise LaneError(missing() or "NIXL can't be loaded: its libraries don't fit this system")
