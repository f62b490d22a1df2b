"""One of two ranks whose direct link fails in the middle, and begins again: reports what came."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.direct import DirectRoute, KeptOutputs, LinkCommunicators, LinkExhaustedError
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.routes import AbandonedEpochError, TransferIdentity
from jaxmorph.stage.mesh import make_mesh

TIMEOUT_S = 2
LINK = Link(0, 1)
SHAPE = PayloadShape((8, 16), jnp.dtype("float32"))
UP = [Transfer(Payload.ACTIVATION, 0, 1, microbatch) for microbatch in range(4)]
DOWN = Transfer(Payload.GRADIENT, 1, 0, 0)


def output(transfer):
    values = np.random.default_rng([transfer.source, transfer.microbatch]).normal(size=SHAPE.shape)
    return jax.device_put(jnp.asarray(values, jnp.float32), jax.local_devices()[0])


class End:
    """This rank's end of the link."""

    def __init__(self, rendezvous):
        self.rendezvous, self.rank, self.taken = rendezvous, rendezvous.rank, []
        self.kept = KeptOutputs()
        payloads = {channel_of(transfer): SHAPE for transfer in (UP[0], DOWN)}
        self.communicators = LinkCommunicators(make_mesh(2), payloads, answered=False)
        programs = self.communicators.first_programs()
        self.route = DirectRoute(programs, answered=False, kept=self.kept)
        rendezvous.exchange({})  # no deadline starts while the other rank compiles

    def move(self, transfer, epoch):
        """Do this end's part of a transfer; returns whether the payload is intact."""
        identity, now_s = TransferIdentity(epoch, 0, transfer), time.monotonic()
        if transfer.source == self.rank:
            moved = self.route.post(identity, output(transfer), now_s)
            return bool(jax.block_until_ready(moved.value) is not None)
        moved = self.route.take(identity, now_s, now_s + TIMEOUT_S)
        self.taken.append(moved.value)
        return np.array_equal(np.asarray(moved.value), np.asarray(output(transfer)))

    def failure_of(self, transfer, epoch):
        try:
            self.move(transfer, epoch)
        except Exception as error:
            return type(error).__name__
        return None

    def begin_again(self):
        """Returns what the sender must resend, by the receiver's count."""
        counts = self.rendezvous.exchange({"has": self.route.received[channel_of(UP[0])]})
        rest = self.kept.take_uncovered(channel_of(UP[0]), counts[1]["has"] if not self.rank else 0)
        self.route.abandon(0)
        self.route.replace_programs(self.communicators.programs(LINK, 1))
        self.rendezvous.exchange({})
        return rest

    def over_each(self):
        """Whether a message each way arrives over each remaining communicator."""
        came = []
        for number in range(2, self.communicators.count):
            self.route.replace_programs(self.communicators.programs(LINK, number))
            self.rendezvous.exchange({})
            came.append([self.move(transfer, 1) for transfer in (UP[0], DOWN)])
        return came

    def send_again(self, rest):
        for identity, value in rest:
            moved = self.route.post(identity._replace(epoch=1), value, time.monotonic())
            jax.block_until_ready(moved.value)
        return [identity.transfer.microbatch for identity, _ in rest]


def main(arguments, link, rest):
    timeouts_s = {"start_timeout_s": 60, "step_timeout_s": TIMEOUT_S}
    rendezvous = join_run(arguments, **timeouts_s, fails_over=True)
    end = End(rendezvous)
    result: dict[str, Any] = {"first": [end.move(transfer, 0) for transfer in UP[:2]]}
    if end.rank == 0:  # its peer doesn't come to this one
        result["alone"] = end.failure_of(UP[2], 0)
        result["kept_bytes"] = sum(
            value.nbytes for sent in end.kept._kept.values() for _, value in sent
        )
    rendezvous.exchange({})
    result["closed"] = end.failure_of(DOWN, 0)  # neither direction works any more
    rest_of_outputs = end.begin_again()
    result["refused"] = end.failure_of(UP[2], 0)
    result["again"] = end.send_again(rest_of_outputs)
    result["second"] = [end.move(UP[2], 1)] if end.rank else []
    result["second"] += [end.move(transfer, 1) for transfer in (DOWN, UP[3])]
    result["over_each"] = end.over_each()
    result["devices"] = [moved.devices() == {jax.local_devices()[0]} for moved in end.taken]
    try:
        end.communicators.programs(LINK, end.communicators.count)
    except LinkExhaustedError as error:
        result["exhausted"] = str(error)
    result["expected_refusal"] = AbandonedEpochError.__name__
    link.send({"kind": "result", "rank": end.rank, **result})


if __name__ == "__main__":
    run_rank(main)
