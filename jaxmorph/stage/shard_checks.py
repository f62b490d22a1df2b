"""Checks, before the first step, that a model computes the same with split parameters.

A model that forgets a sum over devices would silently train wrongly. So embedding, a layer and the
head run on one example, whole and split, all on one device: `jax.vmap` takes the place of the other
devices. The results and all gradients must agree.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmorph.errors import in_users_code
from jaxmorph.stage.activations import boundary_of
from jaxmorph.stage.equations import trace_flat, walk
from jaxmorph.stage.mesh import TENSOR
from jaxmorph.stage.model import (
    MicrobatchShapes,
    PipelineModel,
    Tree,
    takes_key,
    without_randomness,
)
from jaxmorph.stage.model_calls import ModelCall, is_float, made_up, run_for_check
from jaxmorph.stage.sharding import (
    Specs,
    specs_of_parts,
    split_along,
    split_axes,
)
from jaxmorph.stage.stage_functions import total_bytes

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 30  # of parameters: larger parts are not tried


def check_shards(model: PipelineModel, num_devices: int, shapes: MicrobatchShapes) -> None:
    """Checks a model whose parameters are split over the devices of a stage.

    Raises:
      UserError: the model can't be split so, or computes something else then.
    """
    if num_devices == 1:
        return
    specs = specs_of_parts(model, num_devices)
    along = split_along(boundary_of(model, shapes, num_devices=num_devices).computed_axis)
    for call in _calls(model, shapes):
        several_split = split_axes(along) and len(jax.tree.leaves(call.x)) > 1
        if total_bytes(jax.tree.leaves(call.params)) > _MOST_BYTES or several_split:
            continue
        init = getattr(model, f"init_{call.name}")
        compared = partial(_compared, call, init, specs[call.name], num_devices, along)
        with in_users_code(f"{call.name} with split parameters", call.function):
            try:
                found, tolerance = _tried(compared)
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                # Whole sequences may not fit on one device, and vmap may have no rule for an op.
                if not _CANNOT_CHECK.search(str(error)):
                    raise
                _log.warning("%s with split parameters is not checked: %s", call.name, error)
                continue
        # A jitted function returns a dictionary sorted by name.
        for what, each in sorted(found.items(), key=_plainest_first):
            total = max(size for _, size in each)
            # Each array is compared alone, so that a large correct one hides no small wrong one.
            # Where an array's norm is below 1 % of the largest, its difference is rounding.
            if any(not off <= tolerance * max(size, _FLOOR * total) for off, size in each):
                raise call.wrong(
                    f"got another {what} where its parameters are split over {num_devices} "
                    "devices, expected the same: "
                    f"{_OF_KEYS if what.endswith(_WITH_KEY) else _OF_PRODUCTS} "
                    "(jaxmorph.models.tensor_axis)"
                )


def _plainest_first(found: tuple[str, Any]) -> tuple[bool, bool]:
    """Sorts what was compared without a key before the rest, and results before gradients."""
    return found[0].endswith(_WITH_KEY), "gradient" in found[0]


_CANNOT_CHECK = re.compile("RESOURCE_EXHAUSTED|rule for '.*' not implemented")
_FLOOR = 0.01
_WITH_KEY = " with a key"
_OF_KEYS = (
    "numbers for parts of an array are drawn for the whole of it, alike on all devices, of which "
    "part_along takes a device's own"
)
_OF_PRODUCTS = (
    "a product with split columns begins with to_shards, one with split rows ends with "
    "sum_of_shards"
)
_Off = list[tuple[Any, Any]]
"""How far each array is off, and its size: norms."""


def _tried(compared: Callable[[], dict[str, _Off]]) -> tuple[dict[str, _Off], float]:
    """What a comparison finds, without arrays that aren't finite, and its tolerance."""
    trace, form = trace_flat(compared), jax.eval_shape(compared)
    made: list[Any] = [variable.aval for eqn in walk(trace.equations) for variable in eqn.outvars]
    widths = [each.dtype.itemsize for each in made if hasattr(each, "dtype") and is_float(each)]
    found = jax.tree.unflatten(jax.tree.structure(form), run_for_check(trace))
    finite = {what: [each for each in of if np.isfinite(each[1])] for what, of in found.items()}
    return {what: of for what, of in finite.items() if of}, 3e-2 if min(widths) < 4 else 1e-3


