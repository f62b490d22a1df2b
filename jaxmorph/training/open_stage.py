"""Opens a rank's stage: its settings from the configuration, its data plane, its slots."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import chain

import jax

from jaxmorph.config import Config, per_stage
from jaxmorph.emulation.link_conditions import LinkCondition, of_route
from jaxmorph.emulation.link_settings import pair_conditions
from jaxmorph.placement import ALONE, Replica
from jaxmorph.program.instructions import Channel
from jaxmorph.progress import OF_REPLICAS, progress
from jaxmorph.runtime.compiled_stage import CompiledStage
from jaxmorph.runtime.emulated_links import EmulatedLinks, EmulatedSum
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.join import coordinator_host
from jaxmorph.runtime.link_connections import (
    FailoverConnections,
    open_data_plane,
    open_failover_connections,
)
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.payloads import channel_specs
from jaxmorph.runtime.queue import Pace
from jaxmorph.runtime.reduction import DelegatedSum, DirectGather, DirectSum, sum_channels
from jaxmorph.runtime.rendezvous import Rendezvous, gather, raised_together
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.stage.mesh import make_data_mesh
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel
from jaxmorph.training.plan_in_force import op_kinds, possible_routes
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.host import listening_addresses, loopback_identity
from jaxmorph.transport.plane import DataPlane, TransportSettings

# A silent sidecar is replaced while others still wait for its messages; a slow one is kept.
_SILENT_S, _LEAST_SILENT_S = 15.0, 3.0
_REST_S = 0.25  # for the last acknowledgement of a step; if it comes later, slots are kept


def stage_settings(
    config: Config,
    layers: tuple[range, ...],
    rank: int,
    *,
    adapts: bool = False,
    shapes: MicrobatchShapes | None = None,
    ranks: tuple[int, ...] = (),
    replica: Replica = ALONE,
) -> StageSettings:
    """The settings that a rank's stage is built from.

    Args:
        rank: The rank's number in its replica.
        ranks: The run's rank of each of the replica's stages; empty: there is one replica.
        adapts: Whether routes may change, so that every link needs both routes.
        shapes: The data of one microbatch; None: the configured text's.
    """
    optimizer = config.optimizer
    text = MicrobatchShapes.of_text(config.batch.microbatch_size, config.data.sequence_length)
    direct, delegated = possible_routes(config, adapts=adapts)
    return StageSettings(
        layers=layers,
        shapes=shapes or text,
        seed=config.run.seed,
        kinds=op_kinds(config),
        weight_group=config.schedule.weight_group,
        optimizer=OptimizerSettings(
            learning_rate=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.run.steps,
            final_fraction=optimizer.final_learning_rate_fraction,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
        ),
        stash=config.stash,
        pace=stage_pace(config, rank),
        transfer_timeout_s=config.timeouts.step_s,
        num_chunks=config.parallelism.chunks,
        placement_kind=config.placement.kind,
        num_devices=config.parallelism.tensor,
        ranks=ranks,
        replica=replica,
        divides_optimizer=optimizer.shard == "data",
        direct=direct,
        delegated=delegated,
        fails_over=config.fails_over,
        hands_over=config.hands_over,
        direct_timeout_s=config.direct_timeout_s,
        weights=config.model.weights,
        copies=config.transport.copies,
        free_slots_s=free_slots_s(config),
    )


def free_slots_s(config: Config) -> float | None:
    """How long to wait until slots that a plan doesn't need can be freed; None: keep them."""
    if config.limits.host_bytes is not None:
        # The next plan's slots must fit. Other ranks wait for this one for up to `step_s`.
        return config.timeouts.step_s / 2
    if config.transport.backend == "nixl":
        return None  # an end that gets other memory loses its connections
    return _REST_S


def stage_pace(config: Config, rank: int) -> Pace | None:
    """The durations of a stage's ops on the emulated accelerator; None if none is emulated.

    The configured times are those of a whole stage, which its chunks share.
    """
    accelerator = config.emulation.accelerator
    if accelerator is None:
        return None
    stages = config.parallelism.stages
    own_ms = (per_stage(each, stages)[rank] for each in accelerator.model_dump().values())
    pace = Pace.of_stage(*own_ms, num_chunks=config.parallelism.chunks)
    return replace(pace, host_copy_bytes_per_s=1e9 * config.emulation.host_copy_gbps)


@contextmanager
def open_stage(
    config: Config,
    rendezvous: Rendezvous,
    model: PipelineModel,
    settings: StageSettings,
    links: EmulatedLinks,
    earlier: StageTrainer | None = None,
    compiled: CompiledStage | None = None,
) -> Iterator[StageTrainer]:
    """Build a rank's stage and start its data plane; all ranks call this at the same point.

    Only the ranks of links that may be delegated need a data plane.

    Args:
        links: The emulated links; the data plane joins them.
        earlier: The rank's earlier stage, if it keeps it; None: the stage is new to the rank.
        compiled: A new stage that is already compiled; the caller restores its state.

    Raises:
        UserError: Some rank's host can't transport messages as configured; raised on all ranks.
    """
    plane: DataPlane | None = None
    failover: FailoverConnections | None = None
    start_s = config.timeouts.start_s
    with ExitStack() as opened:
        if settings.delegated:
            transport = _agreed_transport(config, rendezvous)
            ends = channel_specs(settings.payloads(model), settings.delegated, rendezvous.rank)
            opening = open_data_plane(rendezvous, *ends, transport, timeout_s=start_s)
            plane = opened.enter_context(opening)
            if plane is not None:
                links.join(plane)
            if failing := settings.failing_over:
                host = transport.addresses[0]
                connecting = open_failover_connections(rendezvous, failing, host, start_s)
                failover = opened.enter_context(connecting)
        trainer = StageTrainer(
            model,
            settings,
            rendezvous.rank,
            links,
            plane,
            failover,
            earlier=earlier,
            compiled=compiled,
        )
        yield opened.enter_context(closing(trainer))


