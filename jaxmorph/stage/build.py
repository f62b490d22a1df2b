"""Compiles a slice of a model: the programs F, B, W and BW of one stage.

All compilation happens here, before the first step. The programs know neither schedule nor route,
so a change of plan compiles nothing.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled
from jax.typing import ArrayLike

from jaxmorph.progress import progress
from jaxmorph.stage.compiling import compiled
from jaxmorph.stage.mesh import TENSOR
from jaxmorph.stage.model import MicrobatchShapes, Params, PipelineModel, Tree
from jaxmorph.stage.sharding import WHOLE, Specs, spread, whole_shape
from jaxmorph.stage.stage_functions import (
    Arrays,
    StageFunctions,
    StashMemory,
    StashPolicy,
    TracedStage,
    trace_stage,
)

OP_KINDS = ("F", "B", "W", "BW")
"""Forward, backward-input, backward-weight, and both backwards in one program."""

EVALUATE = "evaluate"
"""The forward of a stage that `evaluates_apart`; other stages evaluate with F."""


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """One stage's programs, compiled ahead of time; every call dispatches one of them.

    Arrays lie on the stage's submesh; parameters and gradients are split over its devices as
    `specs` says, activations as the functions' `boundary`. Inputs, targets, extras, activations and
    output gradients may be numpy arrays; the caller must not write to them afterwards, because a
    CPU uses them in place.

    An op's last result is `done`, a scalar that is ready when the op has run. Waiting on it keeps
    none of the other results alive, and still works when the next op has taken over (donated) the
    accumulators.

    Attributes:
      functions: what the programs compute, before compilation.
      specs: how the parameters are split over the devices.
      compiled: the programs by name: "prepare", "zero", the kinds of op requested, and
        "evaluate" for a stage that `evaluates_apart`.
      weight_sources: position of each weight in (*leaves of params, *prepared).
      passed_on: positions in the stash of the arrays that W needs too.
    """

    memory: StashMemory
    functions: StageFunctions
    specs: Mapping[str, Specs]
    compiled: Mapping[str, Compiled]
    weight_sources: tuple[int, ...]
    passed_on: tuple[int, ...]

    def prepare(self, params: Params) -> Arrays:
        """Returns the weights that the ops of one step take in place of the parameters.

        Parameters are converted to the compute type here, once a step. A parameter that needs no
        conversion is passed without a copy, so the result must not outlive the parameters.
        """
        pool = (*jax.tree.leaves(params), *self.compiled["prepare"](params))
        return tuple([pool[source] for source in self.weight_sources])

    def forward(
        self,
        weights: Arrays,
        x: Tree,
        targets: Tree = None,
        key_numbers: ArrayLike | None = None,
        extras: Tree = (),
    ) -> tuple[jax.Array, Arrays, Arrays, jax.Array]:
        """Runs F on one microbatch.

        Args:
          x: the inputs on the first stage, such as int32 tokens [microbatch, sequence], else
            activations, such as [microbatch, sequence, width].
          targets: only on the last stage.
          key_numbers: of the microbatch (`model.key_numbers`); only if functions `reads_keys`.
          extras: the leaves that functions `with_extras` returns.

        Returns:
          (activations, or on the last stage the float32 sum of the losses; stash; the float32
          vector of auxiliary losses, in the order of their names, in a tuple: () without any;
          `done`).
        """
        given = (each for each in (targets, extras, key_numbers) if each is not None)
        (output, stash, *aux), done = self.compiled["F"](weights, x, *given)
        return output, stash, tuple(aux), done

    def evaluate(
        self, params: Params, x: Tree, targets: Tree = None, extras: Tree = None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the forward of a stage that `evaluates_apart`; returns (its output; `done`).

        Args:
          extras: all of them, if functions `takes_extras`.
        """
        batch = (x,) if targets is None else (x, targets)
        return self.compiled[EVALUATE](params, *batch, extras or {})

    def backward_input(
        self, weights: Arrays, stash: Arrays, output_gradient: ArrayLike, *aux_gradient: ArrayLike
    ) -> tuple[jax.Array | None, Arrays, jax.Array]:
        """Runs B on one microbatch.

        Args:
          output_gradient: of the activations; on the last stage the float32 weight of the loss.
          *aux_gradient: of the vector of auxiliary losses, if there are any.

        Returns:
          (gradient of the stage's input, None on the first stage; weight stash; `done`). The weight
          stash begins with the arrays of the stash that W needs too, not copied.
        """
        arguments = (weights, stash, output_gradient, *aux_gradient)
        (input_gradient, new), done = self.compiled["B"](*arguments)
        return input_gradient, (*[stash[i] for i in self.passed_on], *new), done

    def backward_weight(
        self, weights: Arrays, weight_stashes: tuple[Arrays, ...], accumulators: Params
    ) -> tuple[Params, jax.Array]:
        """Runs W: adds the gradients of a group of microbatches to the accumulators, in place.

        Args:
          weight_stashes: of each of the `weight_group` microbatches that the stage was built for.
          accumulators: float32, structured like the parameters; donated.

        Returns:
          (accumulators; `done`).
        """
        return self.compiled["W"](weights, weight_stashes, accumulators)

    def backward(
        self,
        weights: Arrays,
        stash: Arrays,
        output_gradient: ArrayLike,
        accumulators: Params,
        *aux_gradient: ArrayLike,
    ) -> tuple[jax.Array | None, Params, jax.Array]:
        """Runs BW: B and W in one program, without a weight stash.

        Arguments are those of `backward_input` and `backward_weight`.

        Returns:
          (gradient of the stage's input, None on the first stage; accumulators; `done`).
        """
        arguments = (weights, stash, output_gradient, accumulators, *aux_gradient)
        (gradient, sums), done = self.compiled["BW"](*arguments)
        return gradient, sums, done

    def zero_accumulators(self) -> Params:
        """Returns float32 zeros, structured like the stage's parameters."""
        return self.compiled["zero"]()