def _calls(model: PipelineModel, shapes: MicrobatchShapes) -> Iterator[ModelCall]:
    """The parts of the model, each with one example of what it takes."""
    one = partial(made_up, np.random.default_rng(0))
    inputs, targets, extras = map(one, (shapes.inputs, shapes.targets, shapes.extras))
    inits, key = (model.init_embed, model.init_layer, model.init_head), jax.random.key(0)
    embed, layer, head = (jax.eval_shape(init, key) for init in inits)
    x = one(jax.eval_shape(without_randomness(model.embed), embed, inputs))
    yield ModelCall("embed", model.embed, embed, (), (inputs,))
    yield ModelCall("layer", model.layer, layer, (x,), (), extras)
    yield ModelCall("head", model.head, head, (x,), (targets,), extras)


def _compared(
    call: ModelCall,
    init: Callable[[jax.Array], Tree],
    specs: Specs,
    num_devices: int,
    along: PartitionSpec,
) -> dict[str, _Off]:
    """How far result and gradients are off with split parameters, without a key and with one.

    Args:
      along: how activations are split over devices.
    """
    leaves, structure = jax.tree.flatten(call.x)
    is_random = takes_key(call.function)

    def run(key: Any, params: Tree, floats: list[jax.Array]) -> list[jax.Array]:
        rest = iter(floats)
        whole = [next(rest) if is_float(leaf) else leaf for leaf in leaves]
        by_name = call.by_name | ({"key": key} if is_random else {})
        result = call.function(params, *structure.unflatten(whole), *call.data, **by_name)
        return [leaf for leaf in jax.tree.leaves(result) if is_float(leaf)]

    def both_ways(key: Any, params: Tree, floats: Tree, gradient: Tree) -> tuple[Tree, ...]:
        result, pullback = jax.vjp(partial(run, key), params, floats)
        return result, *pullback(gradient)

    # Initial values are often alike, and zeros hide what is added once too often.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * _waves(leaf), init(jax.random.key(0)))
    floats = [jnp.asarray(leaf) for leaf in leaves if is_float(leaf)]
    gradient = jax.tree.map(_waves, jax.eval_shape(partial(run, None), params, floats))
    of_floats = [along for _ in floats]
    # Activations are split, and what has no axes, such as a loss, is alike on all devices.
    of_results = [along if each.ndim > 0 else PartitionSpec() for each in gradient]
    arguments = [(params, specs), (floats, of_floats), (gradient, of_results)]
    parts = [jax.tree.map(partial(_parts, num_devices), *each) for each in arguments]
    axes = [jax.tree.map(_mapped_axis, each) for _, each in arguments]
    on_devices = partial(jax.vmap, axis_name=TENSOR, axis_size=num_devices)
    found: dict[str, _Off] = {}
    for key, note in ((None, ""), (jax.random.key(0), _WITH_KEY))[: 1 + is_random]:
        given = partial(both_ways, key)
        split = on_devices(given, tuple(axes))(*parts)
        joined = map(partial(jax.tree.map, _joined), split, (of_results, specs, of_floats))
        whole = given(params, floats, gradient)
        names = "result", "gradient of its parameters", "gradient of x"
        of_names = zip(names, joined, whole, strict=True)
        found |= {f"{name}{note}": _off(*each) for name, *each in of_names}
    return found


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


def _off(found: Tree, expected: Tree) -> _Off:
    """How far arrays [devices or 1, ...] are off, and how large they are expected."""

    def norms(got: jax.Array, due: jax.Array) -> tuple[jax.Array, jax.Array]:
        got, due = got.astype(jnp.float32), due.astype(jnp.float32)
        due = jnp.broadcast_to(due, got.shape)
        return jnp.linalg.norm((got - due).ravel()), jnp.linalg.norm(due.ravel())

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return [norms(*pair) for pair in pairs]
