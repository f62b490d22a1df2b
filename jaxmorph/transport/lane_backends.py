"""What becomes of a connection whose handshake is done: a lane of the kind that was chosen."""

from collections.abc import Callable, Iterable, Sequence

from jaxmorph.errors import UserError
from jaxmorph.transport.lane import Lane, LaneError
from jaxmorph.transport.nixl_agent import NixlAgent, missing
from jaxmorph.transport.nixl_lanes import MOST_GRANTS, NixlReceivingLane, NixlSendingLane
from jaxmorph.transport.tcp_lanes import TcpLane

TCP, NIXL = BACKENDS = ("tcp", "nixl")


def check(backend: str) -> None:
    """Pass if this installation has what a backend needs.

    Raises:
        UserError: If it hasn't, or there is no such backend.
    """
    if backend not in BACKENDS:
        raise UserError(f"transport backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    reason = missing() if backend == NIXL else None
    if reason is not None:
        raise UserError(f"transport backend nixl: {reason}; docs/rdma.md says how to install it")


def prepare(backend: str, hosts: Sequence[str]) -> None:
    """Load what the lanes need, and find out whether these network cards can do it.

    With NIXL that takes half a second, which is better spent before lanes are waited for.

    Raises:
        LaneError: If they can't.
    """
    if backend == NIXL:
        for host in hosts:
            NixlAgent(host).close()


def fixed_lanes(backend: str, configured: int | None, num_cards: int) -> int | None:
    """How many lanes to each peer; None: as many as turn out to be needed.

    A network card that does RDMA is kept busy by one.
    """
    return configured if backend == TCP else configured or num_cards


def landings_at_once(backend: str) -> int:
    """How many chunks one lane may be landing."""
    return MOST_GRANTS + 1 if backend == NIXL else 1


def sending_lane(
    backend: str, connection: TcpLane, memory: Iterable[memoryview], chunk_bytes: int
) -> Lane:
    """The sender's end of a lane.

    Args:
        connection: What was dialled; it belongs to the lane from now on.
        memory: All payloads that may be sent on it.

    Raises:
        LaneError: If the network card doesn't do it; the connection is closed.
    """
    kind = None if backend == TCP else NixlSendingLane
    return _opened(kind, connection, memory, chunk_bytes)


def receiving_lane(
    backend: str, connection: TcpLane, memory: Iterable[memoryview], chunk_bytes: int
) -> Lane:
    """The receiver's end of a lane.

    Args:
        connection: What was accepted; it belongs to the lane from now on.
        memory: Where payloads may land.

    Raises:
        LaneError: If the network card doesn't do it; the connection is closed.
    """
    kind = None if backend == TCP else NixlReceivingLane
    return _opened(kind, connection, memory, chunk_bytes)


def _opened(
    kind: Callable[[TcpLane, int], Lane] | None,
    connection: TcpLane,
    memory: Iterable[memoryview],
    chunk_bytes: int,
) -> Lane:
    """A lane of some kind over a connection, with its memory registered; else the connection."""
    if kind is None:
        return connection
    try:
        lane = kind(connection, chunk_bytes)
        for each in memory:
            lane.register(each)
        lane.open()
    except LaneError:
        connection.close()
        raise
    return lane
