"""Checks, before the first step, that a model is what training assumes.

A model that would silently train wrongly, or end in an error that doesn't say why, is refused in
one line: the line of the user's code, the function, what was got and what was expected. All
functions are traced over the shapes of one microbatch, so nothing is compiled, however large the
model is; only the head runs, on one example.

The checks can't see that a function reads random numbers of numpy, time or files: for JAX they are
constants. It is no error if no gradient reaches a parameter: that may be intended.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.errors import UserError, definition_of, in_users_code
from jaxmorph.stage.equations import trace_flat
from jaxmorph.stage.model import MicrobatchShapes, Params, PipelineModel, Tree, aux_weights_of
from jaxmorph.stage.model_calls import (
    ModelCall,
    Reached,
    described,
    is_float,
    is_same,
    listed,
    made_up,
    run_for_check,
)
from jaxmorph.stage.parameters import leaf_at

_FUNCTIONS = ("init_embed", "init_layer", "init_head", "embed", "layer", "head")


def check_attributes(model: Any) -> None:
    """Checks what a model has, without calling any of it.

    Raises:
      UserError: a function or an attribute is missing, or is of the wrong kind.
    """
    name = type(model).__name__
    if lacking := [each for each in _FUNCTIONS if not callable(getattr(model, each, None))]:
        raise UserError(
            f"model: got {name} without {listed(lacking)}, expected an object with the functions "
            f"{listed(_FUNCTIONS)}"
        )
    num_layers: Any = getattr(model, "num_layers", None)
    if not hasattr(num_layers, "__index__") or num_layers < 1:
        raise UserError(f"model: got {name} with num_layers {num_layers!r}, expected 1 or more")
    try:
        pairs = [(*embed_path, *head_path) for embed_path, head_path in model.tied]
        is_of_names = all(isinstance(each, str) for path in pairs for each in path)
    except (AttributeError, TypeError, ValueError):
        is_of_names = False
    if not is_of_names:
        raise UserError(
            f"model: got {name} with tied {getattr(model, 'tied', None)!r}, expected pairs of "
            "paths of parameters, such as ((('table',), ('output',)),), or ()"
        )
    weights = getattr(model, "aux_weights", {})
    if not isinstance(weights, Mapping) or not all(
        isinstance(key, str) and isinstance(value, int | float) for key, value in weights.items()
    ):
        raise UserError(
            f"model: got {name} with aux_weights {weights!r}, expected a dictionary of numbers"
        )


def check_model(
    model: PipelineModel,
    shapes: MicrobatchShapes,
    microbatch: MicrobatchShapes | None = None,
) -> tuple[str, ...]:
    """Checks a whole model over one microbatch of each length.

    Args:
      microbatch: arrays, of which one example is passed to the head; None: made up.

    Returns:
      The parameters that no gradient reaches, such as "layer.bias", the first of each part with the
      line where they are made: "layer.bias (mixer.py:40)".

    Raises:
      UserError: the model can't be trained, or would be trained wrongly.
    """
    check_attributes(model)
    params = {part: _checked_params(model, part) for part in ("embed", "layer", "head")}
    _check_tied(model, params)
    longest, *_ = [_checked_calls(model, params, each) for each in shapes.lengths]
    head, _ = longest[-1]
    _check_sum(head, model.init_head, microbatch)
    return tuple(_unreached(model, *(call.reached(result) for call, result in longest)))


def _checked_calls(
    model: PipelineModel, params: Mapping[str, Params], shapes: MicrobatchShapes
) -> tuple[tuple[ModelCall, Tree], ...]:
    """Checks embedding, layer and head over one microbatch; returns each with its result."""
    embed = ModelCall("embed", model.embed, params["embed"], (), (shapes.inputs,))
    x = embed.checked(partial(_check_activations, shapes=shapes))
    layer = ModelCall("layer", model.layer, params["layer"], (x,), (), shapes.extras)
    after = layer.checked(partial(_check_layer, x=x, aux=aux_weights_of(model)))
    head = ModelCall("head", model.head, params["head"], (x,), (shapes.targets,), shapes.extras)
    return (embed, x), (layer, after), (head, head.checked(_check_loss))


def _checked_params(model: PipelineModel, part: str) -> Params:
    name = f"init_{part}"
    init = getattr(model, name)
    place = definition_of(init) or "model"

    def shapes() -> Any:
        with in_users_code(name, init):
            # A new function each time: JAX caches by identity.
            return jax.eval_shape(lambda key: init(key), jax.eval_shape(jax.random.key, 0))

    params = shapes()
    if wrong := next(_not_arrays(params), ""):
        raise UserError(f"{place}: {name}: {wrong}, expected nested dictionaries of float32 arrays")
    if part == "layer":
        if not jax.tree.leaves(params):
            raise UserError(f"{place}: {name}: got no parameters, expected at least one array")
        if not is_same(again := shapes(), params):
            raise UserError(
                f"{place}: {name}: got {described(again)} for a second layer, expected "
                f"{described(params)} as for the first"
            )
    return params


def _not_arrays(params: Any, at: str = "parameters") -> Iterator[str]:
    """Yields what is neither a dictionary nor a float32 array."""
    if isinstance(params, dict):
        for name, inner in params.items():
            if not isinstance(name, str):
                yield f"got {at} with the key {name!r}"
            yield from _not_arrays(inner, f"{at}[{name!r}]")
    elif not isinstance(params, jax.ShapeDtypeStruct) or params.dtype != jnp.float32:
        yield f"got {at} {described(params)}"


def _check_tied(model: PipelineModel, params: Mapping[str, Params]) -> None:
    for part, paths in zip(("embed", "head"), zip(*model.tied, strict=True), strict=False):
        if len(set(map(tuple, paths))) < len(paths):
            raise UserError(
                f"model: tied: got a parameter of {part} in two pairs, expected each in one"
            )
    for pair in model.tied:
        found = []
        for part, path in zip(("embed", "head"), pair, strict=True):
            try:
                leaf = leaf_at(params[part], path)
            except (KeyError, TypeError):
                leaf = None
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                raise UserError(f"model: tied: got {path}, expected an array of init_{part}")
            found.append(leaf)
        if not is_same(*found):
            embed, head = map(described, found)
            raise UserError(
                f"model: tied: got {'.'.join(pair[0])} of embed, {embed}, and {'.'.join(pair[1])} "
                f"of head, {head}, expected two arrays of one shape"
            )


def _check_activations(call: ModelCall, result: Tree, shapes: MicrobatchShapes) -> None:
    size = jax.tree.leaves(shapes.inputs)[0].shape[0]
    leaves = jax.tree.leaves_with_path(result)
    if not any(jnp.issubdtype(leaf.dtype, jnp.floating) for _, leaf in leaves):
        raise call.wrong(
            f"got activations {described(result)}, expected an array of floats, or several arrays "
            "with one among them: gradients reach the embedding by it"
        )
    for path, leaf in leaves:
        name = f"activations{jax.tree_util.keystr(path)}"
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        is_sent = any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)
        if not is_sent or leaf.dtype.name.endswith(("int2", "int4")):
            raise call.wrong(
                f"got {name} of {leaf.dtype}, expected floats, bools or integers of 8 bits or more"
            )
        if leaf.shape[:1] != (size,):
            raise call.wrong(
                f"got {name} {described(leaf)}, expected [{size}, ...]: the microbatch is the "
                "first axis of every array"
            )


def _check_layer(call: ModelCall, result: Tree, x: Tree, aux: Mapping[str, float]) -> None:
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    if aux:
        if not is_pair:
            raise call.wrong(
                f"got {described(result)}, expected (activations, dictionary of auxiliary "
                f"losses): the model has aux_weights of {listed(aux)}"
            )
        result, losses = result
        if set(losses) != set(aux):
            raise call.wrong(
                f"got auxiliary losses {listed(losses)}, expected those of aux_weights: "
                f"{listed(aux)}"
            )
        for name, loss in losses.items():
            if not _is_scalar(loss, jnp.floating):
                raise call.wrong(
                    f"got the auxiliary loss {name} {described(loss)}, expected a scalar of floats"
                )
    elif is_pair and jax.tree.structure(result) != jax.tree.structure(x):
        raise call.wrong(
            f"got auxiliary losses {listed(result[1])} beside activations, expected a weight for "
            "each in the model's aux_weights"
        )
    if not is_same(result, x):
        raise call.wrong(
            f"got activations {described(result)}, expected {described(x)}, as embed returns"
        )


def _check_loss(call: ModelCall, result: Tree) -> None:
    if not _is_scalar(result, jnp.float32):
        raise call.wrong(
            f"got {described(result)}, expected a float32 scalar: the sum of the losses"
        )


def _is_scalar(value: Any, kind: Any) -> bool:
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    return is_array and value.shape == () and jnp.issubdtype(value.dtype, kind)


def _check_sum(
    head: ModelCall,
    init: Callable[[jax.Array], Params],
    microbatch: MicrobatchShapes | None,
) -> None:
    """Checks that repeating an example doubles the loss and its gradients."""
    random = np.random.default_rng(0)
    x = made_up(random, head.x[0])
    of_one = head.data[0], dict(head.extras)
    data = made_up(random, of_one) if microbatch is None else _example(microbatch)

    def tried(seed: Any, x: Tree, targets: Tree, extras: Tree) -> Any:
        params = init(jax.random.key(seed))

        def loss(params: Params, x: Tree, times: int) -> jax.Array:
            given = (x, targets, extras)
            several = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * times), given)
            named = {"key": None, "extras": several[2]}
            by_name = {name: named[name] for name in head.by_name}
            return head.function(params, *several[:2], **by_name)

        gradient = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)
        (once, of_once), (twice, of_twice) = (gradient(params, x, times) for times in (1, 2))
        return once, twice, *map(_off_double, of_once, of_twice)

    for given in (_shortened((x, *data)), (x, *data)):
        arguments = (np.uint32(0), *given)
        with suppress(Exception):  # it may need whole sequences, or one size of batch
            trace = trace_flat(tried, *arguments)
            break
    else:
        return
    leaves = jax.tree.leaves(arguments)
    try:
        once, twice, *gradients = run_for_check(trace, *leaves)
    except jax.errors.JaxRuntimeError:  # such as no memory for it, beside another run
        return
    made: list[Any] = [variable.aval for eqn in trace.equations for variable in eqn.outvars]
    is_narrow = any(is_float(aval) and aval.dtype.itemsize < 4 for aval in made)
    tolerance = 3e-2 if is_narrow else 1e-3
    if abs(twice - 2 * once) > tolerance * max(abs(twice), abs(2 * once)):
        raise head.wrong(
            f"got the loss {once:.6g} of one example, and {twice:.6g} where it stands twice: a "
            f"mean? expected {2 * once:.6g}: the sum of the losses"
        )
    pairs = zip(gradients[::2], gradients[1::2], strict=True)
    for name, (off, size) in zip(("the parameters", "x"), pairs, strict=True):
        if off > tolerance * size:
            raise head.wrong(
                f"got a gradient of {name} that is not twice as large where an example stands "
                "twice, as the loss is, expected that of a sum"
            )


def _off_double(once: Tree, twice: Tree) -> tuple[jax.Array, jax.Array]:
    """How far `twice` is from double `once`, and the larger one's norm."""
    pairs = list(zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True))
    floats = [[each.astype(jnp.float32) for each in pair] for pair in pairs if is_float(pair[0])]

    def norm(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.sqrt(sum((jnp.square(each).sum() for each in arrays), jnp.float32(0)))

    sizes = norm([2 * a for a, _ in floats]), norm([b for _, b in floats])
    return norm([b - 2 * a for a, b in floats]), jnp.maximum(*sizes)


def _example(microbatch: MicrobatchShapes) -> tuple[Tree, Tree]:
    """One example's targets and extras, [1, ...]: if some targets are ignored, with the most."""
    targets, at = microbatch.targets, 0
    if isinstance(targets, np.ndarray) and targets.dtype.kind == "i":
        at = int((targets >= 0).reshape(len(targets), -1).sum(1).argmax())
    return jax.tree.map(lambda rows: rows[at : at + 1], (targets, microbatch.extras))


def _shortened(example: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
    """The first targets of a sequence, where all arrays have its length as their second axis."""
    targets, leaves = example[1], jax.tree.leaves(example)
    if len({leaf.shape[1:2] for leaf in leaves}) > 1 or leaves[0].ndim < 2:
        return example
    is_text = isinstance(targets, np.ndarray) and targets.dtype.kind == "i"
    start = int((targets >= 0).reshape(targets.shape[1], -1).any(1).argmax()) if is_text else 0
    return jax.tree.map(lambda leaf: leaf[:, start : start + _SHORT], example)


_SHORT = 8  # with a large vocabulary, whole sequences take minutes on a CPU


def _unreached(
    model: PipelineModel, embed: Reached, layer: Reached, head: Reached
) -> Iterator[str]:
    """Yields the parameters that no gradient reaches; a tied one is reached by either end."""
    reaches_layers = head[1] or bool(aux_weights_of(model))
    reaches_embed = reaches_layers and layer[1]
    of_embed = {path: own and reaches_embed for path, own in embed[0].items()}
    of_layer = {path: own and reaches_layers for path, own in layer[0].items()}
    of_head = dict(head[0])
    for embed_path, head_path in model.tied:
        either = of_embed[embed_path] or of_head[head_path]
        of_embed[embed_path] = of_head[head_path] = either
    for part, reached in (("embed", of_embed), ("layer", of_layer), ("head", of_head)):
        place = definition_of(getattr(model, f"init_{part}"))
        for path in (path for path, own in reached.items() if not own):
            yield ".".join((part, *path)) + (f" ({place})" if place else "")
            place = ""
