"""Measures what sidecars can move on this host, by a short burst between two ranks' sidecars."""

import secrets
import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, TransportSettings
from jaxmorph.transport.several_sidecars import SeveralSidecars

_THERE, _BACK = ChannelName(1, 0, 1), ChannelName(1, 1, 0)
_NUM_SLOTS = 16
_LIMIT_S = 30.0


class SidecarTrial(NamedTuple):
    """What was moved between two ranks' sidecars.

    Attributes:
        bytes_per_s: Of both directions together, if there are two.
        processor_s: Processor time of the first rank's sidecars, for all bytes.
    """

    bytes_per_s: float
    num_bytes: int
    processor_s: float

    @property
    def bytes_per_core_s(self) -> float:
        """What a sidecar would move if its core did nothing else."""
        return self.num_bytes / self.processor_s


def try_sidecars(
    settings: TransportSettings | None = None,
    num_messages: int = 64,
    message_bytes: int = 4 * 2**20,
    *,
    both_ways: bool = False,
) -> SidecarTrial:
    """Move messages between the sidecars of two ranks, after a few that warm them up.

    Raises:
        TimeoutError: If they don't arrive, or a sidecar does not answer.
    """
    with ExitStack() as closing:
        planes = []
        for rank in (0, 1):
            there, back = (ChannelSpec(name, message_bytes, _NUM_SLOTS) for name in (_THERE, _BACK))
            ends = ([there], [back]) if rank == 0 else ([back], [there])
            planes.append(SeveralSidecars(rank, *ends, settings))
            closing.callback(planes[-1].close, flush=False)
        secret = secrets.token_bytes(32)
        for rank, plane in enumerate(planes):
            plane.connect({1 - rank: planes[1 - rank].addresses()}, secret)
        names = (_THERE, _BACK) if both_ways else (_THERE,)
        _exchange(planes, names, 2 * _NUM_SLOTS, message_bytes)
        before_s, began_s = _processor_s(planes[0]), time.monotonic()
        _exchange(planes, names, num_messages, message_bytes)
        took_s = time.monotonic() - began_s
        num_bytes = len(names) * num_messages * message_bytes
        return SidecarTrial(num_bytes / took_s, num_bytes, _processor_s(planes[0]) - before_s)


def _processor_s(plane: SeveralSidecars) -> float:
    found = plane.processor_s()
    if found is None:
        raise TimeoutError("a sidecar does not say how much processor time it has used")
    return found


def _exchange(
    planes: list[SeveralSidecars], names: tuple[ChannelName, ...], count: int, num_bytes: int
) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    senders = [
        threading.Thread(
            target=_send, args=(planes[name.source], name, count, num_bytes, deadline_s)
        )
        for name in names
    ]
    for sender in senders:
        sender.start()
    for _ in range(count):
        for name in names:
            planes[name.destination].take(name, deadline_s).release()
    for sender in senders:
        sender.join()


def _send(
    plane: SeveralSidecars, name: ChannelName, count: int, num_bytes: int, deadline_s: float
) -> None:
    for _ in range(count):
        try:
            slot = plane.reserve(name, deadline_s)
        except TimeoutError:
            return  # the receiver raises the same
        slot.post(num_bytes, ())
        slot.complete()
