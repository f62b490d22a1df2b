"""What a way of copying is looked at with: a channel's end that nothing moves messages from or to.

What a sidecar does to the slots is done by hand, in `lone_sender` and `lone_receiver`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from jax.sharding import Sharding

from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import IncomingEnd, OutgoingEnd

CHANNEL = ChannelName(0, 0, 1)

FIRST_OF_ALL = 0xFFFFFFFF
"""The number of a first message, so that its signal's wraps."""


@dataclass(frozen=True)
class Site:
    """Where copies are looked at.

    Attributes:
        placement: Where payloads are kept.
        memory: What must know slots; None: nobody.
        patience_s: For how long any one message is waited for.
    """

    placement: Sharding
    memory: RegisteredMemory | None
    patience_s: float


End = TypeVar("End", OutgoingEnd, IncomingEnd)


def known(end: End, site: Site) -> End:
    """A channel's end whose slots the device knows, if it must.

    Raises:
        CudaError: If they can't be registered; tiers would quietly go another way.
    """
    if site.memory is not None:
        end.tell_of_memory(site.memory)
        if site.memory.trouble is not None:
            end.close()
            raise site.memory.trouble
    return end


def wait_until(condition: Callable[[], bool], patience_s: float, what: str) -> None:
    """Return at once when a condition holds; other threads can run meanwhile.

    Args:
        condition: Must not take long.
        what: Has not happened by then, for the message.

    Raises:
        TimeoutError: If it doesn't hold by then.
    """
    deadline_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} within {patience_s:g} s")
        time.sleep(0)
