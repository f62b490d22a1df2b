"""One of two ranks whose direct link fails, and then uses each of its other communicators."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.direct import DirectRoute
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.link_programs import LinkCommunicators, LinkExhaustedError
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.stage.mesh import make_mesh

TIMEOUT_S = 2
LINK = Link(0, 1)
SHAPE = PayloadShape((8, 16), jnp.dtype("float32"))
UP, DOWN = Transfer(Payload.ACTIVATION, 0, 1, 0), Transfer(Payload.GRADIENT, 1, 0, 0)


def output(transfer):
    values = np.random.default_rng(transfer.source).normal(size=SHAPE.shape)
    return jax.device_put(jnp.asarray(values, jnp.float32), jax.local_devices()[0])


class End:
    """This rank's end of the link."""

    def __init__(self, rendezvous):
        self.rendezvous, self.rank, self.taken = rendezvous, rendezvous.rank, []
        payloads = {channel_of(transfer): SHAPE for transfer in (UP, DOWN)}
        self.communicators = LinkCommunicators(make_mesh(2), payloads, answered=False)
        self.route = DirectRoute(self.communicators.first_programs(), answered=False)
        rendezvous.exchange({})  # no deadline starts while the other rank compiles

    def move(self, transfer):
        """Do this end's part of a transfer; returns whether the payload is intact."""
        identity, now_s = TransferIdentity(0, 0, transfer), time.monotonic()
        if transfer.source == self.rank:
            moved = self.route.post(identity, output(transfer), now_s)
            return bool(jax.block_until_ready(moved.value) is not None)
        moved = self.route.take(identity, now_s, now_s + TIMEOUT_S)
        self.taken.append(moved.checked())
        return np.array_equal(np.asarray(moved.value), np.asarray(output(transfer)))

    def failure_of(self, transfer):
        try:
            self.move(transfer)
        except Exception as error:
            return type(error).__name__
        return None

    def over_each(self):
        """Whether a message each way, and a pair, arrive over each remaining communicator."""
        came = []
        for number in range(1, self.communicators.count):
            self.route.replace_programs(self.communicators.programs(LINK, number))
            self.rendezvous.exchange({})
            came.append([self.move(transfer) for transfer in (UP, DOWN)] + [self.move_both()])
        return came

    def move_both(self):
        """Do this end's part of a pair; returns whether the payload is intact."""
        sent, received = (UP, DOWN) if self.rank == 0 else (DOWN, UP)
        identities = [TransferIdentity(0, 0, each) for each in (sent, received)]
        now_s = time.monotonic()
        moved = self.route.post_and_take(
            identities[0], output(sent), identities[1], now_s, now_s + TIMEOUT_S
        )
        self.taken.append(moved.checked())
        return np.array_equal(np.asarray(moved.value), np.asarray(output(received)))


def main(arguments, link, rest):
    end = End(join_run(arguments, Joining(60, TIMEOUT_S, fails_over=True)))
    result: dict[str, Any] = {"first": end.move(UP)}
    if end.rank == 0:  # its peer doesn't come to this one
        result["alone"] = end.failure_of(UP)
    end.rendezvous.exchange({})
    result["closed"] = end.failure_of(DOWN)
    result["over_each"] = end.over_each()
    result["devices"] = [moved.devices() == {jax.local_devices()[0]} for moved in end.taken]
    try:
        end.communicators.programs(LINK, end.communicators.count)
    except LinkExhaustedError as error:
        result["exhausted"] = str(error)
    link.send({"kind": "result", "rank": end.rank, **result})


if __name__ == "__main__":
    run_rank(main)
