"""A receive waits where its route says, and a failed step abandons the epoch."""

import threading
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmorph.program.instructions import (
    Payload,
    RankInstructions,
    Receive,
    Run,
    Send,
    Transfer,
    channel_of,
)
from jaxmorph.runtime.direct import DirectRoute
from jaxmorph.runtime.executor import Executor, StepInputs
from jaxmorph.runtime.link_programs import LinkProgram
from jaxmorph.runtime.queue import AsynchronousQueue, Pace, PacedQueue, Stamp
from jaxmorph.runtime.routes import (
    AbandonedEpochError,
    Moved,
    TransferIdentity,
    TransferMismatchError,
)
from jaxmorph.schedule.ops import Op, OpKind

TRANSFER = Transfer(Payload.GRADIENT, 1, 0, 0)
INPUTS = StepInputs(None, None, 1.0)


@dataclass
class RecordingRoute:
    """Delivers at once and records the calling thread, or fails."""

    holds_queue: bool
    error: Exception | None = None
    threads: list = field(default_factory=list)
    abandoned: list = field(default_factory=list)

    def take(self, identity, arrived_s, deadline_s):
        self.threads.append(threading.current_thread())
        assert deadline_s >= arrived_s
        if self.error is not None:
            raise self.error
        return Moved(jnp.zeros(()), 1.0, 3.5)

    def reserve(self, identity, deadline_s):
        return iter(())

    def settle(self):
        pass

    def abandon(self, epoch):
        self.abandoned.append(epoch)


@pytest.fixture
def queue():
    queue = PacedQueue()
    yield queue
    queue.close()


RECEIVE = (Receive(TRANSFER, "delegated"),)


def execute(queue, route, instructions=RECEIVE, **more):
    placement = SingleDeviceSharding(jax.devices()[0])
    executor = Executor((), placement, queue, {"delegated": route}, Pace(), 5.0, **more)
    program = RankInstructions(0, 2, 1, instructions)
    return executor.execute(program, (), (), INPUTS, step=0)


def test_a_receive_beside_the_queue_waits_on_the_host(queue):
    route = RecordingRoute(holds_queue=False)
    outcome = execute(queue, route)
    assert route.threads == [threading.current_thread()]
    assert outcome.stamps == []  # its wait is not timed
    assert outcome.arrivals == [Stamp(TRANSFER, 1.0, 3.5)]


def test_a_receive_on_the_queue_waits_there(queue):
    route = RecordingRoute(holds_queue=True)
    outcome = execute(queue, route)
    assert route.threads != [threading.current_thread()]
    assert [stamp.label for stamp in outcome.stamps] == [TRANSFER]
    assert outcome.arrivals == []


class Identity:
    """The identity that a transfer brings, once it has come."""

    def __init__(self, identity, has_come):
        words = jnp.array([*identity.words(), 0, 0], jnp.uint32)
        self.shards, self.has_come = words.addressable_shards, has_come

    @property
    def addressable_shards(self):
        assert self.has_come.wait(30)
        return self.shards


class Direct(LinkProgram):
    """A program that is dispatched at once, whose peer is at `comes`."""

    def __init__(self, comes):
        self.peer: Any = Identity(comes, threading.Event())

    def run(self, identity, value=None):
        return self.peer, jnp.zeros(3)


def test_the_host_runs_ahead_of_receives_that_nobody_times():
    queue, right = AsynchronousQueue(), TransferIdentity(0, 0, TRANSFER)
    program = Direct(right)
    route = DirectRoute({channel_of(TRANSFER): program}, answered=False)
    queue.enqueue_transfer(TRANSFER, lambda now_s: route.take(right, now_s, now_s + 30))
    queue.enqueue("an op that reads it", lambda: jnp.zeros(3))
    program.peer.has_come.set()  # only now
    assert [stamp.label for stamp in queue.drain()] == [TRANSFER, "an op that reads it"]
    queue.close()


def route_of_a_wrong_message(**settings):
    program = Direct(TransferIdentity(0, 0, TRANSFER._replace(microbatch=1)))
    program.peer.has_come.set()
    return DirectRoute({channel_of(TRANSFER): program}, answered=False, **settings)


@pytest.mark.parametrize("ops_fail", [False, True])
def test_a_wrong_message_is_the_cause_of_a_steps_failure(ops_fail):
    """Ops that read it are dispatched before, or fail as they are."""
    queue, route = AsynchronousQueue(), route_of_a_wrong_message()

    def fail(label, work, duration_s=None):
        raise jax.errors.JaxRuntimeError("INTERNAL: an input of this op has failed")

    queue.enqueue = fail if ops_fail else queue.enqueue
    then = (Run(Op(OpKind.F, 0)),) if ops_fail else ()
    with pytest.raises(TransferMismatchError, match=r"expected gradient\[0\] 1>0 of step 0"):
        execute(queue, route, (*RECEIVE, *then))
    assert route.abandoned == 0
    queue.close()


def test_a_host_that_does_not_run_ahead_checks_at_once():
    with pytest.raises(TransferMismatchError):
        route_of_a_wrong_message(runs_ahead=False).take(TransferIdentity(0, 0, TRANSFER), 0.0, 1.0)


def test_a_delegated_send_may_take_compute(queue):
    tied = [Transfer(Payload.TIED, 0, 1, number) for number in range(3)]  # no buffer holds them
    sends = [Send(each, "delegated") for each in tied]
    asked, ends_s = [], []

    def takes_s(identity):
        asked.append(identity.transfer)
        return 5.0

    execute(queue, RecordingRoute(holds_queue=False), tuple(sends), send_takes_s=takes_s)
    queue.enqueue_after(ends_s.append)
    queue.drain()
    assert asked == [send.transfer for send in sends]
    assert ends_s == [15.0]  # by the queue's clock, which began at 0


@pytest.mark.parametrize("holds_queue", [True, False])
def test_an_error_abandons_the_epoch(queue, holds_queue):
    route = RecordingRoute(holds_queue, error=TimeoutError("nothing came"))
    with pytest.raises(TimeoutError, match="nothing came"):
        execute(queue, route)
    assert route.abandoned == [0]


def test_a_direct_route_refuses_an_abandoned_epoch():
    route = DirectRoute({}, answered=False)
    route.abandon(1)
    with pytest.raises(AbandonedEpochError, match="of step 7, epoch 1: this epoch of the route"):
        route.take(TransferIdentity(1, 7, TRANSFER), 0.0, 1.0)
    with pytest.raises(AbandonedEpochError, match="expected an epoch after 1"):
        route.post(TransferIdentity(0, 7, TRANSFER), jnp.zeros(()), 0.0)
    with pytest.raises(KeyError):  # a later epoch gets as far as its program
        route.take(TransferIdentity(2, 7, TRANSFER), 0.0, 1.0)
