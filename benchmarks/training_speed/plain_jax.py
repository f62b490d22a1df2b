"""A plain training loop: the model as one Flax NNX module, one jitted step, Optax; no jaxmorph.

Each step is one program: gradients are accumulated over the microbatches by a scan, and parameters
and optimizer state are donated. Only the initial parameters come from jaxmorph, so that all
contenders start alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.training_speed.workload import VOCAB_SIZE, Workload
from jaxmorph.models.gpt2.config import GPT2Config
from jaxmorph.models.gpt2.model import GPT2, Block, Embedding, LayerNorm
from jaxmorph.models.layers import OutputHead
from jaxmorph.stage.parameters import init_stage_params


def gpt2_config(workload: Workload) -> GPT2Config:
    """The model's sizes."""
    return GPT2Config(
        vocab_size=VOCAB_SIZE,
        sequence_length=workload.sequence_length,
        width=workload.width,
        num_layers=workload.num_layers,
        num_heads=workload.num_heads,
        tied=False,
    )


class WholeGPT2(nnx.Module):
    """Embedding, blocks and head, one after the other."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.embed = Embedding(config, rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.head = OutputHead(LayerNorm, config, rngs)

    def __call__(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the sum of the tokens' losses."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


def initial_params(workload: Workload) -> dict[str, Any]:
    """The parameters that every contender starts from; those of layers are stacked."""
    model, layers = GPT2(gpt2_config(workload)), range(workload.num_layers)
    return init_stage_params(model, jax.random.key(0), layers, is_first=True, is_last=True)


def initial_module(workload: Workload) -> WholeGPT2:
    """The module with these parameters."""
    params, module = initial_params(workload), WholeGPT2(gpt2_config(workload), nnx.Rngs(0))
    nnx.update(module.embed, params["embed"])
    nnx.update(module.head, params["head"])
    for number, block in enumerate(module.blocks):
        nnx.update(block, jax.tree.map(lambda leaf, at=number: leaf[at], params["layers"]))
    return module


def _all_matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def adamw(
    workload: Workload, is_matrix: Callable[[Any], Any] = _all_matrices
) -> optax.GradientTransformation:
    """AdamW with decay of matrices alone."""
    return optax.adamw(
        workload.learning_rate,
        b1=workload.beta1,
        b2=workload.beta2,
        eps=workload.epsilon,
        weight_decay=workload.weight_decay,
        mask=is_matrix,
    )


class PlainLoop:
    """The loop."""

    def __init__(self, workload: Workload) -> None:
        graph, self._params = nnx.split(initial_module(workload), nnx.Param)
        optimizer = optax.chain(optax.clip_by_global_norm(workload.clip_norm), adamw(workload))
        self._state = jax.jit(optimizer.init)(self._params)

        def mean_loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
            return nnx.merge(graph, params)(tokens, targets) / workload.tokens_per_step

        def gradients(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
            def add(sums: Any, batch: Any) -> tuple[Any, None]:
                found = jax.value_and_grad(mean_loss)(params, *batch)
                return jax.tree.map(jnp.add, sums, found), None

            nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            return jax.lax.scan(add, nothing, (tokens, targets))[0]

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
            loss, grads = gradients(params, tokens, targets)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        shape = (workload.microbatches, workload.microbatch_size, workload.sequence_length)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        self._step = step.lower(self._params, self._state, tokens, tokens).compile()

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> jax.Array:
        """Train on a batch; the loss."""
        self._params, self._state, loss = self._step(self._params, self._state, tokens, targets)
        return loss

    def finish(self, losses: list[jax.Array]) -> list[float]:
        """Wait for the parameters; the losses."""
        jax.block_until_ready(self._params)
        return [float(loss) for loss in losses]

    def close(self) -> None:
        """Nothing was started."""
