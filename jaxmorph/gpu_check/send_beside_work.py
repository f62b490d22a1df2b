"""What a slow link costs a stage that sends: work behind one message, and whole steps."""

import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.gpu_check.stage_pipeline import LINK, TRANSFER_S, StagePipeline
from jaxmorph.gpu_check.stage_task import StageTask
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.schedule.ops import OpKind

_MESSAGE = Transfer(Payload.ACTIVATION, LINK.lower, LINK.upper, microbatch=0)
_UNCOUNTED = 2
_PRODUCTS = 10
_WIDTHS = {"cpu": 256}
_GPU_WIDTH = 4096  # such products take a GPU about a third of a millisecond each


def time_beside_delay(
    pipeline: StagePipeline, task: StageTask
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Time work behind a message, and steps, on a link that is slow; steps also on one that isn't.

    Args:
        task: How many messages and steps, and the delay.

    Returns:
        (figures, no arrays): `alone_ms` and `behind_ms`, of work with and without a message before
        it, on stage 0; `on_way_ms`, of those messages, on stage 1; `steps`, with the delay and
        without: milliseconds of a step, the share of it in which this stage had no op to run, and
        how long each kind of op took.
    """
    rounds, steps = 2 * (task.num_sends + _UNCOUNTED), task.num_steps + _UNCOUNTED
    without = _time_steps(pipeline, 0, steps)
    pipeline.delay_messages(task.delay_ms)
    figures = _time_sends(pipeline, steps, rounds)
    delayed = _time_steps(pipeline, steps + rounds, steps)
    return {**figures, "steps": {"without": without, "with": delayed}}, {}


def _time_steps(pipeline: StagePipeline, first: int, count: int) -> dict[str, Any]:
    """Steps whose gradients nobody applies: all of them do the same."""
    took_s, waited = [], []
    ops: dict[OpKind, list[float]] = {kind: [] for kind in (OpKind.F, OpKind.B, OpKind.W)}
    for number in range(first, first + count):
        step = pipeline.step(number)
        took_s.append(time.monotonic() - step.began_s)
        waited.append(1 - step.ran_s() / took_s[-1])
        pipeline.trainer.discard()
        if number >= first + _UNCOUNTED:
            for kind, found_ms in ops.items():
                found_ms += step.durations_ms(kind)
    return {
        "step_ms": 1e3 * median(took_s[_UNCOUNTED:]),
        "idle": median(waited[_UNCOUNTED:]),
        "op_ms": {str(kind): median(found_ms) for kind, found_ms in ops.items()},
    }


def _time_sends(pipeline: StagePipeline, first: int, rounds: int) -> dict[str, Any]:
    """Rounds with and without a message take turns; the next begins when it has arrived."""
    if pipeline.rank == _MESSAGE.source:
        sender = _Sender(pipeline)
        times_ms = [sender.time_ms(first + index, sends=index % 2) for index in range(rounds)]
        alone, behind = times_ms[0::2], times_ms[1::2]
        return {"alone_ms": alone[_UNCOUNTED:], "behind_ms": behind[_UNCOUNTED:]}
    taken_ms = [_take(pipeline, first + index, sends=index % 2) for index in range(rounds)]
    return {"on_way_ms": [each for each in taken_ms if each is not None][_UNCOUNTED:]}


class _Sender:
    """Sends what has just been computed, as a stage does, and then has other work."""

    def __init__(self, pipeline: StagePipeline) -> None:
        self._pipeline = pipeline
        payload = pipeline.activation
        width = _WIDTHS.get(jax.local_devices()[0].platform, _GPU_WIDTH)
        self._value = jnp.zeros(payload.shape, payload.dtype, device=pipeline.placement)
        self._factor = jnp.eye(width, device=pipeline.placement)
        self._compute = jax.jit(lambda value: value + 1)
        self._work = jax.jit(_products)

    def time_ms(self, number: int, *, sends: int) -> float:
        """Milliseconds until the other work has run, from before the message was computed."""
        began_s = time.perf_counter()
        self._value = self._compute(self._value)
        if sends:
            route = self._pipeline.route
            route.post(TransferIdentity(0, number, _MESSAGE), self._value, time.monotonic())
        self._work(self._factor).block_until_ready()
        took_s = time.perf_counter() - began_s
        self._pipeline.route.settle()
        self._pipeline.rendezvous.exchange({})
        return 1e3 * took_s


def _products(factor: jax.Array) -> jax.Array:
    """Work that reads nothing of a message."""
    return jax.lax.fori_loop(0, _PRODUCTS, lambda _, product: product @ factor, factor)


def _take(pipeline: StagePipeline, number: int, *, sends: int) -> float | None:
    """How long a round's message was on its way; None for a round without."""
    on_way_ms = None
    if sends:
        now_s = time.monotonic()
        identity = TransferIdentity(0, number, _MESSAGE)
        moved = pipeline.route.take(identity, now_s, now_s + TRANSFER_S)
        jax.block_until_ready(moved.value)
        assert moved.peer_arrived_s is not None
        assert moved.over_s is not None
        on_way_ms = 1e3 * (moved.over_s - moved.peer_arrived_s)
    pipeline.rendezvous.exchange({})
    return on_way_ms
