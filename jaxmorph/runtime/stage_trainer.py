"""One rank's part of training: its stage's parameters, programs, queue and routes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.control.link_state import PathFailure
from jaxmorph.copies.backends import PayloadShape
from jaxmorph.program.instructions import Channel, RankProgram
from jaxmorph.records import Link
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct_probe import probe_direct
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.executor import Chunks, Executor, StepInputs, StepOutcome
from jaxmorph.runtime.failover_route import FailoverRoute
from jaxmorph.runtime.host_copies import HostCopies
from jaxmorph.runtime.link_connections import LinkLines
from jaxmorph.runtime.optimizer import StageOptimizer
from jaxmorph.runtime.queue import AsynchronousQueue, Pace, PacedQueue, Stamp
from jaxmorph.runtime.stage_routes import Site, open_routes
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_state import from_parts, stage_parts
from jaxmorph.runtime.tied import HEAD, TiedGradients
from jaxmorph.stage.build import StagePrograms, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import LeafPath, compile_init, read_stage_params
from jaxmorph.stage.stage_functions import StashMemory
from jaxmorph.transport.plane import DataPlane


class StageTrainer:
    """One rank's stage, compiled once; schedules and routes may change from step to step.

    A stage is a tuple of chunks, most often of one. Parameters, gradients and programs are tuples
    of what each chunk has.

    Args:
        model: The model, seen as embedding, layers and head.
        settings: How the stage is built.
        rank: Which stage this process is.
        links: What is emulated on its links; None: nothing.
        plane: What carries delegated transfers; None: no link of this rank is ever delegated. It is
            not closed with the trainer.
        lines: To the other end of each of its links that fail over; None: none does.
        alone: The mesh of this stage alone, where the ranks' devices aren't joined by JAX: then
            settings let no link be direct. None: it is a part of the mesh of all devices.
    """

    def __init__(
        self,
        model: PipelineModel,
        settings: StageSettings,
        rank: int,
        links: EmulatedLinks | None = None,
        plane: DataPlane | None = None,
        lines: LinkLines | None = None,
        alone: Mesh | None = None,
    ) -> None:
        if alone is not None and settings.direct != frozenset():
            raise ValueError("a stage alone on its mesh can't have direct links")
        mesh = make_mesh(settings.num_ranks) if alone is None else alone
        submesh = stage_submesh(mesh, rank) if alone is None else alone
        self.params = _initial_params(model, settings, rank)
        self.programs = _build_programs(model, settings, rank, submesh)
        self.optimizer = StageOptimizer(
            settings.optimizer, self.params, _uncounted(model, self.params)
        )
        self._optimizer_state = self.optimizer.initial_state(self.params)
        self._accumulators = self._zero_accumulators()
        self._weights = self._prepare()
        self._rank, self._plane, self._step = rank, plane, 0
        self._links = links or EmulatedLinks()
        self._payloads = _own_payloads(model, settings, rank)
        placement = NamedSharding(submesh, PartitionSpec())
        with ExitStack() as opened:
            self._queue = AsynchronousQueue() if settings.pace is None else PacedQueue()
            opened.callback(self._queue.close)
            site = Site(
                rank, mesh, placement, self._queue, self._payloads, self._links, self._is_cut
            )
            self._routes = open_routes(site, settings, plane, lines)
            opened.pop_all()  # what follows only puts it together
        pace = settings.pace or Pace()
        self._copies = HostCopies(pace.host_copy_bytes_per_s)
        self.executor = Executor(
            chunks=self.programs,
            placement=placement,
            queue=self._queue,
            routes=self._routes.by_name,
            pace=pace,
            transfer_timeout_s=settings.transfer_timeout_s,
            tied=TiedGradients(model.tied, self._accumulators) if model.tied else None,
            copies=self._copies,
        )

    @property
    def delegated(self) -> DelegatedRoute | None:
        """The route by hosts; None where no link of this rank is ever delegated."""
        return self._routes.delegated

    @property
    def _failover(self) -> FailoverRoute | None:
        return self._routes.failover

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
        """Run a step's ops and transfers; the gradients wait for `update` or `discard`."""
        self._step = step
        outcome = self.executor.execute(
            program, self._weights, self._accumulators, inputs, step=step
        )
        self._accumulators = outcome.accumulators
        return outcome

    def make_room(self, slots: Mapping[Channel, int]) -> None:
        """Give delegated links the slots that a plan needs, while nothing is under way."""
        if self.delegated is not None:
            self.delegated.make_room(slots)

    def probe(self, link: Link, step: int) -> list[Stamp]:
        """Send some messages each way over a direct link that no plan uses; what each took.

        Both its ranks do so at the same point between two steps; for others it does nothing.
        """
        if self._rank not in link:
            return []
        executor = self.executor
        return probe_direct(
            link,
            self._rank,
            step,
            executor.routes["direct"],
            executor.queue,
            self._payloads,
            executor.placement,
            executor.transfer_timeout_s,
            (self._optimizer_state, self._accumulators, self._weights),
        )

    def link_failures(self) -> list[PathFailure]:
        """The links whose direct path has failed here since the last call."""
        return [] if self._failover is None else self._failover.failures()

    def path_is_up(self, link: Link) -> bool | None:
        """Whether the direct path of a link that has failed seems to be whole again.

        The other end's host is asked beside training; nothing is waited for. None where this rank
        is no end of a link that has failed.
        """
        return None if self._failover is None else self._failover.path_is_up(link)

    def _is_cut(self, link: Link) -> bool:
        return self._links.is_cut(link, self._step)

    def take_for_failed(self, link: Link) -> None:
        """Take note that a direct path of this rank's has failed, though not in this process.

        Both its ranks do so before the first step in which a plan could use it, and until
        `restore_direct` its messages are delegated, as after a failure.
        """
        if self._failover is not None:
            self._failover.begin_delegated(link)

    def can_restore(self, link: Link) -> bool:
        """Whether a link of this rank, which has failed, can go back to its direct path."""
        return self._failover is not None and self._failover.can_restore(link)

    def restore_direct(self, link: Link) -> None:
        """Have a link that has failed begin again on its direct path.

        Both its ranks do so at the same boundary; for others it does nothing.
        """
        if self._failover is not None and self._failover.is_delegated(link):
            self._failover.restore(link)

    def events(self) -> list[dict[str, Any]]:
        """What has happened to delegated links since the last call: see `DataPlane.events`."""
        if self._plane is None or self.delegated is None:
            return []
        return [*self._plane.events(), *self.delegated.events()]

    def squared_norm(self) -> float:
        """Sum of squares of the stage's gradients; a tied parameter counts on one stage."""
        return float(self.optimizer.squared_norm(self._accumulators))

    def update(self, scale: float) -> None:
        """Apply the gradients, each multiplied by `scale`, and begin with zeros again.

        By then the ranks have met: nothing of the step is on its way any more.
        """
        self._let_go()
        self.params, self._optimizer_state, self._accumulators = self.optimizer.update(
            self.params, self._optimizer_state, self._accumulators, scale
        )
        self._weights = self._prepare()

    @property
    def device(self) -> Any:
        """Where it computes."""
        (device,) = self.executor.placement.device_set
        return device

    @property
    def state(self) -> tuple[Any, ...]:
        """Each chunk's parameters and optimizer state: see `stage_parts`. An update ends them."""
        return stage_parts(self.params, self._optimizer_state)

    def restore(self, parts: Sequence[Any]) -> None:
        """Go on from parameters and optimizer state that were those of `state`, as numpy arrays.

        The present ones make room for them first; they stay if these don't fit: a `UserError`.
        """
        present = self.params, self._optimizer_state
        expected = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), present)
        if isinstance(parts, Sequence) and _forms(tuple(parts)) == _forms(stage_parts(*expected)):
            self._weights = ()
            _delete(present, besides=parts)
        self.params, self._optimizer_state = from_parts(parts, *expected)
        self._weights = self._prepare()

    def discard(self) -> None:
        """Forget the gradients, once the ranks have met."""
        self._let_go()
        self._accumulators = self._zero_accumulators()

    def close(self) -> None:
        """Stop the threads of the queue, of copies and of links."""
        self._queue.close()
        self._copies.close()
        self._routes.close()

    def _let_go(self) -> None:
        if self._failover is not None:
            self._failover.let_go()

    def _prepare(self) -> Chunks:
        pairs = zip(self.programs, self.params, strict=True)
        return tuple(chunk.prepare(params) for chunk, params in pairs)

    def _zero_accumulators(self) -> Chunks:
        return tuple(chunk.zero_accumulators() for chunk in self.programs)


