"""How much slower computation is beside messages: the figure that decides between ways of copying.

The payload of a message that leaves is what an op before it computes, when they come as in
training; its copy has to wait for that. Where they come without a pause it has been computed.
Messages that arrive are needed by no op here.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.gpu_check.copy_settings import MOST_SLOWDOWN, MatmulSettings
from jaxmorph.gpu_check.traffic import Traffic

NUM_SLOTS = 8
_DTYPE = jnp.dtype(jnp.bfloat16)
_WARM_UPS = 2

Beside = Callable[[int, jax.Array], None]
"""What is done between two dispatches, given the op's number and what it computes to be sent."""

OpenTraffic = Callable[[PayloadShape], AbstractContextManager[Traffic]]


@dataclass(frozen=True)
class Disturbance:
    """How much slower ops are beside messages; medians.

    Attributes:
        training: The share by which ops are slower beside messages that come as in training.
        num_training: Of those messages in one timing.
        flat_out: The same beside as many messages as there is room for.
    """

    op_ms: float
    training: float
    num_training: int
    flat_out: float
    flat_out_gb_per_s: float

    @property
    def is_gentle(self) -> bool:
        """Whether messages as in training hardly slow ops down."""
        return self.training <= MOST_SLOWDOWN


class Matmuls:
    """Ops that a device computes one after another."""

    def __init__(self, placement: Sharding, settings: MatmulSettings) -> None:
        self._settings, width = settings, settings.width
        rng = np.random.default_rng(0)
        # Scaled so that products neither grow nor vanish.
        weights = rng.standard_normal((2, width, width), np.float32) / np.sqrt(width)
        self._x, self._w = jax.device_put(list(weights.astype(_DTYPE)), placement)
        self.payload = PayloadShape((settings.message_bytes // _DTYPE.itemsize,), _DTYPE)
        self._op = jax.jit(partial(_op, per_op=settings.per_op, size=self.payload.shape[0]))

    def ready_payload(self) -> jax.Array:
        """A payload that has been computed."""
        return jax.block_until_ready(self._op(self._x, self._w)[1])

    def time_s(self, beside: Beside | None = None) -> float:
        """Seconds of all ops, a few of them dispatched ahead.

        Args:
            beside: What is done after each dispatch.
        """
        x, ahead = self._x, deque[jax.Array]()
        began_s = time.perf_counter()
        for number in range(self._settings.ops):
            x, payload = self._op(x, self._w)
            ahead.append(x)
            if beside is not None:
                beside(number, payload)
            if len(ahead) > self._settings.ahead:
                jax.block_until_ready(ahead.popleft())
        jax.block_until_ready(x)
        return time.perf_counter() - began_s


def _op(x: jax.Array, w: jax.Array, *, per_op: int, size: int) -> tuple[jax.Array, jax.Array]:
    for _ in range(per_op):
        x = x @ w
    return x, x.reshape(-1)[:size]


def measure_disturbance(
    open_traffic: OpenTraffic, placement: Sharding, settings: MatmulSettings
) -> Disturbance:
    """Time ops alone, beside messages as in training, alone, and beside as many as there can be.

    Args:
        open_traffic: Of the tier, given the payload.
        placement: Where ops compute.
        settings: What is computed, and how often.
    """
    matmuls = Matmuls(placement, settings)
    ready = matmuls.ready_payload()
    with open_traffic(matmuls.payload) as traffic:
        op_s = min(matmuls.time_s() for _ in range(_WARM_UPS)) / settings.ops
        every = ops_between(op_s, settings)
        kinds = _AsInTraining(traffic, every), _FlatOut(traffic, ready, op_s)
        times: list[list[float]] = []
        num_training = flat_out_bytes = 0
        for _ in range(settings.rounds + 1):
            turn = []
            for kind in kinds:
                turn += [matmuls.time_s(), matmuls.time_s(kind)]
                traffic.drain()
            times.append(turn)
            num_training, num_flat_out = (kind.take_count() for kind in kinds)
            flat_out_bytes = num_flat_out * settings.message_bytes
        last_alone_s = matmuls.time_s()
    training, flat_out = slowdowns(times[1:], last_alone_s)
    alone_s = median([turn[at] for turn in times[1:] for at in (0, 2)])
    rate = flat_out_bytes / times[-1][3] / 1e9
    return Disturbance(1e3 * alone_s / settings.ops, training, num_training, flat_out, rate)


def ops_between(op_s: float, settings: MatmulSettings) -> int:
    """From one message to the next where they come as in training; at least one in a timing.

    Args:
        op_s: How long an op takes.
    """
    return min(max(round(settings.every_s / op_s), 1), settings.ops)


def slowdowns(times_s: Sequence[Sequence[float]], last_alone_s: float) -> tuple[float, float]:
    """By how much each kind of timing is longer than those alone just before and after it.

    Args:
        times_s: For each round: alone, beside messages as in training, alone, beside as many as
            there can be.

    Returns:
        The median share for each kind. It may be negative.
    """
    alone_after = [turn[0] for turn in times_s[1:]] + [last_alone_s]
    training = [2 * b / (a + c) - 1 for a, b, c, _ in times_s]
    pairs = zip(times_s, alone_after, strict=True)
    flat_out = [2 * turn[3] / (turn[2] + after) - 1 for turn, after in pairs]
    return median(training), median(flat_out)


class _Counting:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic, self._count = traffic, 0

    def begin(self, payload: jax.Array) -> int:
        begun = self._traffic.begin(payload)
        self._count += begun
        return begun

    def take_count(self) -> int:
        """Messages begun since the last call."""
        count, self._count = self._count, 0
        return count


class _AsInTraining(_Counting):
    """A message after every so many ops, the last of which computes it."""

    def __init__(self, traffic: Traffic, every: int) -> None:
        super().__init__(traffic)
        self._every = every

    def __call__(self, number: int, payload: jax.Array) -> Any:
        if number % self._every == self._every - 1:
            self.begin(payload)


class _FlatOut(_Counting):
    """As many messages as there is room for; no longer than an op lasts, or none would follow."""

    def __init__(self, traffic: Traffic, ready: jax.Array, op_s: float) -> None:
        super().__init__(traffic)
        self._ready, self._op_s = ready, op_s

    def __call__(self, number: int, payload: jax.Array) -> Any:
        until_s = time.perf_counter() + self._op_s
        while self.begin(self._ready) and time.perf_counter() < until_s:
            pass
