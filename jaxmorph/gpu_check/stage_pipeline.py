"""One process's stage of two, as in a run of training: programs, queue, optimizer and sidecar."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, Sharding

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.gpu_check.settings import Sizes, build_gpt2
from jaxmorph.gpu_check.stage_task import (
    CLIP_NORM,
    MICROBATCHES,
    NUM_STAGES,
    batch_of,
    optimizer_of,
)
from jaxmorph.program.check import check
from jaxmorph.program.instructions import Channel, Payload, RankProgram
from jaxmorph.program.lowering import lower
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.link_connections import open_data_plane
from jaxmorph.runtime.payloads import channel_specs
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import StepTotals, rank_report, total
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import Link, Route, StageCosts
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.model import cut_layers
from jaxmorph.training.gradients import apply_gradients
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.plane import DataPlane

LINK = Link(0, 1)
TRANSFER_S = 20.0
"""For how long a process waits for a message of the other one."""

_SCHEDULE = "zb-h2"


@dataclass(frozen=True)
class StageStep:
    """A step as one stage has seen it; its gradients are still the trainer's.

    Attributes:
        totals: Loss and norm, of both stages.
        began_s: When it began, by the monotonic clock.
        ops: When each op ran on this stage.
    """

    totals: StepTotals
    began_s: float
    ops: list[Stamp]

    def ran_s(self) -> float:
        """For how long this stage's queue had an op to run."""
        return sum(stamp.duration_s for stamp in self.ops)

    def durations_ms(self, kind: OpKind) -> list[float]:
        """How long each of its ops of a kind took."""
        return [1e3 * stamp.duration_s for stamp in self.ops if stamp.label.kind == kind]


@dataclass(frozen=True)
class StagePipeline:
    """One of two stages, all of whose messages travel by sidecars.

    Attributes:
        rendezvous: The other stage's process and this one.
        route: What the trainer has of that.
        program: This stage's instructions for a step.
        activation: What a message to the last stage carries.
    """

    sizes: Sizes
    rendezvous: Rendezvous
    trainer: StageTrainer
    plane: DataPlane
    route: DelegatedRoute
    program: RankProgram
    activation: PayloadShape

    @property
    def rank(self) -> int:
        """Which stage this is."""
        return self.rendezvous.rank

    @property
    def placement(self) -> Sharding:
        """Where the stage keeps its arrays."""
        return self.trainer.executor.placement

    def step(self, number: int) -> StageStep:
        """Run a step's forwards and backwards.

        Args:
            number: The step's, above that of all messages before it.
        """
        tokens, targets = batch_of(self.sizes, number)
        inputs, began_s = StepInputs(tokens, targets, 1.0 / targets.size), time.monotonic()
        outcome = self.trainer.run(self.program, inputs, number)
        report, _ = rank_report(outcome, self.trainer.squared_norm(), began_s, 0)
        totals = total(self.rendezvous.exchange(report))
        return StageStep(totals, began_s, [s for s in outcome.stamps if isinstance(s.label, Op)])

    def update(self, step: StageStep) -> None:
        """Apply a step's gradients, and wait until that is done.

        Args:
            step: The one that ran last.
        """
        apply_gradients(self.trainer, step.totals, CLIP_NORM)
        jax.block_until_ready(self.trainer.params)

    def delay_messages(self, delay_ms: float) -> None:
        """Have messages come so much later from now on; both processes call this.

        Args:
            delay_ms: Milliseconds, both ways.
        """
        self.plane.emulate([LinkCondition((LINK.lower, LINK.upper), latency_ms=delay_ms)])
        self.rendezvous.exchange({})


def stage_programs(route: Route, num_tied: int) -> tuple[RankProgram, ...]:
    """Both stages' instructions for a step.

    Args:
        num_tied: How many parameters both have a copy of.
    """
    schedule = FIXED_SCHEDULES[_SCHEDULE](NUM_STAGES, MICROBATCHES)
    planned = simulate(schedule, StageCosts.uniform(NUM_STAGES, 1.0, 1.0, 1.0))
    programs = lower(schedule, planned, {LINK: route}, num_tied=num_tied)
    check(programs)
    return programs


@contextmanager
def open_pipeline(
    sizes: Sizes, rendezvous: Rendezvous, alone: Mesh | None
) -> Iterator[StagePipeline]:
    """A process's stage, ready to run; what it started is ended however this ends.

    Args:
        rendezvous: The other stage's process and this one, which both call this.
        alone: The mesh of this process's device, where JAX hasn't joined the two.
    """
    model = build_gpt2(sizes, "float32")
    settings = StageSettings(
        layers=cut_layers(sizes.num_layers, NUM_STAGES),
        microbatch_size=sizes.microbatch_size,
        sequence_length=sizes.sequence_length,
        seed=0,
        kinds=frozenset((OpKind.F, OpKind.B, OpKind.W)),
        optimizer=optimizer_of(sizes),
        transfer_timeout_s=TRANSFER_S,
        direct=frozenset(),  # NCCL refuses two processes on one GPU
        delegated=frozenset((LINK,)),
    )
    payloads = settings.payloads(model)
    ends = channel_specs(payloads, settings.delegated, rendezvous.rank)
    with open_data_plane(rendezvous, *ends) as plane:
        with jax.default_matmul_precision("highest"):
            trainer = StageTrainer(model, settings, rendezvous.rank, plane=plane, alone=alone)
        with closing(trainer):
            assert plane is not None  # both stages have channels
            assert trainer.delegated is not None
            programs = stage_programs("delegated", len(model.tied))
            trainer.make_room(slots_needed(programs))
            rendezvous.exchange({})  # so that both have it
            yield StagePipeline(
                sizes,
                rendezvous,
                trainer,
                plane,
                trainer.delegated,
                programs[rendezvous.rank],
                payloads[Channel(Payload.ACTIVATION, LINK.lower, LINK.upper)],
            )