def _forms(tree: Any) -> list[Any]:
    """Path, shape and dtype of each of a tree's arrays."""
    return [
        (path, getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def _delete(tree: Any, besides: Any) -> None:
    """Free a tree's arrays, except for those that another tree has too."""
    kept = {id(leaf) for leaf in jax.tree.leaves(besides)}
    for leaf in jax.tree.leaves(tree):
        if id(leaf) not in kept:
            leaf.delete()


def _initial_params(model: PipelineModel, settings: StageSettings, rank: int) -> Chunks:
    if settings.weights is not None:
        initial = partial(read_stage_params, model, settings.weights)
    else:
        initial = _compiled_init(model, settings.seed)
    return tuple(
        initial(settings.layers[stage], stage == 0, settings.is_last(stage))
        for stage in settings.own_stages(rank)
    )


def _compiled_init(model: PipelineModel, seed: int) -> Callable[[range, bool, bool], Params]:
    """Makes a chunk's initial parameters; chunks that are built alike share the program."""
    key = jax.random.key(seed)

    @cache
    def compiled(num_layers: int, is_first: bool, is_last: bool) -> jax.stages.Compiled:
        return compile_init(model, key, num_layers, is_first, is_last)

    def initial(layers: range, is_first: bool, is_last: bool) -> Params:
        numbers = np.array(layers, np.int32)
        return compiled(len(layers), is_first, is_last)(key, numbers)

    return initial


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


def _own_payloads(
    model: PipelineModel, settings: StageSettings, rank: int
) -> dict[Channel, PayloadShape]:
    """What the channels carry that a rank is an end of."""
    payloads = settings.payloads(model)
    return {channel: payloads[channel] for channel in payloads if rank in channel.link}