def build_stage(
    model: PipelineModel,
    submesh: Mesh,
    *,
    num_layers: int,
    is_first: bool,
    is_last: bool,
    shapes: MicrobatchShapes,
    length_index: int = 0,
    stash: StashPolicy = "full",
    kinds: Collection[str] = OP_KINDS,
    weight_group: int = 1,
    stamp: Callable[[str], None] = progress.stamp,
) -> StagePrograms:
    """Compiles one stage.

    Args:
      length_index: which of the shapes' `lengths` the programs are for.
      stash: "full" keeps what the backward needs; "recompute" keeps only each layer's input, and B
        computes the layer again.
      kinds: which of `OP_KINDS` to compile; calling another raises KeyError.
      weight_group: how many microbatches' gradients one W adds.
      stamp: called before each program is compiled, with a text that a stalled process shows.

    Raises:
      ValueError: an unknown kind of op.
      UserError: the model can't be split over the submesh's devices.
    """
    traced = trace_stage(
        model,
        num_layers=num_layers,
        is_first=is_first,
        is_last=is_last,
        shapes=shapes,
        length_index=length_index,
        stash=stash,
        num_devices=submesh.size,
    )
    functions = traced.functions
    names, programs = ["prepare", "zero", *kinds, *([EVALUATE] * functions.evaluates_apart)], {}
    for number, name in enumerate(names, start=1):
        stamp(f"compiling {number} of {len(names)} programs of its stage")
        programs[name] = _compile(_program(name, traced, weight_group), submesh)
    return StagePrograms(
        memory=traced.memory,
        functions=functions,
        specs=traced.specs,
        compiled=programs,
        weight_sources=functions.weight_sources(traced.params),
        passed_on=functions.passed_on,
    )


_PER_DEVICE = object()
"""The layout of what each device makes for itself, such as stashes: stacked on a new first axis."""


@dataclass(frozen=True)
class _Program:
    """A function with the shapes and layouts to compile it for.

    Attributes:
      argument_layouts: for each argument, a prefix tree of `PartitionSpec` and `_PER_DEVICE`.
      result_layouts: the same for the result.
    """

    function: Callable
    arguments: tuple[Any, ...]
    argument_layouts: tuple[Any, ...]
    result_layouts: Any
    donated: tuple[int, ...] = ()


