"""Payloads with random contents, on the host and being computed on the device."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.gpu_check.copy_settings import CopySettings

_FINITE = {2: (0x807F, 0x3F80), 4: (0x807FFFFF, 0x3F800000)}
"""Of floats by their bytes: the bits that stay random, and those of an exponent of zero. So they
are what they are after a product with one."""


def random_contents(rng: np.random.Generator, dtype: jnp.dtype, num_bytes: int) -> np.ndarray:
    """Random numbers of a type.

    Args:
        dtype: bfloat16, float32 or an unsigned integer.

    Returns:
        At least one, flat.
    """
    size = dtype.itemsize
    contents = np.frombuffer(rng.bytes(max(num_bytes // size, 1) * size), f"u{size}")
    if jnp.issubdtype(dtype, jnp.floating):
        kept, exponent = _FINITE[size]
        contents = (contents & contents.dtype.type(kept)) | contents.dtype.type(exponent)
    return contents.view(dtype)


class SlowPayloads:
    """Puts payloads on the device, by a computation that goes on for a while."""

    def __init__(self, placement: Sharding, settings: CopySettings) -> None:
        self._placement = placement
        self._one = jax.device_put(np.eye(settings.busy_width, dtype=np.float32), placement)
        products = settings.busy_products

        def turn(one: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, products, lambda _, turned: turned @ one, one)[0, 0]

        self._turn = jax.jit(turn)
        self._times = jax.jit(lambda values, one: values * one.astype(values.dtype))
        self._flip = jax.jit(jnp.bitwise_xor)

    def of(self, contents: np.ndarray) -> Callable[[], jax.Array]:
        """Computes a payload, anew for each call; compiled by now."""
        placed = jax.device_put(contents, self._placement)
        jax.block_until_ready(self._times(placed, self._turn(self._one)))
        return lambda: self._times(placed, self._turn(self._one))

    def flipped(self, placed: jax.Array, word: np.generic) -> Callable[[], jax.Array]:
        """Computes a payload quickly, but not before it is asked for.

        Args:
            word: What each is combined with by exclusive or.
        """
        return partial(self._flip, placed, word)
