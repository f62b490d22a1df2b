"""One rank's part of training: its stage's parameters, programs, queue and routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.program.instructions import Payload, RankProgram
from jaxmorph.runtime.executor import Chunks, Executor, StepInputs, StepOutcome
from jaxmorph.runtime.links import LinkProgram, PayloadShape
from jaxmorph.runtime.optimizer import OptimizerSettings, StageOptimizer
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.queue import AsynchronousQueue, PacedQueue
from jaxmorph.runtime.routes import Channel, DirectRoute
from jaxmorph.runtime.tied import HEAD, TiedGradients
from jaxmorph.schedule.ops import OpKind
from jaxmorph.stage.build import StagePrograms, build_stage
from jaxmorph.stage.mesh import link_mesh, make_mesh, stage_submesh
from jaxmorph.stage.model import PipelineModel
from jaxmorph.stage.parameters import LeafPath, init_stage_params, leaf_at
from jaxmorph.stage.stash import StashMemory


@dataclass(frozen=True)
class StageSettings:
    """What a stage is built from, besides the model.

    Attributes:
        layers: The layers of every virtual stage, in the order of the pipeline: with one chunk, of
            every stage.
        microbatch_size: Sequences in a microbatch.
        sequence_length: Tokens in a sequence.
        seed: Where the initial parameters come from; they don't depend on the number of stages.
        stash: Whether F keeps what B needs, or B computes it again.
        kinds: The kinds of op to compile.
        optimizer: The optimizer's settings.
        pace: How long this stage's ops last, each of one chunk; None: as long as they take.
        transfer_timeout_s: How long a transfer may be waited for.
        num_chunks: How many virtual stages each rank runs: chunk c of rank r is number
            c * ranks + r.
    """

    layers: tuple[range, ...]
    microbatch_size: int
    sequence_length: int
    seed: int
    kinds: frozenset[OpKind]
    optimizer: OptimizerSettings
    stash: Literal["full", "recompute"] = "full"
    pace: Pace | None = None
    transfer_timeout_s: float = 60.0
    num_chunks: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.layers) // self.num_chunks

    def own_stages(self, rank: int) -> range:
        """The virtual stages of a rank, in the order of its chunks."""
        return range(rank, len(self.layers), self.num_ranks)

    def is_last(self, virtual_stage: int) -> bool:
        """Whether a virtual stage has the head; number 0 has the embedding."""
        return virtual_stage == len(self.layers) - 1


class StageTrainer:
    """One rank's stage, compiled once; schedules and routes may change from step to step.

    A stage is a tuple of chunks, most often of one. Parameters, gradients and programs are tuples
    of what each chunk has.

    Args:
        model: The model, seen as embedding, layers and head.
        settings: How the stage is built.
        rank: Which stage this process is.
    """

    def __init__(self, model: PipelineModel, settings: StageSettings, rank: int) -> None:
        mesh = make_mesh(settings.num_ranks)
        submesh = stage_submesh(mesh, rank)
        self.params = _initial_params(model, settings, rank)
        self.programs = _build_programs(model, settings, rank, submesh)
        self.optimizer = StageOptimizer(
            settings.optimizer, self.params, _uncounted(model, self.params)
        )
        self._optimizer_state = self.optimizer.initial_state
        self._accumulators = self._zero_accumulators()
        self._weights = self._prepare()
        paced = settings.pace is not None
        self._queue = PacedQueue() if paced else AsynchronousQueue()
        links = _link_programs(model, settings, rank, mesh)
        self.executor = Executor(
            chunks=self.programs,
            placement=NamedSharding(submesh, PartitionSpec()),
            queue=self._queue,
            routes={"direct": DirectRoute(links, answered=paced)},
            pace=settings.pace or Pace(),
            transfer_timeout_s=settings.transfer_timeout_s,
            tied=TiedGradients(model.tied, self._accumulators) if model.tied else None,
        )

    @property
    def stash_memory(self) -> StashMemory:
        """What one microbatch holds on this stage, in all of its chunks together."""
        parts = [programs.memory for programs in self.programs]
        return StashMemory(
            sum(part.after_forward_bytes for part in parts),
            sum(part.after_backward_input_bytes for part in parts),
        )

    @property
    def gradients(self) -> Chunks:
        """The gradients of the last step that ran, float32; they die with the next call."""
        return self._accumulators

    def run(self, program: RankProgram, inputs: StepInputs, step: int) -> StepOutcome:
        """Run a step's ops and transfers; the gradients wait for `update` or `discard`.

        Args:
            program: This rank's instructions.
            inputs: The step's data.
            step: The step's number, part of every message's identity.

        Returns:
            Loss and timings of this rank.
        """
        outcome = self.executor.execute(
            program, self._weights, self._accumulators, inputs, step=step
        )
        self._accumulators = outcome.accumulators
        return outcome

    def squared_norm(self) -> float:
        """Sum of squares of the stage's gradients; a tied parameter counts on one stage."""
        return float(self.optimizer.squared_norm(self._accumulators))

    def update(self, scale: float) -> None:
        """Apply the gradients, each multiplied by `scale`, and begin with zeros again."""
        self.params, self._optimizer_state, self._accumulators = self.optimizer.update(
            self.params, self._optimizer_state, self._accumulators, scale
        )
        self._weights = self._prepare()

    def discard(self) -> None:
        """Forget the gradients."""
        self._accumulators = self._zero_accumulators()

    def close(self) -> None:
        """Stop the queue's thread."""
        self._queue.close()

    def _prepare(self) -> Chunks:
        pairs = zip(self.programs, self.params, strict=True)
        return tuple(chunk.prepare(params) for chunk, params in pairs)

    def _zero_accumulators(self) -> Chunks:
        return tuple(chunk.zero_accumulators() for chunk in self.programs)


