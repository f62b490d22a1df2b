"""Adapters that turn Flax modules, of NNX or Linen, into models of an embedding, layers and a head.

`nnx(make_module)` and `linen(module)` return an object with the functions that such a model has:
`init_embed`, `embed`, and so on. Each part is an attribute of the module, given by its name, or is
what a given function makes of the module. For example:

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 64, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(jnp.tanh(self.linear(x)))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(256, 64, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])
            self.output = nnx.Linear(64, 256, rngs=rngs)

    def loss(logits, targets):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
        return jnp.where(targets >= 0, losses, 0).sum()

    model = models.nnx(Decoder, embed="table", layers="blocks", head="output", loss=loss)

Parts keep no state except their parameters. Dropout and other randomness follow from the key of
each call: it seeds the streams that a module of NNX keeps, and is Linen's stream "dropout". Without
a key, in evaluations, a module is as `module.eval()` makes it. A `__call__` is passed those of
`key`, `rngs` (NNX), `deterministic`, `train` and `extras` that it names.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax.core import meta
from flax.errors import ScopeCollectionNotFound
from flax.traverse_util import flatten_dict, unflatten_dict

from .tensor_axis import PartitionSpecs

Params = dict[str, Any]
Path = tuple[str, ...]
Loss = Callable[[Any, Any], jax.Array]
"""The float32 sum of the losses, of the head's result and targets."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """An embedding, a layer or a head as pure functions.

    Attributes:
      init: key -> params.
      apply: (params, inputs, key or None, what else is passed by name) -> result.
      named: what it is passed by name.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, Sequence[Any], jax.Array | None, Mapping[str, Any]], Any]
    named: frozenset[str]

    def function(self, *names: str, then: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns apply(params, *names, key), also with extras if the part names them.

        Args:
          then: takes the result and the last of the names, which the part itself isn't passed.
        """

        def of_params(params: Params, *inputs: Any, key: Any = None, **extras: Any) -> Any:
            if then is None:
                return self.apply(params, inputs, key, extras)
            *inputs_of_part, last = inputs
            return then(self.apply(params, inputs_of_part, key, extras), last)

        kinds = inspect.Parameter
        by_name = ["key", *({"extras"} & self.named)]
        of_params.__signature__ = inspect.Signature(
            [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("params", *names)]
            + [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in by_name]
        )
        return of_params


class ModelOfModules:
    """An embedding, layers and a head, as pure functions of their parameters.

    Attributes:
      tied: pairs (path in the embedding's parameters, path in the head's) of tied parameters.
      aux_weights: the weight of each auxiliary loss that layers return.
    """

    def __init__(
        self,
        parts: tuple[_Part, _Part, _Part],
        num_layers: int,
        tied: Iterable[tuple[Path, Path]],
        loss: Loss | None,
        aux_weights: Mapping[str, float] | None,
        partition_specs: PartitionSpecs | None = None,
    ):
        embed, layer, head = parts
        self.num_layers = num_layers
        self.tied = tuple(tied)
        self.aux_weights = dict(aux_weights or {})
        self.init_embed: Callable[..., Params] = embed.init
        self.init_layer: Callable[..., Params] = layer.init
        self.init_head: Callable[..., Params] = head.init
        self.embed = embed.function("inputs")
        self.layer = layer.function("x")
        self.head = head.function("x", "targets", then=loss)
        if partition_specs is not None:
            self.partition_specs = lambda num_shards: partition_specs
        if loss is not None and "extras" not in head.named:
            self.logits = partial(head.function("x"), key=None)


def nnx(
    make_module: Callable[..., Any],
    *,
    embed: str | Callable[[Any], Any] = "embed",
    layers: str | Callable[[Any], Any] = "layers",
    head: str | Callable[[Any], Any] = "head",
    loss: Loss | None = None,
    aux_weights: Mapping[str, float] | None = None,
    partition_specs: PartitionSpecs | None = None,
) -> ModelOfModules:
    """Returns the model that modules of Flax NNX make up.

    A parameter that embedding and head share is tied.

    Args:
      make_module: a class or a function of `rngs` that makes the module, such as
        `functools.partial(Decoder, width=64)`. It is not the module itself, because each stage
        draws its own parameters; every layer's are drawn as the first one's.
      embed: takes the inputs of one microbatch.
      layers: a list of modules of one structure; each takes and returns activations.
      head: takes the activations, and returns what `loss` takes beside the targets; without a loss
        it takes the targets too, and returns the float32 sum of the losses.
      aux_weights: if layers return (activations, auxiliary losses by name), their weights.
      partition_specs: how parameters of "embed", "layer" and "head" are split over the devices of a
        stage; the modules then call functions of `tensor_axis`.

    Raises:
      ValueError: the module doesn't have these parts, or keeps more than parameters.
    """
    if isinstance(make_module, flax_nnx.Module):
        raise ValueError(
            f"jaxmorph.models.nnx: got a {type(make_module).__name__}, expected a class or a "
            "function of rngs that makes one, because each stage draws its own parameters"
        )

    def parts_of(module: Any) -> dict[str, Any]:
        chosen = {"embed": embed, "layers": layers, "head": head}
        found = {name: _chosen(module, name, part, "nnx") for name, part in chosen.items()}
        rows = _layer_list(found.pop("layers"), "nnx")
        return found | {f"layers[{at}]": layer for at, layer in enumerate(rows)}

    def part(name: str) -> _Part:
        def init(key: jax.Array) -> Params:
            made = parts_of(make_module(rngs=flax_nnx.Rngs(key)))[name]
            return _with_names(flax_nnx.to_pure_dict(flax_nnx.state(made, flax_nnx.Param)))

        return _nnx_part(name, parts[name], init)

    module = flax_nnx.eval_shape(lambda: make_module(rngs=flax_nnx.Rngs(0)))
    parts = parts_of(module)
    rows = [name for name in parts if name not in ("embed", "head")]
    _check_one_structure([_nnx_values(parts[name]) for name in rows], "nnx")
    three = part("embed"), part(rows[0]), part("head")
    tied = _tied_parameters(module, parts)
    return ModelOfModules(three, len(rows), tied, loss, aux_weights, partition_specs)


def _nnx_part(name: str, module: Any, init: Callable[[jax.Array], Params]) -> _Part:
    _check_state(name, module)
    graph, params, streams = flax_nnx.split(module, flax_nnx.Param, flax_nnx.RngState)
    paths = list(flatten_dict(flax_nnx.to_pure_dict(params)))
    streams = flatten_dict(flax_nnx.to_pure_dict(streams))
    named = _named(type(module).__call__)

    def apply(params: Params, inputs: Sequence[Any], key: Any, extras: Mapping[str, Any]) -> Any:
        leaves = flatten_dict(params)
        own = unflatten_dict({path: leaves[tuple(map(str, path))] for path in paths})
        is_random, seed = key is not None, jax.random.key(0) if key is None else key
        module = flax_nnx.merge(graph, own, _seeded(streams, seed))
        module.train() if is_random else module.eval()
        rngs = flax_nnx.Rngs(seed) if is_random else None
        passed = {**extras, "key": key, "rngs": rngs} | _modes(is_random)
        return module(*inputs, **{name: passed[name] for name in named if name in passed})

    return _Part(init, apply, named)


def _check_state(name: str, module: Any) -> None:
    for path, value in flax_nnx.iter_graph(module):
        # While shapes are made, an array outside a variable is a tracer, no state.
        is_array = isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        is_own = isinstance(value, flax_nnx.Param | flax_nnx.RngState)
        if is_array or (isinstance(value, flax_nnx.Variable) and not is_own):
            got = "an array" if is_array else type(value).__name__
            raise ValueError(
                f"jaxmorph.models.nnx: {name}.{'.'.join(map(str, path))}: got {got}, expected only "
                "nnx.Param: a part keeps no other state, and makes constants in __call__"
            )


def _seeded(streams: Mapping[Any, Any], key: jax.Array) -> dict[Any, Any]:
    """The state of a module's streams: each has a key of its own, and nothing was drawn yet."""
    seeded = {}
    for number, (path, value) in enumerate(streams.items()):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            seeded[path] = jnp.broadcast_to(jax.random.fold_in(key, number), value.shape)
        else:
            seeded[path] = jnp.zeros(value.shape, value.dtype)
    return unflatten_dict(seeded)


def _nnx_values(module: Any) -> dict[str, str]:
    """What decides a module's structure, by path: its parameters' shapes and other attributes."""
    values = {}
    for path, value in flax_nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(value, flax_nnx.Variable):
            shape = value.get_value()
            values[name] = f"{type(value).__name__} {shape.dtype}{list(shape.shape)}"
        elif "_pytree__" not in name:
            is_node = isinstance(value, flax_nnx.Pytree | list | tuple | dict)  # has paths below
            values[name] = type(value).__name__ if is_node else _described(value)
    return values


def _tied_parameters(module: Any, parts: Mapping[str, Any]) -> Iterable[tuple[Path, Path]]:
    """Paths of parameters that embedding and head share; checks that each parameter has a part."""
    seen: dict[int, tuple[str, Path]] = {}
    tied = []
    for name in ("embed", "head", *(name for name in parts if name not in ("embed", "head"))):
        for own, number in _parameters(parts[name]):
            other, other_path = seen.setdefault(number, (name, own))
            if other != name and (other, name) != ("embed", "head"):
                raise ValueError(
                    f"jaxmorph.models.nnx: {name}.{'.'.join(own)}: got a parameter of "
                    f"{other}.{'.'.join(other_path)}, expected only embed and head to share any"
                )
            if other != name:
                tied.append((other_path, own))
    for own, number in _parameters(module):
        if number not in seen:
            raise ValueError(
                f"jaxmorph.models.nnx: {'.'.join(own)}: got a parameter that is neither in embed, "
                "layers nor head, expected each in one: a function of the module makes a part of "
                "several"
            )
    return tied


def _parameters(module: Any) -> Iterator[tuple[Path, int]]:
    """Yields the path of each parameter, and its identity."""
    for path, value in flax_nnx.iter_graph(module):
        if isinstance(value, flax_nnx.Param):
            yield tuple(map(str, path)), id(value)


def linen(
    module: flax_linen.Module | None = None,
    *,
    inputs: Any,
    targets: Any = None,
    extras: Any = None,
    embed: Any = "embed",
    layers: Any = "layers",
    head: Any = "head",
    loss: Loss | None = None,
    tied: Iterable[tuple[Path, Path]] = (),
    aux_weights: Mapping[str, float] | None = None,
    partition_specs: PartitionSpecs | None = None,
) -> ModelOfModules:
    """Returns the model that modules of Flax Linen make up.

    Args:
      module: one whose `setup` makes the parts. None: the parts are given as modules themselves.
      inputs: arrays or shapes like the inputs of one microbatch, from which modules take sizes.
      targets: like the targets, for a head that takes them. None: as the inputs.
      extras: like the extras, for parts that name them.
      embed: takes the inputs.
      layers: a list of modules of one structure; each takes and returns activations.
      head: takes the activations, and returns what `loss` takes beside the targets; without a loss
        it takes the targets too, and returns the float32 sum of the losses.
      tied: pairs (path in the embedding's parameters, path in the head's) of shared parameters.
      aux_weights: if layers return (activations, auxiliary losses by name), their weights.
      partition_specs: as of `nnx`. A module that gives the size of a split parameter divides it by
        `tensor_axis.num_shards()`, because Linen checks the sizes of parameters.

    Raises:
      ValueError: the module doesn't have these parts, or keeps more than parameters.
    """
    bound = module.bind({}) if module is not None else None
    in_order = _layer_list(_chosen(bound, "layers", layers, "linen"), "linen")
    if module is not None and len(set(map(id, in_order))) < len(in_order):
        raise ValueError(
            "jaxmorph.models.linen: layers: got one module several times, expected layers with "
            "parameters of their own"
        )
    rows = [_unbound(row) for row in in_order]
    _check_one_structure([_linen_values(row) for row in rows], "linen")
    passed = {} if extras is None else {"extras": extras}
    ends = {
        name: _chosen(bound, name, part, "linen")
        for name, part in (("embed", embed), ("head", head))
    }
    _check_shared(ends, tied)
    first = _linen_part("embed", _unbound(ends["embed"]), (inputs,), {})
    params = jax.eval_shape(first.init, jax.eval_shape(jax.random.key, 0))
    x = jax.eval_shape(lambda params: first.apply(params, (inputs,), None, {}), params)
    of_head = (x,) if loss else (x, inputs if targets is None else targets)
    layer = _linen_part("layers[0]", rows[0], (x,), passed)
    last = _linen_part("head", _unbound(ends["head"]), of_head, passed)
    three = first, layer, last
    return ModelOfModules(three, len(rows), tied, loss, aux_weights, partition_specs)


def _linen_part(
    name: str, module: flax_linen.Module, inputs: Sequence[Any], extras: Mapping[str, Any]
) -> _Part:
    named = _named(type(module).__call__)

    def passed(key: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
        values = {**extras, "key": key} | _modes(key is not None)
        return {name: values[name] for name in named if name in values}

    def init(key: jax.Array) -> Any:
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
        streams = {"params": key, "dropout": jax.random.fold_in(key, 0)}
        return module.init(streams, *zeros(tuple(inputs)), **passed(None, zeros(extras)))

    def apply(params: Params, inputs: Sequence[Any], key: Any, extras: Mapping[str, Any]) -> Any:
        streams = None if key is None else {"dropout": key}
        return module.apply({"params": params}, *inputs, rngs=streams, **passed(key, extras))

    kept = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    if others := set(kept) - {"params"}:
        raise ValueError(
            f"jaxmorph.models.linen: {name}: got the collections {', '.join(sorted(others))}, "
            "expected only params: a part keeps no other state"
        )
    return _Part(lambda key: meta.unbox(init(key).get("params", {})), apply, named)


def _check_shared(parts: Mapping[str, flax_linen.Module], tied: Iterable[Any]) -> None:
    """Checks that `tied` is given if a function makes a part from other parts of the module."""
    for name, part in parts.items():
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            is_bound = isinstance(value, flax_linen.Module) and value.scope is not None
            if is_bound and part.scope is None and field.name != "parent" and not tied:
                raise ValueError(
                    f"jaxmorph.models.linen: {name}.{field.name}: got a module of another part, "
                    "expected tied to name the parameters that they share"
                )


def _unbound(module: Any) -> flax_linen.Module:
    return module.unbind()[0] if module.scope is not None else module.clone(name=None)


def _linen_values(module: flax_linen.Module) -> dict[str, str]:
    fields = (field.name for field in dataclasses.fields(module))
    values = {"": type(module).__name__}
    for name in fields:
        if name not in ("parent", "name"):
            values[name] = _described(getattr(module, name))
    return values


def _chosen(module: Any, name: str, part: Any, adapter: str) -> Any:
    """The part of a module that an attribute holds, or that a function makes."""
    try:
        if isinstance(part, str):
            part = getattr(module, part)
        elif callable(part) and not isinstance(part, flax_linen.Module):
            part = part(module)
    except (AttributeError, ScopeCollectionNotFound) as error:
        text = str(error).splitlines()[0]
        raise ValueError(f"jaxmorph.models.{adapter}: {name}: got {part!r}: {text}") from error
    expected = flax_nnx.Module if adapter == "nnx" else flax_linen.Module
    if name != "layers" and not (isinstance(part, expected) and callable(part)):
        raise ValueError(
            f"jaxmorph.models.{adapter}: {name}: got {type(part).__name__}, expected a module of "
            "Flax with __call__"
        )
    return part


def _layer_list(layers: Any, adapter: str) -> list[Any]:
    is_list = isinstance(layers, Sequence | flax_nnx.List) and len(layers) > 0
    expected = flax_nnx.Module if adapter == "nnx" else flax_linen.Module
    if not is_list or not all(isinstance(layer, expected) for layer in layers):
        raise ValueError(
            f"jaxmorph.models.{adapter}: layers: got {type(layers).__name__}, expected a list of "
            "modules of one structure"
        )
    return list(layers)


def _check_one_structure(layers: Sequence[Mapping[str, str]], adapter: str) -> None:
    """Checks that every layer has the attributes of the first."""
    for number, values in enumerate(layers):
        for path in {**layers[0], **values}:
            got, expected = values.get(path, "nothing"), layers[0].get(path, "nothing")
            if got != expected:
                raise ValueError(
                    f"jaxmorph.models.{adapter}: layers[{number}]{'.' if path else ''}{path}: got "
                    f"{got}, expected {expected} as in layers[0]: layers are of one structure"
                )


def _described(value: Any) -> str:
    """A value without where it lies in memory, and a function with what it has closed over."""
    closed_over = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
    text = f"{value!r} with {closed_over}" if closed_over else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _named(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _modes(is_random: bool) -> dict[str, bool]:
    return {"deterministic": not is_random, "train": is_random}


def _with_names(tree: Mapping[Any, Any]) -> Params:
    """The tree with every key as a string; lists of modules have numbers."""
    return unflatten_dict(
        {tuple(map(str, path)): leaf for path, leaf in flatten_dict(tree).items()}
    )
