"""One stage's F, B, W and BW as functions of flat tuples: embedding, a scan over layers, head.

Each function holds one layer's equations once, whatever the number of layers, so compile time does
not grow with depth. `trace_stage` finds the shapes of all arguments and results without compiling.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from itertools import islice
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxmorph.stage.activations import Boundary, boundary_of, with_one_activation
from jaxmorph.stage.backward import SplitBackward, split_backward
from jaxmorph.stage.model import (
    NUM_KEY_NUMBERS,
    MicrobatchShapes,
    Params,
    PipelineModel,
    Tree,
    aux_weights_of,
    last_activations,
    step_keys,
    takes_extras,
    without_randomness,
)
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.sharding import Specs, part_shapes, partition_specs, with_tensor_axis

Arrays = tuple[jax.Array, ...]
StashPolicy = Literal["full", "recompute"]


@dataclass(frozen=True, eq=False)
class StageFunctions:
    """The split parts of one stage, and the ops that they make up.

    A flat tuple holds the embedding's arrays (first stage only), then the layers' stacked ones,
    then the head's (last stage only).

    Attributes:
      evaluate: what F computes, without randomness and auxiliary losses: (params, *batch,
        all extras) -> output.
      takes_extras: whether a function on the stage names `extras`.
      num_aux: the number of auxiliary losses. F then returns a vector of their sums over the
        stage's layers as well, and B and BW take the gradient of that as a last argument.
    """

    embed: SplitBackward | None
    layer: SplitBackward
    head: SplitBackward | None
    num_layers: int
    boundary: Boundary
    evaluate: Callable[..., jax.Array]
    takes_extras: bool
    num_aux: int = 0

    @property
    def pieces(self) -> dict[str, SplitBackward]:
        """The stage's parts by the names of their parameters, in the order of flat tuples."""
        pieces = {"embed": self.embed, "layers": self.layer, "head": self.head}
        return {name: piece for name, piece in pieces.items() if piece is not None}

    @property
    def reads_keys(self) -> bool:
        """Whether something on the stage is random, so that F takes key numbers."""
        return any(piece.reads_key for piece in self.pieces.values())

    @cached_property
    def extras(self) -> tuple[int, ...]:
        """The extras' leaves that F takes, by number; the stage reads no others to train."""
        return tuple(sorted({at for piece in self.pieces.values() for at in piece.extras}))

    def with_extras(self, extras: Tree) -> Arrays:
        """Returns F's extras: the leaves that it takes."""
        leaves = jax.tree.leaves(extras) if self.extras else []
        return tuple(leaves[at] for at in self.extras)

    @property
    def evaluates_apart(self) -> bool:
        """Whether training has what evaluations lack, such as randomness or auxiliary losses."""
        return self.num_aux > 0 or any(each.differs_without_key for each in self.pieces.values())

    @property
    def temporary_bytes(self) -> int:
        """An estimate of the most bytes that an op takes beside what it is given."""
        pieces = self.pieces.values()
        parts = [part for each in pieces for part in (each.forward, each.backward)]
        return max(part.temporary_bytes() for part in parts)

    @cached_property
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

    def forward(self, weights: Arrays, x: Tree, *more: Any) -> tuple[jax.Array, Arrays, *Arrays]:
        """Returns (activations, or on the last stage the loss sum; stash; auxiliary losses if any).

        Args:
          x: activations; on the first stage inputs.
          *more: targets on the last stage; the leaves of `extras`; key numbers if it `reads_keys`.
        """
        num_targets = 1 if self.head else 0
        targets, (leaves, *key_numbers) = more[:num_targets], more[num_targets:]
        extras = dict(zip(self.extras, leaves, strict=True))
        embed_key, layer_keys, head_key = self._keys(*key_numbers)
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash = head_stash = ()
        if self.embed:
            x, *embed_stash = self.embed.forward(*embed_weights, *jax.tree.leaves(x), *embed_key)
        else:
            x = self.boundary.received(x)
        layer_extras = [extras[at] for at in self.layer.extras]

        def one_layer(x: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
            weights, key = xs
            x, *rest = self.layer.forward(*weights, x, *layer_extras, *key)
            return x, (rest[:num_aux], rest[num_aux + len(self.layer.shared) :])

        num_aux = self.layer.num_outputs - 1
        xs = (layer_weights, layer_keys)
        x, (aux, layer_stash) = lax.scan(one_layer, x, xs, self.num_layers)
        shared = [extras[at] for at in self.layer.shared]
        if self.head:
            arguments = *jax.tree.leaves(targets), *(extras[at] for at in self.head.extras)
            x, *head_stash = self.head.forward(*head_weights, x, *arguments, *head_key)
        else:
            x = self.boundary.to_send(x)
        stash = (*embed_stash, *shared, *layer_stash, *head_stash)
        return x, stash, *(each.sum(0) for each in aux)

    def _keys(self, *key_numbers: jax.Array) -> Iterator[Arrays]:
        """Yields the raw keys of embedding, layers and head; () for one that reads none."""
        keys = step_keys(key_numbers[0], self.num_layers) if key_numbers else ()
        for at, piece in enumerate((self.embed, self.layer, self.head)):
            reads = piece is not None and piece.reads_key
            yield (jax.random.key_data(keys[at]),) if reads else ()

    def backward_input(
        self, weights: Arrays, stash: Arrays, gradient: jax.Array, *aux_gradient: jax.Array
    ) -> tuple[jax.Array | None, Arrays]:
        """Returns (gradient of the stage's input, None on the first stage; B's new arrays)."""
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash, layer_stash, head_stash = self._stash(stash)
        shared, layer_stash = _parted(layer_stash, len(self.layer.shared))
        embed_new = head_new = ()
        if self.head:
            gradient, *head_new = self.head.backward_input(*head_weights, *head_stash, gradient)
        else:
            gradient = self.boundary.received(gradient)

        def one_layer(gradient: jax.Array, xs: Any) -> tuple[jax.Array, list[jax.Array]]:
            weights, stash = xs
            arguments = (*weights, *shared, *stash, gradient, *aux_gradient)
            gradient, *new = self.layer.backward_input(*arguments)
            return gradient, new

        xs = (layer_weights, layer_stash)
        gradient, layer_new = lax.scan(one_layer, gradient, xs, self.num_layers, reverse=True)
        if self.embed:
            embed_new = self.embed.backward_input(*embed_weights, *embed_stash, gradient)
        return self._input_gradient(gradient), (*embed_new, *layer_new, *head_new)

    def _input_gradient(self, gradient: jax.Array) -> jax.Array | None:
        return None if self.embed else self.boundary.to_send(gradient)

    def backward_weight(
        self, weights: Arrays, weight_stashes: Sequence[Arrays], accumulators: Params
    ) -> Params:
        """Returns the accumulators with the gradients of some microbatches added in turn.

        All microbatches' gradients of a layer are added to its sums at once, so that large sums are
        read and written once, not once a microbatch.
        """
        embed_weights, layer_weights, head_weights = self._weights(weights)
        parts = map(self._weight_stash, weight_stashes)
        embed_stashes, layer_stashes, head_stashes = zip(*parts, strict=True)
        num_shared = self.layer.num_shared_in_weight_stash
        shared, stacked = zip(*(_parted(each, num_shared) for each in layer_stashes), strict=True)
        sums = dict(accumulators)
        if self.embed:
            for stash in embed_stashes:
                gradients = self.embed.backward_weight(*embed_weights, *stash)
                sums["embed"] = _add(sums["embed"], gradients)
        if self.head:
            for stash in head_stashes:
                gradients = self.head.backward_weight(*head_weights, *stash)
                sums["head"] = _add(sums["head"], gradients)

        def one_layer(sums: Params, xs: Any) -> tuple[Params, None]:
            layer, weights, stashes = xs
            gradients = [
                self.layer.backward_weight(*weights, *alike, *own)
                for alike, own in zip(shared, stashes, strict=True)
            ]
            return _add_at(sums, layer, *gradients), None

        xs = (jnp.arange(self.num_layers), layer_weights, stacked)
        sums["layers"], _ = lax.scan(one_layer, sums["layers"], xs)
        return sums

    def backward(
        self,
        weights: Arrays,
        stash: Arrays,
        gradient: jax.Array,
        accumulators: Params,
        *aux_gradient: jax.Array,
    ) -> tuple[jax.Array | None, Params]:
        """Returns (gradient of the stage's input, None on the first stage; accumulators)."""
        embed_weights, layer_weights, head_weights = self._weights(weights)
        embed_stash, layer_stash, head_stash = self._stash(stash)
        shared, layer_stash = _parted(layer_stash, len(self.layer.shared))
        sums = dict(accumulators)
        if self.head:
            gradient, *gradients = self.head.backward(*head_weights, *head_stash, gradient)
            sums["head"] = _add(sums["head"], gradients)
        else:
            gradient = self.boundary.received(gradient)

        def one_layer(carry: Any, xs: Any) -> tuple[Any, None]:
            (gradient, sums), (layer, weights, stash) = carry, xs
            arguments = (*weights, *shared, *stash, gradient, *aux_gradient)
            gradient, *gradients = self.layer.backward(*arguments)
            return (gradient, _add_at(sums, layer, gradients)), None

        carry = (gradient, sums["layers"])
        xs = (jnp.arange(self.num_layers), layer_weights, layer_stash)
        (gradient, sums["layers"]), _ = lax.scan(one_layer, carry, xs, reverse=True)
        if self.embed:
            gradients = self.embed.backward(*embed_weights, *embed_stash, gradient)
            sums["embed"] = _add(sums["embed"], gradients)
        return self._input_gradient(gradient), sums

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
    shapes: MicrobatchShapes,
    boundary: Boundary,
    stash: StashPolicy,
) -> StageFunctions:
    """Splits the stage that has these parameters.

    Args:
      params: the stage's, as shapes.
      boundary: of the activations that `model.layer` takes and returns.
      stash: "recompute" applies to layers; embedding and head always keep what they need.
    """
    layer_params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"]
    )
    activations, extras = boundary.computed, shapes.extras
    embed = head = None
    if "embed" in params:
        embed = split_backward(model.embed, params["embed"], data=(shapes.inputs,))
    if "head" in params:
        head = split_backward(
            model.head, params["head"], activations, data=(shapes.targets,), extras=extras
        )
    aux = tuple(aux_weights_of(model))
    function = _with_aux_vector(model.layer, aux) if aux else model.layer
    layer = split_backward(
        function, layer_params, activations, extras=extras, recompute=stash == "recompute"
    )
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    own = (model.layer, model.head) if head else (model.layer,)
    return StageFunctions(
        embed,
        layer,
        head,
        num_layers,
        boundary,
        evaluate=partial(_evaluate, model, boundary),
        takes_extras=any(map(takes_extras, own)),
        num_aux=len(aux),
    )