def _program(name: str, traced: TracedStage, weight_group: int = 1) -> _Program:
    functions, weights, stash = traced.functions, traced.weights, traced.stash
    gradient, sums, specs = traced.gradient, traced.sums, traced.specs
    sent = functions.boundary.spec
    gradient_spec = WHOLE if functions.head else sent
    batch_specs = (WHOLE if functions.embed else sent, *(WHOLE for _ in traced.batch[1:]))
    aux_specs = (WHOLE,) * len(traced.aux)
    of_params = jax.tree.leaves(spread(specs, traced.params))
    pool = (*of_params, *(_PER_DEVICE for _ in traced.prepared))
    weight_layouts = tuple(pool[at] for at in functions.weight_sources(traced.params))
    match name:
        case "prepare":
            return _Program(functions.prepare, (traced.params,), (specs,), _PER_DEVICE)
        case "zero":
            return _Program(partial(_zeros, sums), (), (), specs)
        case "F":
            forward = _with_done(functions.forward)
            extras = functions.with_extras(traced.extras)
            arguments = (weights, *traced.batch, extras, *traced.key_numbers)
            layouts = (weight_layouts, *batch_specs, WHOLE, *(WHOLE for _ in traced.key_numbers))
            results = ((gradient_spec, _PER_DEVICE, *aux_specs), WHOLE)
            return _Program(forward, arguments, layouts, results)
        case "evaluate":
            forward = _with_done(functions.evaluate)
            arguments = (traced.params, *traced.batch, traced.extras)
            layouts = (specs, *batch_specs, WHOLE)
            return _Program(forward, arguments, layouts, (gradient_spec, WHOLE))
        case "B":
            backward = _with_done(functions.backward_input)
            arguments = (weights, stash, gradient, *traced.aux)
            layouts = (weight_layouts, _PER_DEVICE, gradient_spec, *aux_specs)
            return _Program(backward, arguments, layouts, ((sent, _PER_DEVICE), WHOLE))
        case "W":
            backward = _with_done(functions.backward_weight)
            arguments = (weights, (traced.weight_stash,) * weight_group, sums)
            layouts = (weight_layouts, _PER_DEVICE, specs)
            return _Program(backward, arguments, layouts, (specs, WHOLE), donated=(2,))
        case "BW":
            backward = _with_done(functions.backward)
            arguments = (weights, stash, gradient, sums, *traced.aux)
            layouts = (weight_layouts, _PER_DEVICE, gradient_spec, specs, *aux_specs)
            return _Program(backward, arguments, layouts, ((sent, specs), WHOLE), donated=(3,))
    raise ValueError(f"kinds: got {name!r}, expected some of {', '.join(OP_KINDS)}")


def _with_done(function: Callable) -> Callable:
    """The function with a scalar beside its result; a program's results become ready together."""
    return lambda *arguments: (function(*arguments), jnp.zeros(()))


def _compile(program: _Program, submesh: Mesh) -> Compiled:
    num_devices = submesh.size
    argument_layouts, result_layouts = program.argument_layouts, program.result_layouts

    def of_device(*arguments: Any) -> Any:
        own = _map_per_device(lambda array: array[0], argument_layouts, arguments)
        return _map_per_device(lambda array: array[None], result_layouts, program.function(*own))

    sharded = jax.shard_map(
        program.function if num_devices == 1 else of_device,
        mesh=submesh,
        in_specs=_specs(argument_layouts, num_devices),
        out_specs=_specs(result_layouts, num_devices),
        # The parts are traced equations, without the casts that this check requires.
        check_vma=False,
    )
    arguments = _on_mesh(program.arguments, argument_layouts, submesh)
    return compiled(jax.jit(sharded, donate_argnums=program.donated).lower(*arguments))


def _specs(layouts: Any, num_devices: int) -> Any:
    """Layouts as specs of arrays; a stack over devices is split along its first axis."""
    own = PartitionSpec(TENSOR) if num_devices > 1 else WHOLE
    as_spec = lambda layout: own if layout is _PER_DEVICE else layout  # noqa: E731
    return jax.tree.map(as_spec, layouts)


def _map_per_device(change: Callable[[Any], Any], layouts: Any, tree: Any) -> Any:
    """The tree with `change` applied to the arrays that each device makes for itself."""

    def below(layout: Any, tree: Any) -> Any:
        return jax.tree.map(change, tree) if layout is _PER_DEVICE else tree

    return jax.tree.map(below, layouts, tree)


def _on_mesh(arguments: tuple[Any, ...], layouts: tuple[Any, ...], submesh: Mesh) -> Any:
    """The whole arrays' shapes and shardings, from one device's shapes."""
    num_devices = submesh.size
    stack = (num_devices,) if num_devices > 1 else ()

    def whole(layout: Any, spec: PartitionSpec, below: Any) -> Any:
        def of(leaf: Any) -> jax.ShapeDtypeStruct:
            is_own = layout is _PER_DEVICE
            shape = (*stack, *leaf.shape) if is_own else whole_shape(leaf.shape, spec, num_devices)
            sharding = NamedSharding(submesh, spec)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(of, below)

    specs = _specs(layouts, num_devices)
    return jax.tree.map(whole, layouts, specs, arguments)


def _zeros(shapes: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
