"""Both kernels lower to CUDA without a GPU, and can be exported and read back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxmorph.pallas_kernels.control import new_arrivals
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
MOST_BYTES = 64 << 20


def _programs(shape, dtype, tuning):
    """Both kernels as programs, each with its operands' shapes."""

    def send(payload, control, arrivals):
        return copy_to_host(payload, control, arrivals, slot_bytes=MOST_BYTES, tuning=tuning)

    def receive(control):
        return copy_from_host(
            control, shape=shape, dtype=dtype, slot_bytes=MOST_BYTES, tuning=tuning
        )

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


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"control": jnp.zeros(5, jnp.int32)}, TypeError, "got control of int32, expected uint32"),
        ({"control": jnp.zeros(7, jnp.uint32)}, ValueError, r"control of shape \(7,\), .* \(5,\)"),
        ({"arrivals": np.zeros(2, np.uint32)}, ValueError, r"arrivals of shape \(2,\), .* \(1,\)"),
        ({"payload": jnp.zeros(0)}, ValueError, r"got 0 bytes \(float32\[0\]\), expected 1 to 64"),
        ({"payload": jnp.zeros((1, 17))}, ValueError, r"got 68 bytes \(float32\[1, 17\]\), .* 64"),
        ({"payload": jnp.zeros(4, jnp.int4)}, TypeError, "got elements of int4, expected"),
        ({"payload": jnp.zeros(4, jnp.bool_)}, TypeError, "got elements of bool, expected"),
        ({"payload": jnp.zeros(4, jnp.complex64)}, TypeError, "got elements of complex64, exp"),
        ({"payload": jax.random.key(0)}, TypeError, "got elements of key"),
    ],
)
def test_wrong_operands_are_refused(wrong, error, message):
    good = {
        "payload": jnp.zeros(4), "control": jnp.zeros(5, jnp.uint32), "arrivals": new_arrivals(),
    }  # fmt: skip
    with pytest.raises(error, match=f"^copy_to_host: .*{message}"):
        copy_to_host(**{**good, **wrong}, slot_bytes=64)


@pytest.mark.one_jax
def test_a_receive_longer_than_its_slot_is_refused():
    with pytest.raises(ValueError, match=r"^copy_from_host: got 20 bytes \(float32\[5\]\), .* 16"):
        copy_from_host(jnp.zeros(5, jnp.uint32), shape=(5,), dtype=jnp.float32, slot_bytes=16)