@contextmanager
def open_gradient_sum(
    config: Config,
    replicas: Replicas,
    stage: StageTrainer,
    conditions: Sequence[LinkCondition] = (),
) -> Iterator[GradientSum | None]:
    """What sums a rank's gradients over the replicas; None where there is one replica.

    All ranks call this at the same point.

    Args:
        conditions: Emulated between the replicas.
    """
    own, cut, peers = replicas.own, config.parallelism, replicas.peers
    if own.is_alone:
        yield None
        return
    emulation, direct, whole_params = config.emulation, None, None
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stage.gradients))
    emulated = EmulatedSum(
        conditions, own.count, emulation.gradient_bytes or num_bytes, emulation.bucket_bytes
    )
    rounds = emulated.num_rounds

    def emulated_over(ranks: tuple[int, int]) -> EmulatedSum | None:
        between = pair_conditions(config, replicas.layout, ranks)
        bucket_bytes = emulation.bucket_bytes
        return EmulatedSum(between, 2, bucket_bytes, bucket_bytes) if between else None

    if config.routes.reduction == "direct":
        mesh = make_data_mesh(replicas.layout.peers(replicas.pipeline.rank), cut.tensor)
        with progress.within(config.timeouts.compile_s, "compiles the sum over replicas"):
            direct = DirectSum(
                mesh,
                stage.gradients,
                emulated if conditions else None,
                config.direct_timeout_s,
                stage.shares,
            )
            whole_params = stage.shares and DirectGather(mesh, stage.params, stage.shares)
    gradient_sum = GradientSum(
        replicas,
        direct,
        num_rounds=rounds,
        num_bytes=num_bytes,
        emulated_over=emulated_over,
        timeout_s=config.direct_timeout_s,
        gather=whole_params,
    )
    if direct is not None and not config.reduction_fails_over:
        yield gradient_sum
        return
    transport = replace(_agreed_transport(config, peers), sidecars=1, number=OF_REPLICAS)
    with open_data_plane(
        peers,
        *sum_channels(stage.gradients, own),
        transport,
        SidecarPlane,
        config.timeouts.start_s,
    ) as plane:
        assert plane is not None  # there are other replicas
        plane.emulate(of_route(conditions, "delegated"))
        waits_s = config.timeouts.step_s
        delegated = DelegatedSum(plane, own, peers.members, stage.gradients, waits_s, stage.shares)
        rounds = delegated.num_rounds if direct is None else rounds
        plane.events()  # drop those of the start
        yield replace(gradient_sum, delegated=delegated, num_rounds=rounds, plane=plane)


def listening_host(config: Config, rendezvous: Rendezvous) -> str:
    """The address at which other ranks reach this one; all ranks call this together."""
    return _agreed_transport(config, rendezvous).addresses[0]


def _agreed_transport(config: Config, rendezvous: Rendezvous) -> TransportSettings:
    """This host's transport settings; an error on one host is raised on all ranks."""
    loopbacks = set(gather(rendezvous, str, loopback_identity()))
    with raised_together(rendezvous):
        return transport_settings(
            config, one_loopback=len(loopbacks) == 1, coordinator_host=coordinator_host()
        )


def resize_slots(
    rendezvous: Rendezvous, trainer: StageTrainer, slots: Mapping[Channel, int]
) -> str:
    """Give channels the slots that a plan needs, and free others; all ranks call it between steps.

    Args:
        slots: The number of slots of each delegated channel, the same on all ranks.

    Returns:
        The copy backends and the slots' bytes, in words; "" if no link is delegated.
    """
    kept = gather(rendezvous, tuple[str, ...], trainer.free_slots(slots, sending=True))
    trainer.free_slots(slots, sending=False, keep=frozenset(chain(*kept)))
    add_slots(rendezvous, trainer, slots)
    own = trainer.delegated
    mine = (own.send_backend, own.slot_bytes) if own else ("", 0)
    of_ranks = gather(rendezvous, tuple[str, int], mine)
    if not slots:
        return ""
    backends = " and ".join(sorted({backend for backend, _ in of_ranks if backend}))
    slot_bytes = sum(num_bytes for _, num_bytes in of_ranks)
    return f"delegated messages are copied by {backends}; slots for them: {slot_bytes:,} bytes"


def add_slots(rendezvous: Rendezvous, trainer: StageTrainer, slots: Mapping[Channel, int]) -> None:
    """Give channels the slots that a plan needs; an exchange must follow before a rank sends."""
    trainer.add_slots(slots, sending=True)
    rendezvous.exchange({})
    trainer.add_slots(slots, sending=False)


def transport_settings(
    config: Config, *, one_loopback: bool, coordinator_host: str
) -> TransportSettings:
    """This host's transport settings; `listening_addresses` explains the addresses."""
    transport = config.transport
    configured = None if transport.addresses == "auto" else transport.addresses
    return TransportSettings(
        addresses=listening_addresses(
            configured, one_loopback=one_loopback, coordinator_host=coordinator_host
        ),
        lanes=None if transport.lanes == "auto" else transport.lanes,
        sidecars=1 if transport.sidecars == "auto" else transport.sidecars,
        chunk_bytes=transport.chunk_bytes,
        checksum=transport.checksum,
        silent_s=max(_LEAST_SILENT_S, min(_SILENT_S, config.timeouts.step_s / 2)),
        backend=transport.backend,
    )
