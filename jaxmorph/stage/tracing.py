"""A stage's functions with the shapes of all that flows through them; nothing is compiled."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StageFunctions, StashPolicy, split_stage
from jaxmorph.stage.stash import StashMemory, total_bytes


@dataclass(frozen=True, eq=False)
class TracedStage:
    """What a stage computes, and on what; every shape is a `jax.ShapeDtypeStruct`.

    Attributes:
      functions: its F, B, W and BW.
      weights: what stands in for them during a step.
      prepared: those of the weights that aren't parameters themselves.
      batch: what F reads of a microbatch: (tokens or activations, targets on the last stage).
      stash: what F leaves for B.
      weight_stash: what B leaves for W, with the arrays of the stash that W needs too.
    """

    functions: StageFunctions
    params: Params
    weights: Any
    prepared: Any
    batch: Any
    stash: Any
    gradient: Any
    weight_stash: Any
    sums: Params

    @property
    def memory(self) -> StashMemory:
        """What one microbatch holds."""
        return StashMemory(total_bytes(self.stash), total_bytes(self.weight_stash))


def trace_stage(
    model: PipelineModel,
    *,
    num_layers: int,
    is_first: bool,
    is_last: bool,
    microbatch_size: int,
    sequence_length: int,
    stash: StashPolicy = "full",
) -> TracedStage:
    """Returns one stage's functions and shapes.

    Args:
      num_layers: how many of the model's layers the stage has.
      is_last: whether the stage has the head.
      stash: "full" keeps what the backward needs; "recompute" keeps each layer's input alone, and
        B computes the layer again.

    Raises:
      Exception: whatever the model raises when it is traced.
    """
    key = jax.eval_shape(jax.random.key, 0)
    init = partial(init_stage_params, model, layers=range(num_layers), is_first=is_first)
    params = jax.eval_shape(partial(init, is_last=is_last), key)
    tokens = jax.ShapeDtypeStruct((microbatch_size, sequence_length), jnp.int32)
    activations = jax.eval_shape(model.embed, jax.eval_shape(model.init_embed, key), tokens)
    functions = split_stage(model, params, tokens, activations, stash)
    return _with_shapes(functions, params, tokens, activations)


def _with_shapes(
    functions: StageFunctions, params: Params, tokens: Any, activations: Any
) -> TracedStage:
    prepared = jax.eval_shape(functions.prepare, params)
    pool = (*jax.tree.leaves(params), *prepared)
    weights = tuple(pool[source] for source in functions.weight_sources(params))
    batch = (tokens if functions.embed else activations, *((tokens,) if functions.head else ()))
    gradient, stash = jax.eval_shape(functions.forward, weights, *batch)
    _, new = jax.eval_shape(functions.backward_input, weights, stash, gradient)
    weight_stash = (*(stash[i] for i in functions.passed_on), *new)
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    return TracedStage(
        functions, params, weights, prepared, batch, stash, gradient, weight_stash, sums
    )
