"""How a stage's arrays lie on its devices, which are the mesh's axis "tensor".

A model says how its parameters are split (`partition_specs`), and its functions run on each device
with that device's parts. Activations are alike on all devices, or split along one axis.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxmorph.errors import UserError, in_users_code
from jaxmorph.stage.mesh import TENSOR
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import leaf_at

WHOLE = PartitionSpec()
"""An array that is alike on all devices."""

Specs = Any
"""A `PartitionSpec`, or a tree of them: each is for all arrays below it."""

Result = TypeVar("Result")


class SplitsParameters(PipelineModel, Protocol):
    """A model whose parameters can be split over the devices of a stage."""

    def partition_specs(self, num_shards: int, /) -> Mapping[str, Specs]:
        """Returns how the parameters of "embed", of one "layer" and of "head" are split.

        A spec names the axis "tensor" where the parameter is split. The functions then get parts of
        these, and sum over devices by `jaxmorph.models.tensor_axis`.

        Raises:
          ValueError: they can't be split so; one line.
        """
        ...


def partition_specs(model: PipelineModel, num_devices: int) -> dict[str, Specs]:
    """Returns how the parameters of a stage are split: of "embed", "layers", and "head".

    Raises:
      UserError: the model can't be split over so many devices.
    """
    if num_devices == 1:
        return dict.fromkeys(("embed", "layers", "head"), WHOLE)
    specs = specs_of_parts(model, num_devices)
    layers = jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs["layer"])
    return {"embed": specs["embed"], "layers": layers, "head": specs["head"]}


def specs_of_parts(model: PipelineModel, num_devices: int) -> dict[str, Specs]:
    """Returns how the parameters of the model's parts are split: of "embed", "layer" and "head".

    Each is a tree with a spec for each parameter.

    Raises:
      UserError: the model can't be split over so many devices.
    """
    got = f"parallelism.tensor: got {num_devices}"
    if not _splits(model):
        raise UserError(
            f"{got}, but the model {type(model).__name__} has no partition_specs, expected one "
            "that says how its parameters are split, or 1"
        )
    key = jax.eval_shape(jax.random.key, 0)
    inits = {"embed": model.init_embed, "layer": model.init_layer, "head": model.init_head}
    with in_users_code("partition_specs", model.partition_specs):
        try:
            specs = dict(model.partition_specs(num_devices))
        except ValueError as error:
            raise UserError(f"{got}, but model.{error}") from error
    found: dict[str, Specs] = {}
    for name, init in inits.items():
        params = jax.eval_shape(init, key)
        try:
            found[name] = spread(specs.get(name), params)
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{got}, but the model's partition_specs of {name!r} are {specs.get(name)}, "
                f"expected a PartitionSpec, or a tree of them like its parameters: {error}"
            ) from error
        _check_specs(name, params, found[name], num_devices)
    if not any(split_axes(spec) for spec in jax.tree.leaves(found)):
        raise UserError(
            f"{got}, but partition_specs of the model {type(model).__name__} splits no parameter, "
            "expected some that are split, or 1"
        )
    for embed_path, head_path in model.tied:
        ends = leaf_at(found["embed"], embed_path), leaf_at(found["head"], head_path)
        if ends[0] != ends[1]:
            paths = "/".join(embed_path), "/".join(head_path)
            raise UserError(
                f"{got}, but embed/{paths[0]} is split as {tuple(ends[0])} and head/{paths[1]}, "
                f"which is tied to it, as {tuple(ends[1])}, expected one spec"
            )
    return found


def _splits(model: PipelineModel) -> TypeGuard[SplitsParameters]:
    return callable(getattr(model, "partition_specs", None))


def _check_specs(part: str, params: Params, specs: Specs, num_devices: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        spec = leaf_at(specs, tuple(key.key for key in path))
        got = "/".join((part, *(str(key.key) for key in path))) + f" {list(leaf.shape)}"
        names = tuple(spec) if isinstance(spec, PartitionSpec) else (spec,)
        if len(names) > leaf.ndim or not {*names} <= {TENSOR, None}:
            raise UserError(
                f"parallelism.tensor: got {num_devices}, but {got} is split as {names}, expected a "
                f"PartitionSpec of {TENSOR!r} and None for at most its axes"
            )
        for axis in split_axes(spec):
            if leaf.shape[axis] % num_devices:
                raise UserError(
                    f"parallelism.tensor: got {num_devices}, but {got} is split along axis {axis}, "
                    f"expected a multiple of {num_devices} there"
                )


def part_shapes(params: Params, specs: Specs, num_devices: int) -> Params:
    """Returns the shapes of one device's parts of parameters."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            part_shape(leaf.shape, spec, num_devices), leaf.dtype
        ),
        params,
        spread(specs, params),
    )


def spread(specs: Specs, tree: Any) -> Any:
    """Returns a tree's structure with the spec of each of its arrays."""
    return jax.tree.map(lambda spec, below: jax.tree.map(lambda _: spec, below), specs, tree)


def place_params(params: Params, specs: Mapping[str, Specs], submesh: Mesh) -> Params:
    """Puts a stage's parameters on its devices; each device gets its part.

    Args:
      params: arrays on the host.
    """
    return jax.tree.map(placed, params, placements(params, specs, submesh))


def placements(params: Params, specs: Mapping[str, Specs], submesh: Mesh) -> Any:
    """Returns where each of a stage's parameters lies."""
    if submesh.size == 1:
        return jax.tree.map(lambda _: SingleDeviceSharding(submesh.devices.item()), params)
    of_stage = {name: specs[name] for name in params}
    return jax.tree.map(partial(NamedSharding, submesh), spread(of_stage, params))


def placed(array: Any, sharding: Sharding) -> jax.Array:
    """Copies an array to its devices, which get their parts; the copy may be donated."""
    if len(sharding.device_set) == 1:
        return jax.device_put(jnp.array(array), sharding)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: jnp.array(array[index])
    )


def part_shape(whole: tuple[int, ...], spec: PartitionSpec, num_devices: int) -> tuple[int, ...]:
    """Returns the shape of one device's part of an array."""
    split = split_axes(spec)
    return tuple(size // num_devices if at in split else size for at, size in enumerate(whole))


def whole_shape(part: tuple[int, ...], spec: PartitionSpec, num_devices: int) -> tuple[int, ...]:
    """Returns the whole array's shape, from one part's."""
    split = split_axes(spec)
    return tuple(size * num_devices if at in split else size for at, size in enumerate(part))


def split_along(axis: int | None) -> PartitionSpec:
    """Returns how an array is split along one axis, or not."""
    return WHOLE if axis is None else PartitionSpec(*[None] * axis, TENSOR)


def split_axes(spec: PartitionSpec) -> list[int]:
    """Returns the axes along which an array is split."""
    return [axis for axis, name in enumerate(spec) if name == TENSOR]


def with_tensor_axis(num_devices: int, function: Callable[[], Result]) -> Result:
    """Calls a function that traces others with an axis "tensor" of `num_devices` devices."""
    # All that is traced inside `make_jaxpr` knows its axes; nothing else public binds one.
    if num_devices == 1:
        return function()
    results: list[Result] = []
    jax.make_jaxpr(lambda: results.append(function()), axis_env=[(TENSOR, num_devices)])()
    return results[0]
