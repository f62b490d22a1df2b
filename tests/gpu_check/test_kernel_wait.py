"""What is seen of a kernel that waits: with the host's own copy in the kernel's place."""

from contextlib import closing

import jax
import numpy as np
import pytest

from jaxmorph.gpu_check.kernel_wait import SIZE, wait_for_signal
from jaxmorph.pallas_kernels import copy_from_slot
from jaxmorph.transport.slots import Slots

SPIN_US = 2000


def kernel_that(copy):
    """A kernel that does what a function of (array to fill, control words) does on the host."""

    def kernel(control, arrivals, *, shape, dtype, slot_bytes):
        def on_host(words):
            into = np.zeros(shape, dtype)
            status = copy(into, np.array(words))
            return into, np.array([status], np.uint32)

        results = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((1,), np.uint32)
        return jax.pure_callback(on_host, results, control)

    return kernel


def never_waits(into, words):
    words = words.copy()
    words[2:4] = 0  # no signal's address
    return copy_from_slot(into, words)


def forgets_the_last_byte(into, words):
    status = copy_from_slot(into, words)
    into[-1] = 0
    return status


@pytest.mark.parametrize(
    ("copy", "said_so", "then_whole"),
    [
        (copy_from_slot, True, True),
        (never_waits, False, True),
        (forgets_the_last_byte, True, False),
    ],
)
def test_a_kernel_is_seen_to_wait_and_then_to_copy(copy, said_so, then_whole):
    with closing(Slots.create(1, 4 * SIZE)) as slots:
        found = wait_for_signal(slots, lambda address: address, SPIN_US, kernel_that(copy))
    assert (found.said_so, found.then_whole) == (said_so, then_whole)
    assert found.spin_us == SPIN_US
    assert found.waited_us >= (SPIN_US if said_so else 0)
