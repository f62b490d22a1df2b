"""One stage's F, B, W and BW as functions of flat tuples: embedding, a scan over layers, head.

Each function holds one layer's equations once, whatever the number of layers, so compile time does
not grow with depth. `trace_stage` finds the shapes of all arguments and results without compiling.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxmorph.stage.backward import SplitBackward, split_backward
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import init_stage_params

Arrays = tuple[jax.Array, ...]
StashPolicy = Literal["full", "recompute"]


@dataclass(frozen=True, eq=False)
class StageFunctions:
    """The split parts of one stage, and the ops that they make up.

    A flat tuple holds the embedding's arrays (first stage only), then the layers' stacked ones,
    then the head's (last stage only).
    """

    embed: SplitBackward | None
    layer: SplitBackward
    head: SplitBackward | None
    num_layers: int

    @property
    def pieces(self) -> dict[str, SplitBackward]:
        """The stage's parts by the names of their parameters, in the order of flat tuples."""
        pieces = {"embed": self.embed, "layers": self.layer, "head": self.head}
        return {name: piece for name, piece in pieces.items() if piece is not None}

    @property
    def temporary_bytes(self) -> int:
        """An estimate of the most bytes that an op takes beside what it is given."""
        pieces = self.pieces.values()
        parts = [part for each in pieces for part in (each.forward, each.backward)]
        return max(part.temporary_bytes() for part in parts)

    @property
    def passed_on(self) -> tuple[int, ...]:
        """Positions in the stash of the arrays that W needs too."""
        starts = _starts([piece.num_stash for piece in self.pieces.values()])
        pairs = zip(starts, self.pieces.values(), strict=True)
        return tuple(start + i for start, piece in pairs for i in piece.passed_on)

    def prepare(self, params: Params) -> Arrays:
        """Computes what depends on the parameters alone, once a step: (*prepared of each piece)."""
        prepared = []
        for name, piece in self.pieces.items():
            prepare = jax.vmap(piece.prepare) if name == "layers" else piece.prepare
            prepared += prepare(*jax.tree.leaves(params[name]))
        return tuple(prepared)

    def weight_sources(self, params: Params) -> tuple[int, ...]:
        """Returns the position of each weight in (*leaves of params, *prepared)."""
        names = sorted(params)
        sizes = [len(jax.tree.leaves(params[name])) for name in names]
        leaf_start = dict(zip(names, _starts(sizes), strict=True))
        prepared_start, sources = sum(sizes), []
        for name, piece in self.pieces.items():
            num_params = len(piece.prepare.inputs)
            for source in piece.weight_sources:
                prepared = prepared_start + source - num_params
                sources.append(leaf_start[name] + source if source < num_params else prepared)
            prepared_start += len(piece.prepare.outputs)
        return tuple(sources)

    def forward(
        self, weights: Arrays, x: jax.Array, *targets: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        """Returns (activations, or on the last stage the loss sum; stash)."""
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash = head_stash = ()
        if self.embed:
            x, *embed_stash = self.embed.forward(*embed_weights, x)

        def one_layer(x: jax.Array, weights: Arrays) -> tuple[jax.Array, list[jax.Array]]:
            x, *stash = self.layer.forward(*weights, x)
            return x, stash

        x, layer_stash = lax.scan(one_layer, x, layer_weights, length=self.num_layers)
        if self.head:
            x, *head_stash = self.head.forward(*head_weights, x, *targets)
        return x, (*embed_stash, *layer_stash, *head_stash)

    def backward_input(
        self, weights: Arrays, stash: Arrays, gradient: jax.Array
    ) -> tuple[jax.Array | None, Arrays]:
        """Returns (gradient of the stage's input, None on the first stage; B's new arrays)."""
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash, layer_stash, head_stash = self._stash(stash)
        embed_new = head_new = ()
        if self.head:
            gradient, *head_new = self.head.backward_input(*head_weights, *head_stash, gradient)

        def one_layer(gradient: jax.Array, xs: Any) -> tuple[jax.Array, list[jax.Array]]:
            weights, stash = xs
            gradient, *new = self.layer.backward_input(*weights, *stash, gradient)
            return gradient, new

        xs = (layer_weights, layer_stash)
        gradient, layer_new = lax.scan(one_layer, gradient, xs, self.num_layers, reverse=True)
        if self.embed:
            embed_new = self.embed.backward_input(*embed_weights, *embed_stash, gradient)
        return None if self.embed else gradient, (*embed_new, *layer_new, *head_new)

    def backward_weight(
        self, weights: Arrays, weight_stash: Arrays, accumulators: Params
    ) -> Params:
        """Returns the accumulators with one microbatch's gradients added."""
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash, layer_stash, head_stash = self._weight_stash(weight_stash)
        sums = dict(accumulators)
        if self.embed:
            sums["embed"] = _add(
                sums["embed"], self.embed.backward_weight(*embed_weights, *embed_stash)
            )
        if self.head:
            sums["head"] = _add(sums["head"], self.head.backward_weight(*head_weights, *head_stash))

        def one_layer(sums: Params, xs: Any) -> tuple[Params, None]:
            layer, weights, stash = xs
            return _add_at(sums, layer, self.layer.backward_weight(*weights, *stash)), None

        xs = (jnp.arange(self.num_layers), layer_weights, layer_stash)
        sums["layers"], _ = lax.scan(one_layer, sums["layers"], xs)
        return sums

    def backward(
        self, weights: Arrays, stash: Arrays, gradient: jax.Array, accumulators: Params
    ) -> tuple[jax.Array | None, Params]:
        """Returns (gradient of the stage's input, None on the first stage; accumulators)."""
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash, layer_stash, head_stash = self._stash(stash)
        sums = dict(accumulators)
        if self.head:
            gradient, *gradients = self.head.backward(*head_weights, *head_stash, gradient)
            sums["head"] = _add(sums["head"], gradients)

        def one_layer(carry: Any, xs: Any) -> tuple[Any, None]:
            (gradient, sums), (layer, weights, stash) = carry, xs
            gradient, *gradients = self.layer.backward(*weights, *stash, gradient)
            return (gradient, _add_at(sums, layer, gradients)), None

        carry = (gradient, sums["layers"])
        xs = (jnp.arange(self.num_layers), layer_weights, layer_stash)
        (gradient, sums["layers"]), _ = lax.scan(one_layer, carry, xs, reverse=True)
        if self.embed:
            gradients = self.embed.backward(*embed_weights, *embed_stash, gradient)
            sums["embed"] = _add(sums["embed"], gradients)
        return None if self.embed else gradient, sums

    def _weights(self, flat: Arrays) -> Iterator[Arrays]:
        return self._by_piece(flat, lambda piece: piece.num_weights)

    def _stash(self, flat: Arrays) -> Iterator[Arrays]:
        return self._by_piece(flat, lambda piece: piece.num_stash)

    def _weight_stash(self, flat: Arrays) -> Iterator[Arrays]:
        num_passed_on = len(self.passed_on)
        passed_on = self._by_piece(flat[:num_passed_on], lambda piece: len(piece.passed_on))
        new = self._by_piece(flat[num_passed_on:], lambda piece: piece.num_new)
        return (a + b for a, b in zip(passed_on, new, strict=True))

    def _by_piece(self, flat: Arrays, size: Callable[[SplitBackward], int]) -> Iterator[Arrays]:
        """Yields the embedding's, the layers' and the head's arrays; empty for a missing piece."""
        rest = iter(flat)
        for piece in (self.embed, self.layer, self.head):
            yield tuple(islice(rest, size(piece) if piece else 0))


def split_stage(
    model: PipelineModel,
    params: Params,
    tokens: jax.ShapeDtypeStruct,
    activations: jax.ShapeDtypeStruct,
    stash: StashPolicy,
) -> StageFunctions:
    """Splits the stage that has these parameters.

    Args:
      params: the stage's, as shapes.
      tokens: int32 [microbatch, sequence]; targets have the same shape.
      activations: what `model.layer` takes and returns.
      stash: "recompute" applies to layers; embedding and head always keep what they need.
    """
    layer_params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"]
    )
    layer = jax.checkpoint(model.layer) if stash == "recompute" else model.layer
    embed = head = None
    if "embed" in params:
        embed = split_backward(model.embed, params["embed"], tokens)
    if "head" in params:
        head = split_backward(model.head, params["head"], activations, tokens)
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    return StageFunctions(embed, split_backward(layer, layer_params, activations), head, num_layers)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _add(sums: Params, gradients: Sequence[jax.Array]) -> Params:
    leaves, structure = jax.tree.flatten(sums)
    pairs = zip(leaves, gradients, strict=True)
    return jax.tree.unflatten(structure, [total + gradient for total, gradient in pairs])


