"""Whether a model computes the same with split parameters, found before the first step.

A forgotten sum over devices would train wrongly in silence. So embedding, a layer and the head run
on one example, whole and split, all on one device: `jax.vmap` takes the place of the others. The
results and all gradients must agree.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmorph.errors import UserError, definition_of, in_users_code
from jaxmorph.stage.activations import boundary_of
from jaxmorph.stage.mesh import TENSOR
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel, Tree, without_randomness
from jaxmorph.stage.model_calls import is_float, made_up
from jaxmorph.stage.sharding import Specs, is_spec, specs_of_parts, split_along, split_axes
from jaxmorph.stage.stage_functions import total_bytes

_MOST_BYTES = 1 << 30  # of parameters: larger parts are not tried
_QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}  # half the time on a CPU


def check_shards(model: PipelineModel, num_devices: int, shapes: MicrobatchShapes) -> None:
    """Checks a model whose parameters are split over the devices of a stage.

    Raises:
      UserError: the model can't be split so, or computes something else then.
    """
    if num_devices == 1:
        return
    specs = specs_of_parts(model, num_devices)
    along = split_along(boundary_of(model, shapes, num_devices=num_devices).computed_axis)
    for name, init, function, inputs in _calls(model, shapes):
        params = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
        if total_bytes(jax.tree.leaves(params)) > _MOST_BYTES:
            continue
        arguments = made_up(np.random.default_rng(0), inputs)
        own = getattr(model, name)
        with in_users_code(f"{name} with split parameters", own):
            compared = partial(_compared, function, init, specs[name], num_devices, along)
            program = jax.jit(compared).lower(*arguments).compile(_QUICKLY)
        widths = [leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments) if is_float(leaf)]
        tolerance = 3e-2 if min(widths, default=4) < 4 else 1e-3
        for what, (off, size) in jax.device_get(program(*arguments)).items():
            if off > tolerance * size:
                raise UserError(
                    f"{definition_of(own) or 'model'}: {name}: got another {what} where its "
                    f"parameters are split over {num_devices} devices, expected the same: a "
                    "product with split columns begins with to_shards, one with split rows ends "
                    "with sum_of_shards (jaxmorph.models.tensor_axis)"
                )


def _calls(
    model: PipelineModel, shapes: MicrobatchShapes
) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Tree, Tree]]]:
    """Yields name, init and function of each part, and (activations, data), as shapes."""

    def embed(params: Tree, _: Tree, inputs: Tree) -> Tree:
        return without_randomness(model.embed)(params, inputs)

    def layer(params: Tree, x: Tree, extras: Tree) -> Tree:
        return without_randomness(model.layer, extras)(params, x)

    def head(params: Tree, x: Tree, data: tuple[Tree, Tree]) -> Tree:
        targets, extras = data
        return without_randomness(model.head, extras)(params, x, targets)

    params = jax.eval_shape(model.init_embed, jax.eval_shape(jax.random.key, 0))
    x = jax.eval_shape(embed, params, (), shapes.inputs)
    yield "embed", model.init_embed, embed, ((), shapes.inputs)
    yield "layer", model.init_layer, layer, (x, shapes.extras)
    yield "head", model.init_head, head, (x, (shapes.targets, shapes.extras))


def _compared(
    function: Callable[..., Any],
    init: Callable[[jax.Array], Tree],
    specs: Specs,
    num_devices: int,
    along: PartitionSpec,
    x: Tree,
    data: Tree,
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """How far result and gradients are off with split parameters, and their size: norms.

    Args:
      along: how devices have parts of activations.
    """
    leaves, structure = jax.tree.flatten(x)

    def run(params: Tree, floats: list[jax.Array]) -> list[jax.Array]:
        rest = iter(floats)
        whole = [next(rest) if is_float(leaf) else leaf for leaf in leaves]
        result = function(params, jax.tree.unflatten(structure, whole), data)
        return [leaf for leaf in jax.tree.leaves(result) if is_float(leaf)]

    def both_ways(params: Tree, floats: Tree, gradient: Tree) -> tuple[Tree, Tree, Tree]:
        result, pullback = jax.vjp(run, params, floats)
        return result, *pullback(gradient)

    # Initial values are often alike, and zeros hide what is added once too often.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * _waves(leaf), init(jax.random.key(0)))
    floats = [leaf for leaf in leaves if is_float(leaf)]
    gradient = jax.tree.map(_waves, jax.eval_shape(run, params, floats))
    whole = both_ways(params, floats, gradient)
    # Activations come first; what follows them, and a loss, is alike on all devices.
    of_floats = [along for _ in floats]
    of_results = [along if each.ndim > 0 else PartitionSpec() for each in gradient]
    arguments = [(params, specs), (floats, of_floats), (gradient, of_results)]
    parts = [jax.tree.map(partial(_parts, num_devices), *each) for each in arguments]
    axes = [jax.tree.map(_mapped_axis, each, is_leaf=is_spec) for _, each in arguments]
    split = jax.vmap(both_ways, tuple(axes), axis_name=TENSOR, axis_size=num_devices)(*parts)
    names = "result", "gradient of its parameters", "gradient of x"
    joined = map(partial(jax.tree.map, _joined), split, (of_results, specs, of_floats))
    return dict(zip(names, map(_off, joined, whole), strict=True))


def _mapped_axis(spec: PartitionSpec) -> int | None:
    return 0 if split_axes(spec) else None


def _waves(leaf: Any) -> jax.Array:
    return jnp.cos(jnp.arange(math.prod(leaf.shape))).reshape(leaf.shape).astype(leaf.dtype)


def _parts(num_devices: int, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The devices' parts of a parameter, [devices, ...]; the whole if it is not split."""
    for axis in split_axes(spec):
        return jnp.stack(jnp.split(leaf, num_devices, axis))
    return leaf


def _joined(parts: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The inverse of `_parts`; an array that isn't split keeps a copy of each device."""
    for axis in split_axes(spec):
        return jnp.concatenate([*parts], axis)[None]
    return parts


def _off(found: Tree, expected: Tree) -> tuple[jax.Array, jax.Array]:
    """The norms of how far arrays [devices or 1, ...] are off, and of what was expected."""
    pairs = [
        (got.astype(jnp.float32), jnp.broadcast_to(due, got.shape).astype(jnp.float32))
        for got, due in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    off = sum((jnp.square(got - due).sum() for got, due in pairs), jnp.float32(0))
    size = sum((jnp.square(due).sum() for _, due in pairs), jnp.float32(0))
    return jnp.sqrt(off), jnp.sqrt(size)
