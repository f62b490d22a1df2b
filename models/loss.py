"""The loss of a language model."""

import jax
import jax.numpy as jnp


def summed_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns the float32 sum of the tokens' cross-entropies, without those of targets below 0.

    Args:
      logits_BTV: float32 [microbatch, sequence, vocabulary].
      targets_BT: int32 [microbatch, sequence].
    """
    # Comparing with every token instead of gathering avoids a scatter in the gradient.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logit_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, -1) - target_logit_BT
    return jnp.where(targets_BT >= 0, loss_BT, 0).sum()
