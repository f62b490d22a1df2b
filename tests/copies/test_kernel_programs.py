"""The copy programs with the real kernels, lowered for CUDA without a GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.kernels import program_from_host, program_to_host
from jaxmorph.pallas_kernels.kernels import (
    copy_from_host,
    copy_to_host,
    from_host_assembly,
    to_host_assembly,
)
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, tile

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
SHAPE = (2, 37, 129)


def lowered(traced):
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def has_in_order(module, assembly):
    at = 0
    for line in assembly.splitlines():
        at = module.index(line, at) + len(line)
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part_elements", [2 * 37 * 129, 4096])
def test_every_length_of_part_has_its_kernel(dtype, part_elements):
    use = SlotUse(PayloadShape(SHAPE, jnp.dtype(dtype)), part_elements)
    lengths = {len(part) for part in use.parts}
    for length in lengths:
        module = lowered(program_to_host(use, PLACEMENT, length, copy_to_host))
        num_bytes = length * jnp.dtype(dtype).itemsize
        assert has_in_order(module, to_host_assembly(tile(num_bytes, TO_HOST)))
        assert module.count("mosaic_gpu_v2") == 1
        assert ("dynamic_slice" in module) == (len(lengths) > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_payload_has_its_kernel(dtype):
    use = SlotUse(PayloadShape(SHAPE, jnp.dtype(dtype)), 2 * 37 * 129)
    program = program_from_host(use, PLACEMENT, copy_from_host)
    module = lowered(program)
    assert has_in_order(module, from_host_assembly(tile(use.slot_bytes, FROM_HOST)))
    assert module.count("mosaic_gpu_v2") == 1
    payload, ticket = program.out_info
    assert (payload.shape, payload.dtype, ticket.shape) == (SHAPE, jnp.dtype(dtype), (1,))


def test_no_operand_is_donated():
    use = SlotUse(PayloadShape((4,), jnp.dtype("float32")), 4)
    for program in (
        program_to_host(use, PLACEMENT, 4, copy_to_host),
        program_from_host(use, PLACEMENT, copy_from_host),
    ):
        module = lowered(program)
        assert "tf.aliasing_output" not in module
        assert "jax.buffer_donor" not in module
