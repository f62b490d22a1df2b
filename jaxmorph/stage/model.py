"""What a model must and may provide to be pipelined, and how its layers are cut into stages."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmorph.errors import UserError

Params = dict[str, Any]
"""A pytree of dictionaries of float32 arrays."""

Path = tuple[str, ...]


class PipelineModel(Protocol):
    """An embedding, layers of one structure, and a head, as pure functions of their parameters.

    A model knows nothing of stages or schedules, and need not import this class.
    """

    @property
    def num_layers(self) -> int:
        """How many times `layer` is applied."""
        ...

    @property
    def tied(self) -> tuple[tuple[Path, Path], ...]:
        """Pairs (path in the embedding's parameters, path in the head's) of tied parameters.

        Both stages hold a copy, and both copies get the sum of the two gradients.
        """
        ...

    def init_embed(self, key: jax.Array) -> Params:
        """Returns the embedding's parameters."""
        ...

    def init_layer(self, key: jax.Array) -> Params:
        """Returns one layer's parameters."""
        ...

    def init_head(self, key: jax.Array) -> Params:
        """Returns the head's parameters."""
        ...

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Returns activations [microbatch, sequence, width] of int32 [microbatch, sequence]."""
        ...

    def layer(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns activations of the same shape and dtype."""
        ...

    def head(self, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the float32 sum of the tokens' losses, without those of targets below 0."""
        ...


def cut_layers(
    num_layers: int,
    num_stages: int,
    layers: Literal["auto", "even"] | Sequence[int] = "even",
    num_chunks: int = 1,
) -> tuple[range, ...]:
    """Returns the layers of each virtual stage, in the order of the pipeline.

    Args:
      layers: the number of layers of each virtual stage, or "even". With "even" the middle stages
        get the remainder, because the first stage also embeds and the last also has the head.
        "auto" means "even" here, where no costs are known.
      num_chunks: the number of virtual stages of each stage. Chunk c of stage s is virtual stage
        c * num_stages + s. The planner takes chunks to be equally long, so with several of them
        "even" allows no remainder.

    Raises:
      UserError: more stages than layers, counts that do not add up, or a remainder with chunks.
    """
    num_parts = num_stages * num_chunks
    if num_chunks == 1 and not 1 <= num_stages <= num_layers:
        raise UserError(
            f"parallelism.stages: got {num_stages}, expected between 1 and the model's "
            f"{num_layers} layers"
        )
    if num_chunks > 1:
        _check_chunks(num_layers, num_stages, num_chunks, layers)
    counts = _even_counts(num_layers, num_parts) if isinstance(layers, str) else list(layers)
    if len(counts) != num_parts or min(counts) < 1 or sum(counts) != num_layers:
        part = "stage" if num_chunks == 1 else "virtual stage"
        raise UserError(
            f"parallelism.layers: got {counts}, expected {num_parts} positive counts (one per "
            f"{part}) that sum to the model's {num_layers} layers"
        )
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


def _check_chunks(
    num_layers: int, num_stages: int, num_chunks: int, layers: str | Sequence[int]
) -> None:
    num_parts = num_stages * num_chunks
    got = f"got {num_chunks} chunks on each of {num_stages} stages"
    if num_parts > num_layers:
        raise UserError(
            f"parallelism.chunks: {got}, expected at most as many virtual stages in all as the "
            f"model's {num_layers} layers"
        )
    if isinstance(layers, str) and num_layers % num_parts:
        raise UserError(
            f"parallelism.chunks: {got}, expected the model's {num_layers} layers to be a multiple "
            f"of {num_parts}, or a list in parallelism.layers"
        )


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    share, left_over = divmod(num_layers, num_stages)
    first = (num_stages - left_over) // 2
    return [share + (first <= stage < first + left_over) for stage in range(num_stages)]


class ChoosesByDevice(PipelineModel, Protocol):
    """A model that picks an implementation, such as cuDNN's attention, by the device."""

    def on_device(self, microbatch_size: int, sequence_length: int) -> str:
        """Describes in a few words what the model uses on the default device; may be empty.

        Raises:
          ValueError: the configuration names what the device doesn't have; one line.
        """
        ...


def device_choices(model: PipelineModel, microbatch_size: int, sequence_length: int) -> str:
    """Describes what a model uses on the default device; empty if it has no `on_device`.

    Raises:
      UserError: the configuration names what the device doesn't have.
    """
    if not _chooses(model):
        return ""
    try:
        return model.on_device(microbatch_size, sequence_length)
    except ValueError as error:
        raise UserError(f"model.{error}") from error


def _chooses(model: PipelineModel) -> TypeGuard[ChoosesByDevice]:
    return hasattr(model, "on_device")


class GivesLogits(PipelineModel, Protocol):
    """A model that text can be sampled from."""

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32 [microbatch, sequence, vocabulary], whose losses `head` sums."""
        ...


def with_logits(model: PipelineModel) -> GivesLogits:
    """Returns the model itself, checked to have `logits`, which sampling needs.

    Raises:
      UserError: it has none.
    """
    if not _gives_logits(model):
        raise UserError(
            f"the model {type(model).__name__} has no logits(params, x), expected one that has: "
            "its head's scores of each next token, to sample from"
        )
    return model


def _gives_logits(model: PipelineModel) -> TypeGuard[GivesLogits]:
    return hasattr(model, "logits")


def join_stages(stages: Iterable[tuple[range, Params]]) -> Params:
    """Joins the stages' parameters into those of the whole model, as numpy arrays.

    Args:
      stages: each virtual stage's layers and parameters, in any order.
    """
    ordered = [params for _, params in sorted(stages, key=lambda stage: stage[0].start)]
    layers = [params["layers"] for params in ordered]
    return {
        "embed": ordered[0]["embed"],
        "layers": jax.tree.map(lambda *leaves: np.concatenate(leaves), *layers),
        "head": ordered[-1]["head"],
    }


def vocabulary_of(model: PipelineModel, sequence_length: int) -> int | None:
    """Returns how many logits a model has for a token; None if it doesn't say."""
    if not _gives_logits(model):
        return None

    def logits() -> jax.Array:
        key = jax.random.key(0)
        x = model.embed(model.init_embed(key), jnp.zeros((1, sequence_length), jnp.int32))
        return model.logits(model.init_head(key), x)

    try:
        return jax.eval_shape(logits).shape[-1]
    except Exception:  # of the user's function, which training never calls
        return None


def model_logits(model: GivesLogits, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns a whole model's logits, float32 [microbatch, sequence, vocabulary].

    Args:
      params: as `join_stages` returns them.
      tokens: int32 [microbatch, sequence].
    """
    x = model.embed(params["embed"], tokens)
    x, _ = lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
    return model.logits(params["head"], x)
