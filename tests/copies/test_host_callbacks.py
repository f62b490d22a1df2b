import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from slot_memory import Slot

from jaxmorph.copies.host_callbacks import host_callback_tiers
from jaxmorph.copies.payload import PayloadShape, SlotUse

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
LARGE_COPIES = Path(__file__).with_name("large_copies.py")


@pytest.mark.parametrize("tier", host_callback_tiers(), ids=lambda tier: tier.name)
def test_a_message_is_posted_and_completed_once_its_payload_is_there(tier):
    use = SlotUse(PayloadShape((2, 3), jnp.dtype("float32")), 6)
    program = tier.compile(use, PLACEMENT)
    values = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    slots = [Slot(sequence, 24) for sequence in (0xFFFFFFFF, 0, 1)]
    tickets = [
        program.start(jnp.asarray(values + at), range(6), slot, (at, 9))
        for at, slot in enumerate(slots)
    ]
    assert [np.asarray(ticket).tolist() for ticket in tickets] == [[0], [1], [2]]
    for at, slot in enumerate(slots):
        assert slot.said == [("post", 24, (at, 9), True), "complete"]
        assert np.array_equal(slot.payload.view(np.float32).reshape(2, 3), values + at)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_threads", ["1", pytest.param("4", marks=pytest.mark.one_jax)])
def test_large_results_arrive_though_several_are_still_being_computed(num_threads):
    """A callback that waits for JAX's pool of threads hangs in its only one."""
    environment = {**os.environ, "NPROC": num_threads}
    done = subprocess.run(
        [sys.executable, str(LARGE_COPIES)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * len(host_callback_tiers())
