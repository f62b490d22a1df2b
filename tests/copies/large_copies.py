"""Copies of large results that are still being computed, by every backend with host callbacks.

`test_host_memory` runs it in a process of its own, as JAX sizes its thread pool by the environment
variable NPROC.
"""

import faulthandler
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import Slot

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.host_memory import host_callback_backends

LIMIT_S = 300
WIDTH = 128
LONGEST_ROUNDS = 4096
AT_ONCE = 6
MEGABYTES_AND_PARTS = ((1, 1), (4, 1), (4, 4))


@jax.jit
def long_computation(values, rounds):
    turn = jnp.eye(WIDTH)[::-1]
    return jax.lax.fori_loop(0, rounds, lambda _, v: jnp.sin(v @ turn + 1.0), values)


def copy_while_computing(copy, use, inputs, rounds):
    """Start to copy all results; returns whether the last was still being computed then."""
    numbers = itertools.count()
    values = [long_computation(each, rounds) for each in inputs]
    slots = [[Slot(next(numbers), 4 * len(part)) for part in use.parts] for _ in values]
    tickets = [
        copy(value, part, slot, (at,))
        for at, (value, its_slots) in enumerate(zip(values, slots, strict=True))
        for part, slot in zip(use.parts, its_slots, strict=True)
    ]
    was_running = not values[-1].is_ready()
    jax.block_until_ready(tickets)
    for at, (value, its_slots) in enumerate(zip(values, slots, strict=True)):
        arrived = np.concatenate([slot.payload for slot in its_slots])
        assert np.array_equal(arrived, np.asarray(value).reshape(-1).view(np.uint8))
        for part, slot in zip(use.parts, its_slots, strict=True):
            assert slot.said == [("post", 4 * len(part), (at,), True), "complete"]
    return was_running


def check(backend, megabytes, num_parts):
    rows = megabytes * 2**20 // (4 * WIDTH)
    payload = PayloadShape((rows, WIDTH), jnp.dtype("float32"))
    use = SlotUse(payload, rows * WIDTH // num_parts)
    copy = backend.compile(use, SingleDeviceSharding(jax.devices()[0]))
    inputs = [jax.random.normal(jax.random.key(at), payload.shape) for at in range(AT_ONCE)]
    rounds = 2
    # Computing takes far longer than starting copies; if not, make it longer.
    while not copy_while_computing(copy, use, inputs, rounds):
        rounds *= 2
        assert rounds < LONGEST_ROUNDS
    print(backend.name, megabytes, num_parts, flush=True)


def main():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    for backend, sizes in itertools.product(host_callback_backends(), MEGABYTES_AND_PARTS):
        check(backend, *sizes)


if __name__ == "__main__":
    main()
