"""Both kernels lower to CUDA without a GPU, and can be exported and read back."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxmorph.pallas_kernels.kernels import (
    copy_from_host,
    copy_to_host,
    from_host_assembly,
    to_host_assembly,
)
from jaxmorph.pallas_kernels.tuning import CopyTuning, tile

CONTROL = jax.ShapeDtypeStruct((5,), jnp.uint32)
ARRIVALS = jax.ShapeDtypeStruct((1,), jnp.uint32)
DTYPES = [
    "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "uint8", "uint16", "uint32",
]  # fmt: skip
SIZES = [16, 8 << 10, (8 << 10) + 16, (8 << 10) + 10, 64 << 20]


def _programs(shape, dtype, tuning):
    """Both kernels as programs, each with its operands' shapes."""

    def send(payload, control, arrivals):
        return copy_to_host(payload, control, arrivals, tuning=tuning)

    def receive(control):
        return copy_from_host(control, shape=shape, dtype=dtype, tuning=tuning)

    payload = jax.ShapeDtypeStruct(shape, dtype)
    return (jax.jit(send), (payload, CONTROL, ARRIVALS)), (jax.jit(receive), (CONTROL,))


def _lowered(program, operands):
    return program.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_lowers(dtype):
    for program, operands in _programs((37, 129), jnp.dtype(dtype), CopyTuning(8)):
        assert "mosaic_gpu_v2" in _lowered(program, operands)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("tuning", [CopyTuning(1), CopyTuning(8, 256), CopyTuning(32, loads=32)])
def test_every_size_lowers_with_its_instructions(num_bytes, tuning):
    tiling = tile(num_bytes, tuning)
    programs = _programs((num_bytes // 2,), jnp.bfloat16, tuning)
    for (program, operands), assembly in zip(
        programs, (to_host_assembly, from_host_assembly), strict=True
    ):
        module = _lowered(program, operands)
        at = 0
        for line in assembly(tiling).splitlines():
            at = module.index(line, at) + len(line)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7)])
def test_shapes_are_kept(shape):
    (send, sent), (receive, received) = _programs(shape, jnp.dtype("float32"), CopyTuning(2))
    assert jax.eval_shape(send, *sent).shape == (1,)
    payload, ticket = jax.eval_shape(receive, *received)
    assert (payload.shape, payload.dtype, ticket.shape) == (shape, jnp.float32, (1,))


@pytest.mark.parametrize("which", [0, 1])
def test_a_kernel_is_exported_and_read_back(which):
    program, operands = _programs((128, 33), jnp.bfloat16, CopyTuning(4))[which]
    exported = export.export(program, platforms=["cuda"])(*operands)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    word = again.out_avals[-1]  # the ticket is a result: XLA may not drop the kernel
    assert (word.shape, word.dtype) == ((1,), jnp.uint32)
    assert again.mlir_module() == exported.mlir_module()
    assert "mosaic_gpu_v2" in again.mlir_module()
