"""The twins, in Pallas's interpreter, beside the references in plain `jax.numpy`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.pallas_kernels import (
    CopyTuning,
    SlotControl,
    copy_from_host_reference,
    copy_from_host_twin,
    copy_to_host_reference,
    copy_to_host_twin,
    new_arrivals,
    not_ready,
    pack,
)
from jaxmorph.pallas_kernels.tiling import tile

TUNING = CopyTuning(3, loads=2)
ROW = 128 * 16
TILE = 2 * ROW
NUMBER = 0
CASES = [
    ((1,), "uint8"),
    ((8,), "bfloat16"),
    ((4 * TILE // 4 + ROW // 4 + 4, 4), "int8"),  # tiles, a row of vectors, and one
    ((2 * TILE + ROW + 50, 1), "int16"),
    ((5, TILE // 4 + 1), "float32"),
]


def _payload(shape, dtype):
    values = np.random.default_rng(3).integers(0, 100, shape)
    return jnp.asarray(values).astype(dtype)


def _control():
    return jnp.asarray(pack(SlotControl(16, NUMBER)))


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_a_payload_goes_out_and_comes_back_as_it_was(shape, dtype):
    payload = _payload(shape, dtype)
    slot, signal, ticket, arrivals = copy_to_host_twin(
        payload, _control(), new_arrivals(), slot_bytes=payload.nbytes, tuning=TUNING
    )
    expected = copy_to_host_reference(payload, NUMBER, jnp.zeros(payload.nbytes, jnp.uint8))
    for got, wanted in zip((slot, signal, ticket), expected, strict=True):
        assert np.array_equal(got, wanted)
    assert arrivals.tolist() == [0, 0]

    signals = jnp.full(tile(payload.nbytes, TUNING).ctas, NUMBER, jnp.uint32)
    back, status, acknowledgement, arrivals = copy_from_host_twin(
        slot, signals, _control(), arrivals, shape=shape, dtype=payload.dtype, tuning=TUNING
    )
    wanted, wanted_status = copy_from_host_reference(
        slot, NUMBER, NUMBER, shape=shape, dtype=payload.dtype
    )
    assert np.array_equal(back, payload)
    assert np.array_equal(wanted, payload)
    assert status.tolist() == wanted_status.tolist() == acknowledgement.tolist() == [NUMBER]
    assert arrivals.tolist() == [0, 0]


@pytest.mark.parametrize("late", [0, 2])
def test_one_cta_that_sees_another_number_is_enough_for_not_ready(late):
    number, num_bytes = 7, 3 * TILE
    signals = jnp.full(3, number, jnp.uint32).at[late].set(number - 2)
    control = jnp.asarray(pack(SlotControl(16, number)))
    _, status, acknowledgement, arrivals = copy_from_host_twin(
        jnp.ones(num_bytes, jnp.uint8), signals, control, new_arrivals(),
        shape=(num_bytes,), dtype=jnp.uint8, tuning=TUNING,
    )  # fmt: skip
    assert status.tolist() == [not_ready(number)]
    assert (acknowledgement.tolist(), arrivals.tolist()) == ([0], [0, 0])


def test_a_reference_says_not_ready_and_leaves_the_rest_of_a_slot():
    slot, signal, ticket = copy_to_host_reference(
        jnp.arange(2, dtype=jnp.uint8), 3, jnp.full(4, 9, jnp.uint8)
    )
    assert (slot.tolist(), signal.tolist(), ticket.tolist()) == ([0, 1, 9, 9], [3], [3])
    _, status = copy_from_host_reference(slot, 2, 0, shape=(), dtype=jax.numpy.float32)
    assert status.tolist() == [0xFFFFFFFF]
