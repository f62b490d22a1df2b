"""What a model must and may provide to be pipelined.

A model is an embedding, layers of one structure, and a head: pure functions of their parameters.
A function whose signature names `key` is also passed a key of `jax.random`, for dropout and the
like. One that names `extras` is passed what the data has beside inputs and targets:

    embed(params, inputs, *, key)
    layer(params, x, *, key, extras)
    head(params, x, targets, *, key, extras)

Each call of a step has a key of its own, which follows from the run's seed, the step, the
microbatch and the layer alone (`step_keys`). So it is the same under every schedule, route and cut
into stages, after a failure or a resume, and where B computes a layer again. In evaluations and
samples nothing may be random, so `key` is None. Programs whose functions read their keys take the
four numbers as values, so that no step compiles anything; other programs don't take them.

Inputs and targets are arrays, or trees of them, such as dictionaries; extras are a dictionary of
arrays, maybe nested, such as masks. Their arrays have any dtype, begin with the microbatch's size,
and have no gradient. Extras are not sent from stage to stage: each stage's programs take those that
its functions read, from the data.

A model with auxiliary losses, such as one that balances experts, has `aux_weights`, a dictionary of
numbers by name, and its layers return (x, aux): aux has a scalar of each name. The step's loss then
also includes weight times aux of every layer, as a mean over microbatches.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmorph.errors import UserError

Params = dict[str, Any]
"""A pytree of dictionaries of float32 arrays."""

Path = tuple[str, ...]

Tree = Any
"""Arrays in nested dictionaries, tuples and lists, or one array."""


@dataclass(frozen=True)
class MicrobatchShapes:
    """One microbatch: trees of `jax.ShapeDtypeStruct`, or of arrays, [microbatch, ...].

    Attributes:
      shorter: the shapes of steps with shorter arrays, longest first.
    """

    inputs: Tree
    targets: Tree
    extras: dict[str, Tree] = field(default_factory=dict)
    shorter: tuple["MicrobatchShapes", ...] = ()

    @property
    def lengths(self) -> tuple["MicrobatchShapes", ...]:
        """One microbatch of each length, longest first; `StepInputs.length_index` counts these."""
        return (self, *self.shorter)

    def zeros(self) -> "MicrobatchShapes":
        """Returns arrays of zeros of the longest length."""
        trees = self.inputs, self.targets, self.extras
        return MicrobatchShapes(*jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trees))

    @classmethod
    def of_text(cls, microbatch_size: int, sequence_length: int) -> "MicrobatchShapes":
        """Returns the shapes of tokens: int32 [microbatch, sequence] as inputs and as targets."""
        tokens = jax.ShapeDtypeStruct((microbatch_size, sequence_length), jnp.int32)
        return cls(tokens, tokens)

    @classmethod
    def of_step(cls, inputs: Tree, targets: Tree, extras: Mapping[str, Tree]) -> "MicrobatchShapes":
        """Returns one microbatch's shapes from a step's arrays, [microbatches, microbatch, ...]."""
        return cls(
            *jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
                (inputs, targets, dict(extras)),
            )
        )


class PipelineModel(Protocol):
    """An embedding, layers of one structure, and a head, as pure functions of their parameters.

    A model knows nothing of stages or schedules, and need not import this class. Its functions may
    also take `key` and `extras`, by name. Text is the usual case: inputs and targets are then int32
    [microbatch, sequence], and activations [microbatch, sequence, width].
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

    def embed(self, params: Params, inputs: Tree, /) -> jax.Array:
        """Returns activations [microbatch, ...] of a microbatch's inputs."""
        ...

    def layer(self, params: Params, x: jax.Array, /) -> jax.Array:
        """Returns activations of the same shape and dtype."""
        ...

    def head(self, params: Params, x: jax.Array, targets: Tree, /) -> jax.Array:
        """Returns the float32 sum of the losses of the microbatch's tokens or examples.

        Where targets are one array of integers, those below 0 don't count.
        """
        ...


def aux_weights_of(model: PipelineModel) -> Mapping[str, float]:
    """Returns the weight of each auxiliary loss in the order of their names; {} if it has none."""
    return dict(sorted(getattr(model, "aux_weights", {}).items()))


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a model's function names `key` in its signature."""
    return "key" in inspect.signature(function).parameters


