"""A model's own prediction of each next token, from the parameters of the whole model."""

from collections.abc import Iterable
from typing import Protocol, TypeGuard

import jax
import numpy as np
from jax import lax

from jaxmorph.errors import UserError
from jaxmorph.stage.model import Params, PipelineModel


class GivesLogits(PipelineModel, Protocol):
    """A model that text can be sampled from."""

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32 [microbatch, sequence, vocabulary], whose losses `head` sums."""
        ...


def with_logits(model: PipelineModel) -> GivesLogits:
    """Returns the model itself, which text can be sampled from.

    Raises:
      UserError: it gives no logits; in one line.
    """
    if not _gives_logits(model):
        raise UserError(
            f"the model {type(model).__name__} has no logits(params, x), expected one that has: "
            "its head's scores of each next token, to sample from"
        )
    return model


def join_stages(stages: Iterable[tuple[range, Params]]) -> Params:
    """Returns the parameters of a whole model as one stage's, as numpy arrays.

    Args:
      stages: every stage's layers and parameters, those of chunks one by one, in any order.
    """
    ordered = [params for _, params in sorted(stages, key=lambda stage: stage[0].start)]
    layers = [params["layers"] for params in ordered]
    return {
        "embed": ordered[0]["embed"],
        "layers": jax.tree.map(lambda *leaves: np.concatenate(leaves), *layers),
        "head": ordered[-1]["head"],
    }


def model_logits(model: GivesLogits, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns a whole model's logits, float32 [microbatch, sequence, vocabulary].

    Args:
      params: of all of it, as `join_stages` returns them.
      tokens: int32 [microbatch, sequence].
    """
    x = model.embed(params["embed"], tokens)
    x, _ = lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
    return model.logits(params["head"], x)


def _gives_logits(model: PipelineModel) -> TypeGuard[GivesLogits]:
    return hasattr(model, "logits")
