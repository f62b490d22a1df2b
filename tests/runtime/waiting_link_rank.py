"""One of two ranks: copies a stash while its direct transfer waits for a peer that comes after it.

The peer comes when the copies are over, or else at a deadline: if copies wait for the transfer.
"""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Buffer, BufferKind, Payload, Transfer, channel_of
from jaxmorph.runtime.direct import DirectRoute
from jaxmorph.runtime.host_copies import AwayStash, HostCopies
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.link_programs import LinkCommunicators
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.stage.mesh import make_mesh

PATIENCE_S = 5.0
SHAPE = PayloadShape((512, 512), jnp.dtype("float32"))  # moved by a thread of XLA's pool
DOWN = TransferIdentity(0, 0, Transfer(Payload.GRADIENT, 1, 0, 0))


def there_and_back(stash):
    """Whether a stash goes to host memory and comes back in time, with the same bits."""
    expected = np.asarray(stash)
    away, copies = AwayStash(Buffer(BufferKind.STASH, 0)), HostCopies()
    copies.offload(away, stash, time.monotonic())
    copies.fetch(away, None, time.monotonic())
    try:
        away.back.result(PATIENCE_S)
    except TimeoutError:
        return False
    finally:
        copies.close()
    return np.array_equal(away.take(), expected)


def main(arguments, link, rest):
    rendezvous = join_run(arguments, Joining(60, 30))
    payloads = {channel_of(DOWN.transfer): SHAPE}
    communicators = LinkCommunicators(make_mesh(2), payloads, answered=False)
    route = DirectRoute(communicators.first_programs(), answered=False)
    value = jax.device_put(jnp.ones(SHAPE.shape), jax.local_devices()[0])
    stash = jax.block_until_ready(value + 1)
    rendezvous.exchange({})
    copied = None
    if rendezvous.rank == 0:
        waiting = threading.Thread(
            target=route.take, args=(DOWN, time.monotonic(), time.monotonic() + 30)
        )
        waiting.start()
        copied = there_and_back(stash)
        rendezvous.exchange({})  # now the peer comes
        waiting.join()
    else:
        rendezvous.exchange({})
        jax.block_until_ready(route.post(DOWN, value, time.monotonic()).value)
    link.send({"kind": "result", "rank": rendezvous.rank, "copied": copied})


if __name__ == "__main__":
    run_rank(main)