def _with_aux_vector(layer: Callable, names: Sequence[str]) -> Callable:
    """The layer with its auxiliary losses as one float32 vector, in the order of the names."""

    @wraps(layer)
    def with_aux_vector(params: Params, x: jax.Array, **by_name: Any) -> Any:
        x, aux = layer(params, x, **by_name)
        return x, jnp.stack([jnp.asarray(aux[name], jnp.float32) for name in names])

    return with_aux_vector


def _evaluate(
    model: PipelineModel, boundary: Boundary, params: Params, x: Tree, *targets_and_extras: Tree
) -> jax.Array:
    *targets, extras = targets_and_extras
    x = x if "embed" in params else boundary.received(x)
    x = last_activations(model, params, x, extras)
    if not targets:
        return boundary.to_send(x)
    return without_randomness(model.head, extras)(params["head"], x, *targets)


def _parted(arrays: Arrays, count: int) -> tuple[Arrays, Arrays]:
    """The extras that a stash begins with, shared by all layers; the arrays stacked over layers."""
    return arrays[:count], arrays[count:]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _add(sums: Params, gradients: Sequence[jax.Array]) -> Params:
    leaves, structure = jax.tree.flatten(sums)
    pairs = zip(leaves, gradients, strict=True)
    return jax.tree.unflatten(structure, [total + gradient for total, gradient in pairs])


