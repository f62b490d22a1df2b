"""One of two ranks whose link is emulated: runs direct transfers, reports their stamps."""

import time
from contextlib import closing
from functools import partial

import jax
import jax.numpy as jnp

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.runtime.direct import DirectRoute, LinkCommunicators
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.queue import AsynchronousQueue, PacedQueue
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.stage.mesh import make_mesh

NUM_BYTES = 4000
OP_S = 0.03  # far longer than a busy machine takes to wake a queue
SHORT_S = 0.3  # for a cut that doesn't heal
LONG_S = 60.0
UP = [Transfer(Payload.ACTIVATION, 0, 1, microbatch) for microbatch in range(3)]


def slow(**how):
    return LinkCondition((0, 1), **how)


class Bench:
    """This rank's end of the link, on a queue of its own."""

    def __init__(self, rendezvous, link, queue, answered):
        self.rendezvous, self.link, self.queue = rendezvous, link, queue
        self.rank = rendezvous.rank
        shape = PayloadShape((NUM_BYTES // 4,), jnp.dtype("float32"))
        payloads = {channel_of(UP[0]): shape}
        programs = LinkCommunicators(make_mesh(2), payloads, answered=answered).first_programs()
        self.links = EmulatedLinks()
        self.route = DirectRoute(programs, answered, self.links, LONG_S)
        self.value = jax.device_put(jnp.zeros(shape.shape, shape.dtype), jax.local_devices()[0])
        self.step = 0
        self.arrivals_s = []
        self.run("first", [])  # also connects the link

    def run(self, test, conditions, meanwhile=None, timeout_s=LONG_S):
        """Run transfers with an op behind each, under new conditions."""
        origin_s = self.rendezvous.exchange({"now_s": time.monotonic()})[0]["now_s"]
        self.links.emulate(conditions, origin_s)
        self.rendezvous.exchange({})
        self.arrivals_s.clear()
        for transfer in UP:
            self.queue.enqueue_transfer(str(transfer), partial(self.move, transfer, timeout_s))
            self.queue.enqueue("op", self.value.block_until_ready, OP_S)
        healed_s = meanwhile() if meanwhile else None
        stamps = [(stamp.label, stamp.start_s, stamp.end_s) for stamp in self.queue.drain()]
        self.step += 1
        arrivals_s = list(self.arrivals_s)
        times_s = {"origin_s": origin_s, "arrivals_s": arrivals_s, "healed_s": healed_s}
        self.report(test, stamps=stamps, **times_s)

    def move(self, transfer, timeout_s, arrived_s):
        identity = TransferIdentity(0, self.step, transfer)
        self.route.timeout_s = timeout_s
        self.arrivals_s.append(arrived_s)
        if self.rank == transfer.source:
            return self.route.post(identity, self.value, arrived_s)
        return self.route.take(identity, arrived_s, time.monotonic() + timeout_s)

    def run_to_its_deadline(self, test, conditions):
        try:
            self.run(test, conditions, timeout_s=SHORT_S)
        except TimeoutError as error:
            self.report(test, error=str(error))
            self.queue.restart()
        self.step += 1

    def heal(self):
        """Heal the cut link once both ranks wait for it; returns when."""
        deadline_s = time.monotonic() + LONG_S
        while not self.arrivals_s and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the queue's thread goes on from there until the link makes it wait
        self.rendezvous.exchange({})
        healed_s = time.monotonic()
        self.links.emulate([])
        return healed_s

    def report(self, test, **what):
        self.link.send({"kind": "result", "rank": self.rank, "test": test, **what})


def main(arguments, link, rest):
    rendezvous = join_run(arguments, start_timeout_s=60, step_timeout_s=60)
    with closing(PacedQueue()) as queue:
        paced = Bench(rendezvous, link, queue, answered=True)
        paced.run("healthy", [])
        paced.run("latency", [slow(latency_ms=30.0)])
        paced.run("jitter", [slow(latency_ms=30.0, jitter_ms=3.0)])
        paced.run("bandwidth", [slow(bandwidth_mbps=1.6)])
        paced.run("healed by a change", [slow(cut=True)], paced.heal)
        paced.run_to_its_deadline("cut for good", [slow(cut=True)])
        paced.run("healthy again", [])
    with closing(AsynchronousQueue()) as queue:
        unpaced = Bench(rendezvous, link, queue, answered=False)
        unpaced.run("unpaced", [slow(latency_ms=30.0)])


if __name__ == "__main__":
    run_rank(main)