def _initial_params(model: PipelineModel, settings: StageSettings, rank: int) -> Chunks:
    key = jax.random.key(settings.seed)
    return tuple(
        init_stage_params(model, key, settings.layers[stage], stage == 0, settings.is_last(stage))
        for stage in settings.own_stages(rank)
    )


def _build_programs(
    model: PipelineModel, settings: StageSettings, rank: int, submesh: Mesh
) -> tuple[StagePrograms, ...]:
    """The programs of a rank's chunks; chunks that are built alike share them."""

    @cache
    def build(num_layers: int, is_first: bool, is_last: bool) -> StagePrograms:
        return build_stage(
            model,
            submesh,
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
            microbatch_size=settings.microbatch_size,
            sequence_length=settings.sequence_length,
            stash=settings.stash,
            kinds=settings.kinds,
        )

    return tuple(
        build(len(settings.layers[stage]), stage == 0, settings.is_last(stage))
        for stage in settings.own_stages(rank)
    )


def _uncounted(model: PipelineModel, params: Chunks) -> tuple[LeafPath, ...]:
    """The head's copies of tied parameters: in the norm the embedding's copy stands for both."""
    last = len(params) - 1
    return tuple((last, HEAD, *head) for _, head in model.tied) if HEAD in params[last] else ()


def _link_programs(
    model: PipelineModel, settings: StageSettings, rank: int, mesh: Mesh
) -> dict[Channel, LinkProgram]:
    """The programs of all channels that this rank is an end of."""
    channels = _channels(model, settings)
    return {
        channel: LinkProgram(
            link_mesh(mesh, *sorted((channel.source, channel.destination))),
            shape,
            upward=channel.source > channel.destination,
            answered=settings.pace is not None,
        )
        for channel, shape in channels.items()
        if rank in (channel.source, channel.destination)
    }


def _channels(model: PipelineModel, settings: StageSettings) -> dict[Channel, PayloadShape]:
    """Every channel of the pipeline with what it carries."""
    last = settings.num_ranks - 1
    hops = [(lower, lower + 1) for lower in range(last)]
    if settings.num_chunks > 1 and last > 0:
        hops.append((last, 0))  # from a chunk of the last rank to the next one of the first
    activation = _activation_shape(model, settings)
    channels: dict[Channel, PayloadShape] = {}
    for rank, next_rank in hops:
        channels[Channel(Payload.ACTIVATION, rank, next_rank)] = activation
        channels[Channel(Payload.GRADIENT, next_rank, rank)] = activation
    for index, shape in enumerate(_tied_shapes(model) if last > 0 else ()):
        channels[Channel(Payload.TIED, 0, last, index)] = shape
        channels[Channel(Payload.TIED, last, 0, index)] = shape
    return channels


def _activation_shape(model: PipelineModel, settings: StageSettings) -> PayloadShape:
    def embed(key: jax.Array, tokens: jax.Array) -> jax.Array:
        return model.embed(model.init_embed(key), tokens)

    tokens = jax.ShapeDtypeStruct((settings.microbatch_size, settings.sequence_length), jnp.int32)
    shape = jax.eval_shape(embed, jax.random.key(0), tokens)
    return PayloadShape(shape.shape, shape.dtype)


def _tied_shapes(model: PipelineModel) -> Sequence[PayloadShape]:
    embed = jax.eval_shape(model.init_embed, jax.random.key(0))
    leaves = (leaf_at(embed, path) for path, _ in model.tied)
    return [PayloadShape(leaf.shape, leaf.dtype) for leaf in leaves]
