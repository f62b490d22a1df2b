"""What a language model's head ends with."""

import jax
import jax.numpy as jnp


def summed_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns the sum of the tokens' cross-entropies; targets below 0 are left out.

    Args:
      logits_BTV: float32 [microbatch, sequence, vocabulary].
      targets_BT: int32 [microbatch, sequence].

    Returns:
      A float32 scalar.
    """
    # A comparison with every token, not a gather: its gradient is then no scatter.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logit_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, -1) - target_logit_BT
    return jnp.where(targets_BT >= 0, loss_BT, 0).sum()