def takes_extras(function: Callable[..., Any]) -> bool:
    """Whether a model's function names `extras` in its signature."""
    return "extras" in inspect.signature(function).parameters


def without_randomness(
    function: Callable[..., Any], extras: Mapping[str, Tree] | None = None
) -> Callable[..., Any]:
    """Returns a model's function as evaluations and samples call it: with no key.

    Args:
      extras: what the function is passed if it takes extras; None: an empty dictionary.
    """
    if takes_extras(function):
        function = partial(function, extras=extras or {})
    return partial(function, key=None) if takes_key(function) else function


NUM_KEY_NUMBERS = 4
_OF_STEPS = 3  # initial parameters have the keys folded from 0, 1 and 2


def key_numbers(seed: int, step: int, microbatch: int, first_layer: int) -> np.ndarray:
    """Returns what a stage's keys follow from, for `step_keys`: uint32 [4]."""
    numbers = (seed, step, microbatch, first_layer)
    # Steps that are run only to be timed have negative numbers.
    return np.array([number & 0xFFFFFFFF for number in numbers], np.uint32)


def step_keys(numbers: jax.Array, num_layers: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the keys of the embedding, of a stage's layers (one each), and of the head."""
    seed, step, microbatch, first_layer = numbers
    key = jax.random.key(seed)
    for number in (_OF_STEPS, step, microbatch):
        key = jax.random.fold_in(key, number)
    embed_key, layers_key, head_key = (jax.random.fold_in(key, part) for part in range(3))
    layers = first_layer + jnp.arange(num_layers, dtype=first_layer.dtype)
    # One by one: batched by `vmap`, some generators' keys depend on the number of layers.
    return embed_key, lax.map(partial(jax.random.fold_in, layers_key), layers), head_key


class ChoosesByDevice(PipelineModel, Protocol):
    """A model that picks an implementation, such as cuDNN's attention, by the device."""

    def on_device(self, microbatch_size: int, sequence_length: int) -> str:
        """Describes in a few words what the model uses on the default device; may be empty.

        It may also take `packed`, by name: whether sequences are packed documents.

        Raises:
          ValueError: the configuration names what the device doesn't have; one line.
        """
        ...


def device_choices(
    model: PipelineModel, microbatch_size: int, sequence_length: int, extras: Container[str] = ()
) -> str:
    """Describes what a model uses on the default device; empty if it has no `on_device`.

    Args:
      extras: the names of the data's extras; packed documents have "segments".

    Raises:
      UserError: the configuration names what the device doesn't have.
    """
    if not _chooses(model):
        return ""
    try:
        names_it = "packed" in inspect.signature(model.on_device).parameters
        by_name = {"packed": "segments" in extras} if names_it else {}
        return model.on_device(microbatch_size, sequence_length, **by_name)
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
        tokens = jnp.zeros((1, sequence_length), jnp.int32)
        x = without_randomness(model.embed)(model.init_embed(key), tokens)
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
    return model.logits(params["head"], last_activations(model, params, tokens))


def last_activations(
    model: PipelineModel, params: Params, x: Tree, extras: Mapping[str, Tree] | None = None
) -> jax.Array:
    """Returns the activations after a stage's layers, without randomness.

    Args:
      params: a stage's, or the whole model's.
      x: the inputs if `params` includes the embedding, else activations.
    """
    layer, has_aux = without_randomness(model.layer, extras), bool(aux_weights_of(model))
    if "embed" in params:
        x = without_randomness(model.embed)(params["embed"], x)

    def one_layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
        result = layer(params, x)
        return (result[0] if has_aux else result), None

    return lax.scan(one_layer, x, params["layers"])[0]


def has_a_loss_each(targets: Tree) -> bool:
    """Whether targets are one array of integers: each that is not negative has a loss."""
    dtype = getattr(targets, "dtype", None)  # of an array, or of its shape
    return dtype is not None and dtype.kind in "iu"


def count_targets(targets: Tree) -> int:
    """Returns how many losses count: targets of 0 or more in one array of integers; else examples.

    Args:
      targets: a tree of arrays [microbatches, microbatch size, ...]; None: 0.
    """
    leaves = jax.tree.leaves(targets)
    if has_a_loss_each(targets):
        return int(np.count_nonzero(targets >= 0))
    return leaves[0].shape[0] * leaves[0].shape[1] if leaves else 0
