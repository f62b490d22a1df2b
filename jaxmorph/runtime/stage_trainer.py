"""One rank's part of training: its stage's parameters, programs, queue and routes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.control.handover import SlowLink
from jaxmorph.control.link_state import PathFailure
from jaxmorph.copies.choosing import StageCopies, open_copies
from jaxmorph.program.instructions import Channel, RankInstructions, Transfer
from jaxmorph.progress import progress
from jaxmorph.records import Link
from jaxmorph.runtime.causes import LongWaits
from jaxmorph.runtime.compiled_stage import CompiledStage, compile_stage, initial_params
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct import DirectRoute
from jaxmorph.runtime.direct_probe import probe_direct
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.executor import Chunks, Executor, StepInputs, StepOutcome
from jaxmorph.runtime.failover_route import FailoverRoute, PathWatch
from jaxmorph.runtime.host_copies import HostCopies
from jaxmorph.runtime.link_connections import FailoverConnections, change_sidecars
from jaxmorph.runtime.link_programs import LinkCommunicators
from jaxmorph.runtime.payloads import slot_use
from jaxmorph.runtime.queue import AsynchronousQueue, Pace, PacedQueue, Stamp
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.routes import PairRoute
from jaxmorph.runtime.shares import Shares
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_state import free, from_parts, own_parts, stage_parts, stored_parts
from jaxmorph.runtime.tied import TiedGradients
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import PipelineModel, aux_weights_of
from jaxmorph.stage.stage_functions import StashMemory
from jaxmorph.transport.plane import DataPlane
from jaxmorph.transport.several_sidecars import SeveralSidecars

_HANGS_AFTER = 0.5  # share of a direct transfer's timeout


class StageTrainer:
    """One rank's stage, compiled once; schedules and routes may change from step to step.

    A stage is a tuple of chunks, usually of one. Parameters, gradients and programs are tuples with
    an element for each chunk.

    Args:
        model: The model, as embedding, layers and head.
        links: What is emulated on its links; None: nothing.
        plane: Carries delegated transfers; None: no link of this rank is ever delegated. The caller
            closes it.
        failover: Connections of the links that fail over; None: a failure ends the run.
        alone: The mesh of this stage, where JAX doesn't join the ranks' devices; then settings must
            let no link be direct. None: the stage is part of the mesh of all devices.
        earlier: The closed trainer of the same stage; this one takes over its programs and state.
        compiled: The stage, compiled before; then it has no state until `restore`.

    Attributes:
        compiled: Its programs and optimizer.
        submesh: Its devices.
        delegated: The delegated route; None where no link of this rank is ever delegated.
        params: Each chunk's parameters; with shares, only a share from `update` to `complete`.

    Raises:
        UserError: If payloads can't be copied as the configuration says.
    """

    def __init__(
        self,
        model: PipelineModel,
        settings: StageSettings,
        rank: int,
        links: EmulatedLinks | None = None,
        plane: DataPlane | None = None,
        failover: FailoverConnections | None = None,
        alone: Mesh | None = None,
        earlier: "StageTrainer | None" = None,
        compiled: CompiledStage | None = None,
    ) -> None:
        if alone is not None and settings.direct != frozenset():
            raise ValueError("a stage alone on its mesh can't have direct links")
        num_ranks, num_devices = settings.num_ranks, settings.num_devices
        mesh = make_mesh(num_ranks, num_devices, settings.ranks) if alone is None else alone
        self.submesh = submesh = stage_submesh(mesh, rank) if alone is None else alone
        self._length_index = 0
        self.params: Chunks = ()
        self._weights: Chunks = ()
        self._optimizer_state: Any = ()
        if earlier is not None:
            self.compiled = earlier.compiled
            self.params, self._optimizer_state = earlier.params, earlier._optimizer_state
            earlier.drop_state()
        elif compiled is not None:
            self.compiled = compiled
        else:
            self.compiled = compile_stage(model, settings, rank, submesh)
            progress.stamp("making or reading its first parameters")
            self.params = initial_params(model, settings, rank, submesh)
            self._optimizer_state = self.compiled.optimizer.initial_state(self.params)
        self._accumulators = self._zero_accumulators()
        if self.params:
            self._prepare_weights()
        self._rank, self._plane, self._step = rank, plane, 0
        self._links = links or EmulatedLinks()
        self._messages: tuple[list[Stamp], list[Stamp]] = [], []
        payloads = settings.payloads(model).items()
        self._payloads = {channel: of for channel, of in payloads if rank in channel.link}
        placement = NamedSharding(submesh, PartitionSpec())
        self.delegated: DelegatedRoute | None = None
        self._failover: FailoverRoute | None = None
        self._slot_copies: StageCopies | None = None
        self._free_slots_s = settings.free_slots_s
        with ExitStack() as opened:
            self._queue = AsynchronousQueue() if settings.pace is None else PacedQueue()
            opened.callback(self._queue.close)
            direct = self._open_routes(settings, mesh, placement, failover, opened)
            opened.pop_all()  # nothing after this can fail
        delegated = {} if self.delegated is None else {"delegated": self.delegated}
        pace = settings.pace or Pace()
        self.executor = Executor(
            chunks=self.programs,
            placement=placement,
            queue=self._queue,
            routes={"direct": direct, **delegated},
            pace=pace,
            transfer_timeout_s=settings.transfer_timeout_s,
            tied=TiedGradients(model.tied, self._accumulators) if model.tied else None,
            copies=HostCopies(pace.host_copy_bytes_per_s),
            seed=settings.seed,
            aux_weights=aux_weights_of(model),
            send_takes_s=self._links.on_link_s if pace.sends_take_compute else None,
            first_layers=[settings.layers[i].start for i in settings.own_stages(rank)],
        )

    def _open_routes(
        self,
        settings: StageSettings,
        mesh: Mesh,
        placement: NamedSharding,
        failover: FailoverConnections | None,
        opened: ExitStack,
    ) -> PairRoute:
        """Opens both routes; returns the direct one, which fails over where links do."""
        answered = settings.pace is not None
        timeout_s = settings.direct_timeout_s or settings.transfer_timeout_s
        payloads = {
            channel: payload
            for channel, payload in self._payloads.items()
            if settings.direct is None or channel.link in settings.direct
        }
        # A failed collective raises an error on CPUs; on GPUs XLA may abort it without an error.
        is_on_cpu = mesh.devices.flat[0].platform == "cpu"
        sealed = settings.fails_over and not is_on_cpu
        communicators = LinkCommunicators(mesh, payloads, answered=answered, sealed=sealed)
        programs = communicators.first_programs()
        # CPU devices of a process share its threads. A transfer that waits for its peer would keep
        # them from another device's ops, which the peer may be waiting for.
        runs_ahead = not is_on_cpu or settings.num_devices == 1
        direct = DirectRoute(programs, answered, self._links, timeout_s, runs_ahead=runs_ahead)
        if self._plane is None:
            return direct
        copies = open_copies(placement, self._plane.report_memory, settings.copies)
        opened.callback(copies.close)
        self._slot_copies = copies
        self.delegated = DelegatedRoute(
            self._plane,
            {
                channel: slot_use(channel, payload)
                for channel, payload in self._payloads.items()
                if channel.link in settings.delegated
            },
            self._rank,
            placement,
            copies.outgoing,
            self._queue.raise_error,
            copies.incoming,
            waits := LongWaits(self._rank),
            self._links,
        )
        if failover is None or not failover.peers:
            return direct
        hangs_s = timeout_s * _HANGS_AFTER
        await_items = partial(self._queue.await_items, settings.transfer_timeout_s)
        self._failover = FailoverRoute(
            direct,
            self.delegated,
            failover.peers,
            self._rank,
            settings.transfer_timeout_s,
            communicators,
            PathWatch(failover.peers, failover.pings, hangs_s, self._is_cut),
            waits,
            hands_over=settings.hands_over,
            # A paced queue's own thread runs transfers, after the ops before them.
            await_queue=(lambda: None) if answered else await_items,
        )
        return self._failover

    @property
    def programs(self) -> tuple[StagePrograms, ...]:
        """Each chunk's programs for the length of the last step, at first for the longest."""
        return self.compiled.programs_by_length[self._length_index]

    @property
    def shares(self) -> Shares | None:
        """Which part of the parameters this replica updates; None: all of them."""
        return self.compiled.shares

    @property
    def reads_extras(self) -> bool:
        """Whether a program of this rank takes some of the data's extras."""
        every = chain.from_iterable(self.compiled.programs_by_length)
        own = [programs.functions for programs in every]
        apart = any(each.evaluates_apart and each.takes_extras for each in own)
        return apart or any(each.extras for each in own)

    @property
    def stash_memory(self) -> StashMemory:
        """Most bytes that one microbatch's stash takes on this stage, in all chunks together."""
        by_length = [[of.memory for of in chunks] for chunks in self.compiled.programs_by_length]
        return StashMemory(
            max(sum(each.after_forward_bytes for each in parts) for parts in by_length),
            max(sum(each.after_backward_input_bytes for each in parts) for parts in by_length),
        )

    @property
    def gradients(self) -> Chunks:
        """The gradients of the last step, float32; valid until the next call.

        Once they are summed over replicas with `shares`, this replica's share of them.
        """
        return self._accumulators

    def replace_gradients(self, gradients: Chunks) -> None:
        """Replace the last step's gradients by their sum over replicas."""
        self._accumulators = gradients

    def run(self, program: RankInstructions, inputs: StepInputs, step: int) -> StepOutcome:
        """Run a step's ops and transfers; `update` or `discard` must follow."""
        self._step = step
        if self._failover is not None:
            self._failover.judges = not inputs.evaluates
        if inputs.length_index != self._length_index:
            # What `prepare` makes of parameters may depend on the length, such as a slice of them.
            self._length_index = inputs.length_index
            self._prepare_weights()
            self.executor = replace(self.executor, chunks=self.programs)
        weights = self._evaluated if inputs.evaluates else self._weights
        outcome = self.executor.execute(program, weights, self._accumulators, inputs, step=step)
        self._accumulators = outcome.accumulators
        self._messages = outcome.stamps, outcome.arrivals
        return outcome

    @property
    def _evaluated(self) -> Chunks:
        """The weights that evaluations use: unprepared where a chunk `evaluates_apart`."""
        chunks = zip(self.programs, self.params, self._weights, strict=True)
        return tuple(
            params if programs.functions.evaluates_apart else weights
            for programs, params, weights in chunks
        )

    def message_times_ms(self) -> list[tuple[Transfer, float]]:
        """How long each message of the last run took, as this end saw it, in order."""
        stamps = (stamp for part in self._messages for stamp in part)
        return [
            (stamp.label, 1e3 * stamp.duration_s)
            for stamp in stamps
            if isinstance(stamp.label, Transfer)
        ]

    def free_slots(
        self, slots: Mapping[Channel, int], *, sending: bool, keep: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Free the slots that a plan doesn't need: see `DelegatedRoute.free_slots`."""
        if self.delegated is None or self._free_slots_s is None:
            return ()
        return self.delegated.free_slots(slots, self._free_slots_s, sending=sending, keep=keep)

    def add_slots(self, slots: Mapping[Channel, int], *, sending: bool | None = None) -> None:
        """Give links the slots that a plan needs: see `DelegatedRoute.add_slots`."""
        if self.delegated is not None:
            self.delegated.add_slots(slots, self.executor.transfer_timeout_s, sending=sending)

    def await_registered_slots(self) -> None:
        """Wait until the device's driver knows all slots; until then copies work differently."""
        memory = self._slot_copies and self._slot_copies.available.memory
        if memory:
            memory.settle()

    @property
    def sidecar_s(self) -> float | None:
        """Processor time of this rank's sidecars so far; None: they have not answered."""
        plane = self._plane
        return plane.processor_s() if isinstance(plane, SeveralSidecars) else 0.0

    def change_sidecars(self, rendezvous: Rendezvous, count: int) -> None:
        """Change the number of sidecars per rank; all ranks call this between two steps."""
        if self.delegated is not None:
            self.delegated.settle()
        change_sidecars(rendezvous, self._plane, count)

    def probe(self, link: Link, step: int) -> list[Stamp]:
        """Measure a direct link that no plan uses, by a few messages each way.

        Both its ranks call this between the same two steps; other ranks get no stamps.
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

    def take_link_failures(self) -> list[PathFailure]:
        """The failures of direct paths at this end since the last call."""
        return [] if self._failover is None else self._failover.take_failures()

    def path_is_up(self, link: Link) -> bool | None:
        """Whether a failed direct path seems to work again; None if this rank has no such path.

        The other end's host is pinged in the background; no call waits.
        """
        return None if self._failover is None else self._failover.path_is_up(link)

    def on_slow_link(self, call: Callable[[SlowLink], None]) -> None:
        """Set what is called, on any thread, as soon as any rank finds a link slow in mid-step."""
        if self._failover is not None:
            self._failover.on_slow = call

    def _is_cut(self, link: Link) -> bool:
        return self._links.is_cut(link, self._step)

    def begin_failed_over(self, link: Link) -> None:
        """Treat a direct path of this rank as failed: it failed in an earlier process.

        Both its ranks call this before the first step that could use the path. Its messages are
        delegated until `restore_direct`, as after a failure.
        """
        if self._failover is not None:
            self._failover.begin_failed_over(link)

    def can_restore(self, link: Link) -> bool:
        """Whether a failed link of this rank can return to its direct path."""
        return self._failover is not None and self._failover.can_restore(link)

    def restore_direct(self, link: Link) -> None:
        """Return a failed link to its direct path.

        Both its ranks call this at the same step boundary; for other ranks it does nothing.
        """
        if self._failover is not None and self._failover.has_failed_over(link):
            self._failover.restore(link)

    def events(self) -> list[dict[str, Any]]:
        """Events of delegated links since the last call: see `DataPlane.events`."""
        if self._plane is None or self.delegated is None:
            return []
        return [*self._plane.events(), *self.delegated.events()]

    def squared_norm(self) -> float:
        """Sum of squares of the stage's gradients; a tied parameter counts on only one stage.

        With `shares` it covers this replica's share; undivided arrays count only in replica 0.
        """
        return float(self.compiled.optimizer.squared_norm(self._accumulators))

    def update(self, scale: float) -> None:
        """Apply the gradients, each multiplied by `scale`, and zero the accumulators.

        The ranks have already exchanged reports, so no message of the step is in flight. Where
        replicas share the update, `complete` must follow.
        """
        self._end_step()
        self._weights = ()  # while the optimizer needs their memory
        self.params, self._optimizer_state, self._accumulators = self.compiled.optimizer.update(
            self.params, self._optimizer_state, self._accumulators, scale
        )
        if self.shares is None:
            self._prepare_weights()

    def complete(self, params: Chunks) -> None:
        """Continue with whole parameters, joined from all replicas' shares."""
        self.params = params
        self._prepare_weights()

    @property
    def device(self) -> Any:
        """The first of the devices that the stage computes on."""
        return min(self.executor.placement.device_set, key=lambda device: device.id)

    @property
    def state(self) -> tuple[Any, ...]:
        """Each chunk's parameters and optimizer state (`stage_parts`), valid until the update."""
        return stage_parts(self.params, self._optimizer_state)

    @property
    def to_save(self) -> tuple[Any, ...]:
        """What this rank writes to a checkpoint: `state`, or its replica's part of it."""
        if self.shares is None:
            return self.state
        return stored_parts(self.state, self._axes(self.shares), self.shares.own.index)

    def own_shares(self, parts: Sequence[Any]) -> Sequence[Any]:
        """What `restore` takes, from parts that have the state of all replicas."""
        if self.shares is None:
            return parts
        return own_parts(parts, self._axes(self.shares), self.shares.own)

    def _axes(self, shares: Shares) -> tuple[Any, ...]:
        return stage_parts(shares.axes, self.compiled.optimizer.state_axes)

    def restore(self, parts: Sequence[Any]) -> None:
        """Restore what `state` returned, as numpy arrays.

        Raises:
            UserError: If the parts don't fit the stage, which then keeps its parameters.
        """
        present = self.params, self._optimizer_state
        expected = self.compiled.params_form, self.compiled.optimizer.state_form
        if free(present, parts, stage_parts(*expected)):
            self._weights = ()
        self.params, self._optimizer_state = from_parts(parts, *expected)
        self._prepare_weights()

    def drop_state(self) -> None:
        """Release all arrays, once another stage has them or takes this one's place."""
        self.params = self._weights = self._accumulators = ()
        self._optimizer_state = ()

    def discard(self) -> None:
        """Drop the gradients, once the ranks have exchanged reports."""
        self._end_step()
        for array in jax.tree.leaves(self._accumulators):
            array.delete()  # a second copy might not fit on the device
        self._accumulators = self._zero_accumulators()

    def close(self) -> None:
        """Stop the threads of the queue, of copies and of links."""
        self._queue.close()  # first: the item that it still runs uses the others
        self.executor.copies.close()
        for each in (self._failover, self._slot_copies):
            if each is not None:
                each.close()

    def _end_step(self) -> None:
        if self._failover is not None:
            self._failover.end_step()

    def _prepare_weights(self) -> None:
        self._weights = ()  # first: two copies might not fit on the device
        pairs = zip(self.programs, self.params, strict=True)
        self._weights = tuple(chunk.prepare(params) for chunk, params in pairs)

    def _zero_accumulators(self) -> Chunks:
        return tuple(chunk.zero_accumulators() for chunk in self.programs)
