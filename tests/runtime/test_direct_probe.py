"""What a probe waits for and sends."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.direct_probe import probe_direct, probe_transfers
from jaxmorph.runtime.queue import PacedQueue
from jaxmorph.runtime.routes import Moved

LINK = Link(1, 2)


class Update:
    """An array that is not ready yet, and records when it is waited for."""

    def __init__(self, done):
        self.done = done

    def block_until_ready(self):
        self.done.append("update")


class Peer:
    """A route whose other end comes at once."""

    def __init__(self, done):
        self.done = done

    def post(self, identity, value, arrived_s):
        self.done.append(str(identity.transfer))
        return Moved(value, arrived_s)

    def take(self, identity, arrived_s, deadline_s):
        self.done.append(str(identity.transfer))
        return Moved(jnp.zeros(2), arrived_s)


def probed(rank):
    """What a rank does for a probe, in order, and the labels of its stamps."""
    done = []
    payload = PayloadShape((2,), jnp.dtype("float32"))
    payloads = {channel_of(transfer): payload for transfer in probe_transfers(LINK)}
    placement = SingleDeviceSharding(jax.devices()[0])
    queue = PacedQueue()
    try:
        route, pending = Peer(done), [Update(done)]
        stamps = probe_direct(LINK, rank, 7, route, queue, payloads, placement, 9.0, pending)  # type: ignore[arg-type]
    finally:
        queue.close()
    return done, [str(stamp.label) for stamp in stamps]


@pytest.mark.parametrize("rank", LINK)
def test_a_probe_measures_once_both_ends_are_idle(rank):
    (update, first, *counted), stamped = probed(rank)
    assert update == "update"
    assert first == str(probe_transfers(LINK)[0])
    assert stamped == counted
    directions = [label.split()[-1] for label in counted]
    assert directions == ["1>2", "2>1"] * 3
    assert len({first, *counted}) == 7
