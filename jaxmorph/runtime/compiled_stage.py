"""A rank's stage, compiled: what can be made of it before it has parameters, peers or a queue.

So a rank that will change its place compiles its next stage while it still trains.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import starmap

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.progress import progress
from jaxmorph.runtime.executor import Chunks
from jaxmorph.runtime.optimizer import StageOptimizer
from jaxmorph.runtime.shares import Shares
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.tied import HEAD
from jaxmorph.stage.build import StagePrograms, build_stage
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import (
    LeafPath,
    compile_init,
    init_stage_params,
    read_stage_params,
)
from jaxmorph.stage.sharding import Specs, partition_specs, place_params, placements


@dataclass(frozen=True)
class CompiledStage:
    """A rank's programs and optimizer.

    Attributes:
        programs_by_length: The programs of the rank's chunks for each length, first the longest.
        params_form: The shapes of each chunk's parameters, and where they lie.
        shares: Which part of the parameters this replica updates; None: all of them.
    """

    programs_by_length: list[tuple[StagePrograms, ...]]
    params_form: Chunks
    optimizer: StageOptimizer
    shares: Shares | None


def compile_stage(
    model: PipelineModel,
    settings: StageSettings,
    rank: int,
    submesh: Mesh,
    stamp: Callable[[str], None] = progress.stamp,
) -> CompiledStage:
    """Compile the stage of one of the pipeline's ranks.

    Args:
        submesh: The stage's devices.
        stamp: Called before each program is compiled, as in `build_stage`.
    """
    specs = partition_specs(model, settings.num_devices)
    chunks = settings.chunks_of(rank)
    params = tuple(starmap(partial(_params_form, model, specs, submesh), chunks))
    programs = _build_programs(model, settings, rank, submesh, stamp)
    stamp("compiling its optimizer")
    divides = settings.divides_optimizer and not settings.replica.is_alone
    shares = Shares.of(params, settings.replica) if divides else None
    optimizer = StageOptimizer(settings.optimizer, params, _uncounted(model, params), shares)
    return CompiledStage(programs, params, optimizer, shares)


def is_compiled_alike(
    settings: StageSettings, rank: int, others: StageSettings, other: int
) -> bool:
    """Whether the stages of two ranks, perhaps of different replicas, have the same programs."""
    own, its = (
        [(len(layers), *ends) for layers, *ends in of.chunks_of(each)]
        for of, each in ((settings, rank), (others, other))
    )
    is_own_share = settings.replica == others.replica or not settings.divides_optimizer
    return own == its and is_own_share


def initial_params(
    model: PipelineModel, settings: StageSettings, rank: int, submesh: Mesh
) -> Chunks:
    """Draw or read the parameters of a rank's chunks."""
    specs = partition_specs(model, settings.num_devices)
    chunks = settings.chunks_of(rank)
    if settings.weights is None:
        return tuple(starmap(_compiled_init(model, settings, specs, submesh), chunks))
    read = starmap(partial(read_stage_params, model, settings.weights), chunks)
    return tuple(place_params(params, specs, submesh) for params in read)


def _params_form(
    model: PipelineModel,
    specs: Mapping[str, Specs],
    submesh: Mesh,
    layers: range,
    is_first: bool,
    is_last: bool,
) -> Params:
    init = partial(init_stage_params, model, layers=layers, is_first=is_first, is_last=is_last)
    params = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        params,
        placements(params, specs, submesh),
    )


def _compiled_init(
    model: PipelineModel, settings: StageSettings, specs: Mapping[str, Specs], submesh: Mesh
) -> Callable[[range, bool, bool], Params]:
    """Makes a chunk's initial parameters; chunks of equal size and place share the program."""
    key, shardings = jax.random.key(settings.seed), None
    if settings.num_devices > 1:
        place = partial(NamedSharding, submesh)
        shardings = jax.tree.map(place, dict(specs))
        key = jax.device_put(key, place(PartitionSpec()))

    @cache
    def compiled(num_layers: int, is_first: bool, is_last: bool) -> jax.stages.Compiled:
        return compile_init(model, key, num_layers, is_first, is_last, shardings)

    def initial(layers: range, is_first: bool, is_last: bool) -> Params:
        numbers = np.array(layers, np.int32)
        return compiled(len(layers), is_first, is_last)(key, numbers)

    return initial


def _build_programs(
    model: PipelineModel,
    settings: StageSettings,
    rank: int,
    submesh: Mesh,
    stamp: Callable[[str], None],
) -> list[tuple[StagePrograms, ...]]:
    """The programs of a rank's chunks, by length; chunks of equal size and place share them."""

    @cache
    def build(length_index: int, num_layers: int, is_first: bool, is_last: bool) -> StagePrograms:
        return build_stage(
            model,
            submesh,
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
            shapes=settings.shapes,
            length_index=length_index,
            stash=settings.stash,
            kinds=settings.kinds,
            weight_group=settings.weight_group,
            stamp=stamp,
        )

    own = [(len(layers), *ends) for layers, *ends in settings.chunks_of(rank)]
    indices = range(len(settings.shapes.lengths))
    return [tuple(build(index, *chunk) for chunk in own) for index in indices]


def _uncounted(model: PipelineModel, params: Chunks) -> tuple[LeafPath, ...]:
    """The head's copies of tied parameters; the norm counts only the embedding's copy."""
    last = len(params) - 1
    return tuple((last, HEAD, *head) for _, head in model.tied) if HEAD in params[last] else ()
