"""Dropout."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Returns `x` with a share `rate` of its elements zero, and the others larger accordingly.

    Srivastava et al., "Dropout", 2014. Without a key, or at a rate of 0, nothing is dropped.
    """
    if key is None or not rate:
        return x
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(is_kept, x / (1 - rate), 0)


def branch_keys(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns one key for each branch of a block: for its attention, and for its MLP."""
    if key is None:
        return None, None
    attention, mlp = jax.random.split(key)
    return attention, mlp
