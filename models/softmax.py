"""The softmax of causal attention, with a backward that needs its result alone."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def causal_softmax(scores: jax.Array) -> jax.Array:
    """Returns probabilities over the last axis, zero above the diagonal of the last two.

    Computed in float32 and returned in the dtype of the scores. Its backward needs the
    probabilities alone, as they are returned: they are kept for the product with the values anyway.
    """
    masked = jnp.where(_is_past(scores), scores.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(masked, -1).astype(scores.dtype)


def _causal_softmax_forward(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    probabilities = causal_softmax(scores)
    return probabilities, probabilities


def _causal_softmax_backward(probabilities: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide, gradient = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    mean = (wide * gradient).sum(-1, keepdims=True)
    return ((wide * (gradient - mean)).astype(probabilities.dtype),)


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)


def _is_past(scores: jax.Array) -> jax.Array:
    queries, keys = scores.shape[-2:]
    return jnp.arange(queries)[:, None] >= jnp.arange(keys)
