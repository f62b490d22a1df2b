"""Rotary positions: pairs of a head's numbers are turned by angles that grow with the position.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2. A pair is
number i of the head's first half with number i of its second half, as in the published Llamas'
weights for Hugging Face. The scores of queries and keys then depend on their distance alone.
"""

import jax
import jax.numpy as jnp


def rotate(x_BNTK: jax.Array, base: float) -> jax.Array:
    """Returns heads turned by their positions, 0 to T - 1.

    Args:
      x_BNTK: [batch, heads, sequence, head width], of an even width.
      base: pair i of P pairs turns by position / base ** (i / P).

    Returns:
      The same shape and dtype; computed in float32.
    """
    half = x_BNTK.shape[-1] // 2
    inverse_periods_P = 1.0 / base ** (jnp.arange(half, dtype=jnp.float32) / half)
    positions_T = jnp.arange(x_BNTK.shape[-2], dtype=jnp.float32)
    angles_TP = positions_T[:, None] * inverse_periods_P
    cosine_TP, sine_TP = jnp.cos(angles_TP), jnp.sin(angles_TP)
    wide = x_BNTK.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = (first * cosine_TP - second * sine_TP, second * cosine_TP + first * sine_TP)
    return jnp.concatenate(turned, -1).astype(x_BNTK.dtype)
