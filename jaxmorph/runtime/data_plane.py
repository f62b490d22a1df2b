"""How the ranks of a run come to share a data plane: each starts its own end, and all connect."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.transport.plane import ChannelSpec, DataPlane, TransportSettings

_SECRET_BYTES = 32

Start = Callable[
    [int, Sequence[ChannelSpec], Sequence[ChannelSpec], TransportSettings | None], DataPlane
]
"""Starts a rank's end, given the rank, its outgoing and incoming channels and the settings."""


@contextmanager
def open_data_plane(
    rendezvous: Rendezvous,
    outgoing: Sequence[ChannelSpec],
    incoming: Sequence[ChannelSpec],
    settings: TransportSettings | None = None,
    start: Start | None = None,
) -> Iterator[DataPlane | None]:
    """A rank's end of the data plane, connected to its peers; it is closed however this ends.

    After an error nothing is waited for: what hasn't arrived is nobody's any more, and the others
    are to hear of the error soon.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
        outgoing: The channels this rank sends on.
        incoming: The channels it receives on.
        start: What starts an end; None: a sidecar process.

    Yields:
        The plane; None where the rank has no channels, and needs none.
    """
    if not outgoing and not incoming:
        _meet(rendezvous, None)
        yield None
        return
    plane = (start or _start_sidecar)(rendezvous.rank, outgoing, incoming, settings)
    try:
        addresses, secret = _meet(rendezvous, plane)
        channels = (spec.name for spec in (*outgoing, *incoming))
        peers = {rank for name in channels for rank in (name.source, name.destination)}
        peers.discard(rendezvous.rank)
        plane.connect({rank: addresses[rank] for rank in sorted(peers)}, secret)
        yield plane
    except BaseException:
        plane.close(flush=False)
        raise
    plane.close()


def _start_sidecar(
    rank: int,
    outgoing: Sequence[ChannelSpec],
    incoming: Sequence[ChannelSpec],
    settings: TransportSettings | None,
) -> DataPlane:
    from jaxmorph.transport.client import SidecarPlane

    return SidecarPlane.start(rank, outgoing, incoming, settings or TransportSettings())


def _meet(
    rendezvous: Rendezvous, plane: DataPlane | None
) -> tuple[list[list[tuple[str, int]]], bytes]:
    """Where every rank's end listens, and the run's secret, which rank 0 makes up."""
    secret = secrets.token_hex(_SECRET_BYTES) if rendezvous.rank == 0 else ""
    listening = plane.addresses() if plane is not None else []
    told = rendezvous.exchange({"addresses": listening, "secret": secret})
    addresses = [[(host, port) for host, port in rank["addresses"]] for rank in told]
    return addresses, bytes.fromhex(told[0]["secret"])
