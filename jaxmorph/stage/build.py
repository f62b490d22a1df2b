"""Compiles a slice of a model: the programs F, B, W and BW of one stage.

All compilation happens here, before the first step. The programs know neither schedule nor route,
so a change of plan compiles nothing.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled
from jax.typing import ArrayLike

from jaxmorph.progress import progress
from jaxmorph.stage.compiling import compiled
from jaxmorph.stage.mesh import DATA
from jaxmorph.stage.model import MicrobatchShapes, Params, PipelineModel, Tree
from jaxmorph.stage.stage_functions import (
    Arrays,
    StageFunctions,
    StashMemory,
    StashPolicy,
    TracedStage,
    trace_stage,
)

WHOLE = PartitionSpec()
BATCH = PartitionSpec(DATA)

OP_KINDS = ("F", "B", "W", "BW")
"""Forward, backward-input, backward-weight, and both backwards in one program."""

EVALUATE = "evaluate"
"""The forward of a stage that `evaluates_apart`; other stages evaluate with F."""


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """One stage's programs, compiled ahead of time; every call dispatches one of them.

    Arrays lie on the stage's submesh. Inputs, targets, extras, activations and output gradients may
    be numpy arrays; the caller must not write to them afterwards, because a CPU uses them in place.

    An op's last result is `done`, a scalar that is ready when the op has run. Waiting on it keeps
    none of the other results alive, and still works when the next op has taken over (donated) the
    accumulators.

    Attributes:
      functions: what the programs compute, before compilation.
      compiled: the programs by name: "prepare", "zero", the kinds of op requested, and of a
        stage that `evaluates_apart` "evaluate".
      weight_sources: position of each weight in (*leaves of params, *prepared).
      passed_on: positions in the stash of the arrays that W needs too.
    """

    memory: StashMemory
    functions: StageFunctions
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
        self, weights: Arrays, weight_stash: Arrays, accumulators: Params
    ) -> tuple[Params, jax.Array]:
        """Runs W: adds one microbatch's gradients to the accumulators, in place.

        Args:
          accumulators: float32, structured like the parameters; donated.

        Returns:
          (accumulators; `done`).
        """
        return self.compiled["W"](weights, weight_stash, accumulators)

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
) -> StagePrograms:
    """Compiles one stage.

    Args:
      length_index: which of the shapes' `lengths` the programs are for.
      stash: "full" keeps what the backward needs; "recompute" keeps only each layer's input, and B
        computes the layer again.
      kinds: which of `OP_KINDS` to compile; calling another raises KeyError.

    Raises:
      ValueError: an unknown stash policy or kind of op, or a stage of several devices.
    """
    _check(submesh, stash, kinds)
    traced = trace_stage(
        model,
        num_layers=num_layers,
        is_first=is_first,
        is_last=is_last,
        shapes=shapes,
        length_index=length_index,
        stash=stash,
    )
    functions = traced.functions
    names, programs = ["prepare", "zero", *kinds, *([EVALUATE] * functions.evaluates_apart)], {}
    for number, name in enumerate(names, start=1):
        progress.stamp(f"compiling {number} of {len(names)} programs of its stage")
        programs[name] = _compile(_program(name, traced), submesh)
    return StagePrograms(
        memory=traced.memory,
        functions=functions,
        compiled=programs,
        weight_sources=functions.weight_sources(traced.params),
        passed_on=functions.passed_on,
    )


@dataclass(frozen=True)
class _Program:
    """A function with the shapes and shardings to compile it for."""

    function: Callable
    arguments: tuple[Any, ...]
    argument_specs: tuple[PartitionSpec, ...]
    result_specs: Any
    donated: tuple[int, ...] = ()


def _program(name: str, traced: TracedStage) -> _Program:
    functions, weights, stash = traced.functions, traced.weights, traced.stash
    gradient, sums = traced.gradient, traced.sums
    gradient_spec = WHOLE if functions.head else BATCH
    batch_specs, aux_specs = (BATCH,) * len(traced.batch), (WHOLE,) * len(traced.aux)
    match name:
        case "prepare":
            return _Program(functions.prepare, (traced.params,), (WHOLE,), WHOLE)
        case "zero":
            return _Program(partial(_zeros, sums), (), (), WHOLE)
        case "F":
            forward = _with_done(functions.forward)
            extras = functions.with_extras(traced.extras)
            arguments = (weights, *traced.batch, extras, *traced.key_numbers)
            specs = (WHOLE, *batch_specs, BATCH, *(WHOLE for _ in traced.key_numbers))
            results = ((gradient_spec, WHOLE, *aux_specs), WHOLE)
            return _Program(forward, arguments, specs, results)
        case "evaluate":
            forward = _with_done(functions.evaluate)
            arguments = (traced.params, *traced.batch, traced.extras)
            specs = (WHOLE, *batch_specs, BATCH)
            return _Program(forward, arguments, specs, (gradient_spec, WHOLE))
        case "B":
            backward = _with_done(functions.backward_input)
            arguments = (weights, stash, gradient, *traced.aux)
            specs = (WHOLE, WHOLE, gradient_spec, *aux_specs)
            return _Program(backward, arguments, specs, ((BATCH, WHOLE), WHOLE))
        case "W":
            backward = _with_done(functions.backward_weight)
            arguments = (weights, traced.weight_stash, sums)
            return _Program(backward, arguments, (WHOLE, WHOLE, WHOLE), WHOLE, donated=(2,))
        case "BW":
            backward = _with_done(functions.backward)
            arguments = (weights, stash, gradient, sums, *traced.aux)
            specs = (WHOLE, WHOLE, gradient_spec, WHOLE, *aux_specs)
            return _Program(backward, arguments, specs, ((BATCH, WHOLE), WHOLE), donated=(3,))
    raise ValueError(f"kinds: got {name!r}, expected some of {', '.join(OP_KINDS)}")


def _with_done(function: Callable) -> Callable:
    """The function with a scalar beside its result; a program's results become ready together."""
    return lambda *arguments: (function(*arguments), jnp.zeros(()))


def _compile(program: _Program, submesh: Mesh) -> Compiled:
    sharded = jax.shard_map(
        program.function,
        mesh=submesh,
        in_specs=program.argument_specs,
        out_specs=program.result_specs,
        # The parts are traced equations, without the casts that this check requires.
        check_vma=False,
    )
    arguments = [
        _on_mesh(argument, NamedSharding(submesh, spec))
        for argument, spec in zip(program.arguments, program.argument_specs, strict=True)
    ]
    return compiled(jax.jit(sharded, donate_argnums=program.donated).lower(*arguments))


def _on_mesh(shapes: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def _zeros(shapes: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _check(submesh: Mesh, stash: str, kinds: Collection[str]) -> None:
    if submesh.size != 1:
        raise ValueError(f"a stage runs on one device, got a submesh of {dict(submesh.shape)}")
    if stash not in get_args(StashPolicy):
        raise ValueError(f"stash: got {stash!r}, expected one of {get_args(StashPolicy)}")
    if unknown := set(kinds) - set(OP_KINDS):
        raise ValueError(f"kinds: got {sorted(unknown)}, expected some of {OP_KINDS}")
