"""The example's model, which fails on the stage with the head, as `fault` says."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CALLS = 30
_EXAMPLE: Any = import_module("causal_mixer")  # of docs/examples


class FailingMixer(_EXAMPLE.CausalMixer):
    """Its head calls Python, which raises after some steps, or makes far too large an array."""

    fault = ""

    def head(self, params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the sum of the tokens' losses, to which the fault adds nothing."""
        losses, calls = super().head(params, x, targets), []

        def count(_: np.ndarray) -> np.ndarray:
            calls.append(1)
            return np.array(0 // (len(calls) <= _CALLS), np.float32)

        now = jax.lax.stop_gradient(losses)
        if self.fault == "python":
            added = jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32), now)
        else:
            added = 0 * jax.lax.sort(now * jnp.arange(1 << 42, dtype=jnp.float32))[0]
        return losses + jax.lax.stop_gradient(added)


def build(*, preset: str, fault: str, vocab_size: int, sequence_length: int, **_: Any) -> Any:
    """Returns the model that fails as asked."""
    sizes = _EXAMPLE.PRESETS[preset]
    model = FailingMixer(vocab_size, sequence_length, **sizes, dtype=jnp.dtype("float32"))
    model.fault = fault
    return model
