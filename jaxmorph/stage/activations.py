"""Activations of several arrays, which programs carry and ranks send as one.

A model's `embed` may return a tuple or a dictionary of arrays, which its layers take and return and
its head takes. Programs, routes, slots and checks of payloads know one array of one type, so the
tree is packed into [microbatch, elements] where one of these functions returns it, and unpacked
where one takes it.

Floats are packed in the type to which all of them convert without loss. An integer or a bool is
packed as the digits of its bits, small whole numbers that such a float holds exactly: as numbers
they would be rounded, and as raw bits they could be a NaN, which a device may change. They have no
gradient. `model_checks` refuses what can't be packed.

Steps may have a few lengths. All messages have the longest's shape, so routes, slots and plans
don't depend on the length: activations of shorter steps are padded with zeros. If a stage has
several devices, each sends a different part (`Boundary`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxmorph.errors import UserError
from jaxmorph.stage.mesh import TENSOR
from jaxmorph.stage.model import (
    MicrobatchShapes,
    PipelineModel,
    aux_weights_of,
    without_randomness,
)
from jaxmorph.stage.sharding import part_shape, split_along, whole_shape, with_tensor_axis

_BITS_OF_A_DIGIT = {7: 8, 10: 8, 23: 16, 52: 16}
"""By a float's bits of mantissa, which must hold a digit."""


def with_one_activation(
    model: PipelineModel, inputs: Any
) -> tuple[PipelineModel, jax.ShapeDtypeStruct]:
    """Returns the model with activations of one array, and that array's shape.

    A model whose activations are one array is returned as it is.

    Args:
      inputs: what `embed` takes of one microbatch, as shapes.
    """
    params = jax.eval_shape(model.init_embed, jax.eval_shape(jax.random.key, 0))
    activations = jax.eval_shape(without_randomness(model.embed), params, inputs)
    if isinstance(activations, jax.ShapeDtypeStruct):
        return model, activations
    layout = _Layout.of(activations)
    packing: Any = _Packing(model, layout)
    return packing, jax.eval_shape(layout.pack, activations)


@dataclass(frozen=True)
class Boundary:
    """The activations of steps of one length, as stages compute them and as they are sent.

    Attributes:
      computed: what one device computes (shape of its array).
      sent: the whole message, of all devices of a stage.
      num_devices: of a stage.
      computed_axis: along which `computed` is a device's part; None: every device computes the same
        whole.
      sent_axis: along which the message is divided among devices; None: each sends all of it.
    """

    computed: jax.ShapeDtypeStruct
    sent: jax.ShapeDtypeStruct
    num_devices: int = 1
    computed_axis: int | None = None
    sent_axis: int | None = None

    @property
    def spec(self) -> PartitionSpec:
        """How the sent array is split over a stage's devices."""
        return split_along(self.sent_axis)

    @property
    def sent_part(self) -> jax.ShapeDtypeStruct:
        """What one device sends."""
        shape = part_shape(self.sent.shape, self.spec, self.num_devices)
        return jax.ShapeDtypeStruct(shape, self.sent.dtype)

    def to_send(self, array: jax.Array) -> jax.Array:
        """Returns what this device sends of activations, or of their gradient."""
        padded = (self.sent if self.computed_axis is None else self.sent_part).shape
        if array.shape != padded:
            sizes = zip(array.shape, padded, strict=True)
            padding = [(0, sent - computed, 0) for computed, sent in sizes]
            array = lax.pad(array, jnp.zeros((), array.dtype), padding)
        if self.sent_axis is None or self.computed_axis is not None:
            return array
        size = self.sent_part.shape[self.sent_axis]
        start = lax.axis_index(TENSOR) * size
        return lax.dynamic_slice_in_dim(array, start, size, self.sent_axis)

    def received(self, array: jax.Array) -> jax.Array:
        """Returns what `to_send` was given, from what all devices sent."""
        if self.sent_axis is not None and self.computed_axis is None:
            array = lax.all_gather(array, TENSOR, axis=self.sent_axis, tiled=True)
        start = (0,) * array.ndim
        is_padded = array.shape != self.computed.shape
        return lax.slice(array, start, self.computed.shape) if is_padded else array


def boundary_of(
    model: PipelineModel, shapes: MicrobatchShapes, length_index: int = 0, num_devices: int = 1
) -> Boundary:
    """Returns the activations between stages of so many devices.

    Raises:
      UserError: as `sent_activations`; or what a device computes is not a part of the whole.
    """
    sent, inputs = sent_activations(model, shapes), shapes.lengths[length_index].inputs
    alone = with_one_activation(model, inputs)[1]
    if num_devices == 1:
        return Boundary(alone, sent)
    whole = alone.shape
    computed = with_tensor_axis(num_devices, lambda: with_one_activation(model, inputs)[1])
    if computed.shape == whole:
        # The first axis that can be split: then a device's part is one piece of memory.
        axes = enumerate(sent.shape)
        axis = next((axis for axis, size in axes if size % num_devices == 0), None)
        return Boundary(computed, sent, num_devices, None, axis)
    pairs = enumerate(zip(whole, computed.shape, strict=False))
    axes = [axis for axis, (size, part) in pairs if size != part]
    spec = split_along(axes[0] if len(axes) == 1 else None)
    fits = len(axes) == 1 and sent.shape[axes[0]] % num_devices == 0
    if not fits or whole_shape(computed.shape, spec, num_devices) != whole:
        raise UserError(
            f"embed: got activations {computed.dtype}{list(computed.shape)} on each of "
            f"{num_devices} devices, expected {list(whole)}, or a part of that along one axis"
        )
    return Boundary(computed, sent, num_devices, axes[0], axes[0])