def _add_at(sums: Params, layer: jax.Array, *gradients: Sequence[jax.Array]) -> Params:
    """Adds one layer's gradients to the stacked sums; XLA updates them in place in the scan."""
    leaves, structure = jax.tree.flatten(sums)
    added = []
    for total, *each in zip(leaves, *gradients, strict=True):
        row = sum(each, lax.dynamic_index_in_dim(total, layer, keepdims=False))
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

    With several devices, shapes are those of one device's parts.

    Attributes:
      specs: how `params` are split over devices.
      weights: what the ops take in place of `params`.
      prepared: the weights that aren't parameters themselves.
      batch: (inputs or activations; targets, on the last stage).
      extras: the tree of all extras; {} where no function on the stage takes any.
      key_numbers: (what a random stage's keys follow from,), else ().
      aux: (auxiliary losses,), and also their gradients; () if the model has none.
      stash: from F to B.
      gradient: of the stage's output.
      weight_stash: from B to W, including the arrays of the stash that W needs.
      sums: the gradient accumulators.
    """

    functions: StageFunctions
    params: Params
    specs: dict[str, Specs]
    weights: Any
    prepared: Any
    batch: Any
    extras: Any
    key_numbers: Any
    aux: Any
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
    shapes: MicrobatchShapes,
    length_index: int = 0,
    stash: StashPolicy = "full",
    num_devices: int = 1,
) -> TracedStage:
    """Traces one stage of `num_devices` devices; other arguments are those of `build_stage`.

    Raises:
      UserError: the model can't be split over so many devices.
      Exception: whatever the model raises when it is traced.
    """
    key = jax.eval_shape(jax.random.key, 0)
    init = partial(init_stage_params, model, layers=range(num_layers), is_first=is_first)
    params = jax.eval_shape(partial(init, is_last=is_last), key)
    specs = partition_specs(model, num_devices)
    specs = {name: specs[name] for name in params}
    params = part_shapes(params, specs, num_devices)
    boundary = boundary_of(model, shapes, length_index, num_devices)
    shapes = shapes.lengths[length_index]

    def trace() -> TracedStage:
        one_activation, _ = with_one_activation(model, shapes.inputs)
        functions = split_stage(one_activation, params, shapes, boundary, stash)
        return _with_shapes(functions, params, specs, shapes)

    return with_tensor_axis(num_devices, trace)


def _with_shapes(
    functions: StageFunctions, params: Params, specs: dict[str, Specs], shapes: MicrobatchShapes
) -> TracedStage:
    prepared = jax.eval_shape(functions.prepare, params)
    pool = (*jax.tree.leaves(params), *prepared)
    weights = tuple(pool[source] for source in functions.weight_sources(params))
    first = shapes.inputs if functions.embed else functions.boundary.sent_part
    batch = (first, *((shapes.targets,) if functions.head else ()))
    extras = shapes.extras if functions.takes_extras else {}
    own_extras = functions.with_extras(extras)
    numbers = jax.ShapeDtypeStruct((NUM_KEY_NUMBERS,), jnp.uint32)
    key_numbers = (numbers,) if functions.reads_keys else ()
    arguments = (weights, *batch, own_extras, *key_numbers)
    gradient, stash, *aux = jax.eval_shape(functions.forward, *arguments)
    _, new = jax.eval_shape(functions.backward_input, weights, stash, gradient, *aux)
    weight_stash = (*(stash[i] for i in functions.passed_on), *new)
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    return TracedStage(
        functions=functions,
        params=params,
        specs=specs,
        weights=weights,
        prepared=prepared,
        batch=batch,
        extras=extras,
        key_numbers=key_numbers,
        aux=tuple(aux),
        stash=stash,
        gradient=gradient,
        weight_stash=weight_stash,
        sums=sums,
    )