def _add_at(sums: Params, layer: jax.Array, gradients: Sequence[jax.Array]) -> Params:
    """Adds one layer's gradients to the stacked sums; XLA updates them in place in the scan."""
    leaves, structure = jax.tree.flatten(sums)
    added = []
    for total, gradient in zip(leaves, gradients, strict=True):
        row = lax.dynamic_index_in_dim(total, layer, keepdims=False) + gradient
        added.append(lax.dynamic_update_index_in_dim(total, row, layer, 0))
    return jax.tree.unflatten(structure, added)


@dataclass(frozen=True)
class StashMemory:
    """The bytes that one live microbatch holds on one stage.

    Attributes:
      after_forward_bytes: from F until B.
      after_backward_input_bytes: from B until W, including the arrays of the stash that W needs.
    """

    after_forward_bytes: int
    after_backward_input_bytes: int


def total_bytes(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of all arrays together."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


@dataclass(frozen=True, eq=False)
class TracedStage:
    """A stage's functions, and the shapes (`jax.ShapeDtypeStruct`) of what they take and return.

    Attributes:
      weights: what the ops take in place of `params`.
      prepared: the weights that aren't parameters themselves.
      batch: (tokens or activations; targets, on the last stage).
      stash: from F to B.
      gradient: of the stage's output.
      weight_stash: from B to W, including the arrays of the stash that W needs.
      sums: the gradient accumulators.
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
        """What one microbatch holds on the stage."""
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
    """Traces one stage; the arguments are those of `build_stage`.

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
