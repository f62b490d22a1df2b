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
from jaxmorph.stage.model import Params, PipelineModel
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


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """One stage's programs, compiled ahead of time; every call dispatches one of them.

    Arrays lie on the stage's submesh. Tokens, targets, activations and output gradients may be
    numpy arrays; the caller must not write to them afterwards, because a CPU uses them in place.

    An op `f` also exists as `f_with_done`, which returns `done` as well: a scalar that is ready
    when the op has run. Waiting on `done` keeps none of the op's results alive, and still works
    when the next op has taken over (donated) the accumulators.

    Attributes:
      functions: what the programs compute, before compilation.
      compiled: the programs by name: "prepare", "zero", and the kinds of op requested.
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
        self, weights: Arrays, x: ArrayLike, targets: ArrayLike | None = None
    ) -> tuple[jax.Array, Arrays]:
        """Runs F on one microbatch.

        Args:
          x: int32 tokens [microbatch, sequence] on the first stage, else activations [microbatch,
            sequence, width].
          targets: int32 [microbatch, sequence]; only on the last stage.

        Returns:
          (activations, or on the last stage the float32 sum of the tokens' losses; stash).
        """
        return self.forward_with_done(weights, x, targets)[:2]

    def forward_with_done(
        self, weights: Arrays, x: ArrayLike, targets: ArrayLike | None = None
    ) -> tuple[jax.Array, Arrays, jax.Array]:
        """Runs F; returns what `forward` returns, and `done`."""
        batch = (x,) if targets is None else (x, targets)
        (output, stash), done = self.compiled["F"](weights, *batch)
        return output, stash, done

    def backward_input(
        self, weights: Arrays, stash: Arrays, output_gradient: ArrayLike
    ) -> tuple[jax.Array | None, Arrays]:
        """Runs B on one microbatch.

        Args:
          output_gradient: of the activations; on the last stage the float32 weight of the loss.

        Returns:
          (gradient of the stage's input, None on the first stage; weight stash). The weight stash
          begins with the arrays of the stash that W needs too, not copied.
        """
        return self.backward_input_with_done(weights, stash, output_gradient)[:2]

    def backward_input_with_done(
        self, weights: Arrays, stash: Arrays, output_gradient: ArrayLike
    ) -> tuple[jax.Array | None, Arrays, jax.Array]:
        """Runs B; returns what `backward_input` returns, and `done`."""
        (input_gradient, new), done = self.compiled["B"](weights, stash, output_gradient)
        return input_gradient, (*[stash[i] for i in self.passed_on], *new), done

    def backward_weight(
        self, weights: Arrays, weight_stash: Arrays, accumulators: Params
    ) -> Params:
        """Runs W: adds one microbatch's gradients to the accumulators, in place.

        Args:
          accumulators: float32, structured like the parameters; donated.
        """
        return self.backward_weight_with_done(weights, weight_stash, accumulators)[0]

    def backward_weight_with_done(
        self, weights: Arrays, weight_stash: Arrays, accumulators: Params
    ) -> tuple[Params, jax.Array]:
        """Runs W; returns the accumulators, and `done`."""
        return self.compiled["W"](weights, weight_stash, accumulators)

    def backward(
        self, weights: Arrays, stash: Arrays, output_gradient: ArrayLike, accumulators: Params
    ) -> tuple[jax.Array | None, Params]:
        """Runs BW: B and W in one program, without a weight stash.

        Arguments and results are those of `backward_input` and `backward_weight`.
        """
        return self.backward_with_done(weights, stash, output_gradient, accumulators)[:2]

    def backward_with_done(
        self, weights: Arrays, stash: Arrays, output_gradient: ArrayLike, accumulators: Params
    ) -> tuple[jax.Array | None, Params, jax.Array]:
        """Runs BW; returns what `backward` returns, and `done`."""
        (gradient, sums), done = self.compiled["BW"](weights, stash, output_gradient, accumulators)
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
    microbatch_size: int,
    sequence_length: int,
    stash: StashPolicy = "full",
    kinds: Collection[str] = OP_KINDS,
) -> StagePrograms:
    """Compiles one stage.

    Args:
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
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        stash=stash,
    )
    functions = traced.functions
    names, programs = ("prepare", "zero", *kinds), {}
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
    batch_specs = (BATCH,) * len(traced.batch)
    match name:
        case "prepare":
            return _Program(functions.prepare, (traced.params,), (WHOLE,), WHOLE)
        case "zero":
            return _Program(partial(_zeros, sums), (), (), WHOLE)
        case "F":
            forward, arguments = _with_done(functions.forward), (weights, *traced.batch)
            results = ((gradient_spec, WHOLE), WHOLE)
            return _Program(forward, arguments, (WHOLE, *batch_specs), results)
        case "B":
            backward, arguments = _with_done(functions.backward_input), (weights, stash, gradient)
            specs = (WHOLE, WHOLE, gradient_spec)
            return _Program(backward, arguments, specs, ((BATCH, WHOLE), WHOLE))
        case "W":
            backward = _with_done(functions.backward_weight)
            arguments = (weights, traced.weight_stash, sums)
            return _Program(backward, arguments, (WHOLE, WHOLE, WHOLE), WHOLE, donated=(2,))
        case "BW":
            backward = _with_done(functions.backward)
            arguments = (weights, stash, gradient, sums)
            specs = (WHOLE, WHOLE, gradient_spec, WHOLE)
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