def sent_activations(model: PipelineModel, shapes: MicrobatchShapes) -> jax.ShapeDtypeStruct:
    """Returns what stages send one another, whatever a step's length.

    Raises:
      UserError: the activations can't be packed, or a shorter step's don't fit in the longest's.
    """
    sent, *shorter = (with_one_activation(model, each.inputs)[1] for each in shapes.lengths)
    for each in shorter:
        same = (each.dtype, len(each.shape)) == (sent.dtype, len(sent.shape))
        if not same or any(a > b for a, b in zip(each.shape, sent.shape, strict=True)):
            raise UserError(
                f"embed: got activations {each.dtype}{list(each.shape)} of a shorter step, "
                f"expected {sent.dtype}{list(sent.shape)}, the longest's, or fewer along some axes"
            )
    return sent


class _Packing:
    """A model's embedding, layers and head with packed activations; the rest is the model's own."""

    def __init__(self, model: PipelineModel, layout: "_Layout"):
        has_aux = bool(aux_weights_of(model))
        self._model = model

        @wraps(model.embed)  # so its signature still says what it takes by name
        def embed(params: Any, inputs: Any, **named: Any) -> jax.Array:
            return layout.pack(model.embed(params, inputs, **named))

        @wraps(model.layer)
        def layer(params: Any, x: jax.Array, **named: Any) -> Any:
            result: Any = model.layer(params, layout.unpack(x), **named)
            return (layout.pack(result[0]), *result[1:]) if has_aux else layout.pack(result)

        @wraps(model.head)
        def head(params: Any, x: jax.Array, targets: Any, **named: Any) -> jax.Array:
            return model.head(params, layout.unpack(x), targets, **named)

        self.embed: Callable[..., Any] = embed
        self.layer: Callable[..., Any] = layer
        self.head: Callable[..., Any] = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where the leaves of a tree lie in a row of the packed array.

    Attributes:
      leaves: the type and the shape of each leaf without its first axis, the microbatch.
      dtype: of the packed array.
    """

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    dtype: Any

    @staticmethod
    def of(activations: Any) -> "_Layout":
        leaves, structure = jax.tree.flatten(activations)
        floats = [_wide(leaf.dtype) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        if not floats:
            got = ", ".join(str(leaf.dtype) for leaf in leaves) or "no arrays"
            raise UserError(
                f"embed: got activations of {got}, expected floats among them: gradients reach the "
                "embedding by those"
            )
        rows = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves)
        return _Layout(structure, rows, reduce(jnp.promote_types, floats))

    def pack(self, activations: Any) -> jax.Array:
        """Returns the array [microbatch, elements] of a tree of this layout."""
        leaves = jax.tree.leaves(activations)
        flat = [self._floats(leaf).reshape(leaf.shape[0], -1) for leaf in leaves if leaf.size]
        return jnp.concatenate(flat, axis=1)

    def unpack(self, packed: jax.Array) -> Any:
        """Returns the tree that `pack` was given."""
        sizes = [math.prod(self._float_shape(row)) for row in self.leaves]
        parts = jnp.split(packed, np.cumsum(sizes)[:-1], axis=1)
        leaves = [self._leaf(*pair) for pair in zip(parts, self.leaves, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def _floats(self, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
            leaf = lax.bitcast_convert_type(leaf, self._digit(leaf.dtype))
        return leaf.astype(self.dtype)

    def _leaf(self, part: jax.Array, row: jax.ShapeDtypeStruct) -> jax.Array:
        part = part.reshape(part.shape[0], *self._float_shape(row))
        if jnp.issubdtype(row.dtype, jnp.floating):
            return part.astype(row.dtype)
        digits = part.astype(self._digit(row.dtype))
        if row.dtype == jnp.bool_:
            return digits.astype(jnp.bool_)
        return lax.bitcast_convert_type(digits, row.dtype)

    def _float_shape(self, row: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        if jnp.issubdtype(row.dtype, jnp.floating):
            return row.shape
        digits = row.dtype.itemsize // self._digit(row.dtype).itemsize
        return row.shape if digits == 1 else (*row.shape, digits)

    def _digit(self, dtype: Any) -> np.dtype:
        """The type of an integer's digits: bitcasts to it add an axis if there are several."""
        bits = min(_BITS_OF_A_DIGIT[jnp.finfo(self.dtype).nmant], 8 * dtype.itemsize)
        return np.dtype(f"uint{bits}")


def _wide(dtype: Any) -> Any:
    """Types of 8 bits convert without loss to bfloat16, but have no common type of their own."""
    return jnp.bfloat16 if dtype.itemsize == 1 else dtype
