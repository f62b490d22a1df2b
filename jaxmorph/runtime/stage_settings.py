"""The settings from which a rank's stage is built, besides the model."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import optax

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.copies.choosing import AUTO
from jaxmorph.placement import ALONE, Placement, PlacementKind, Replica
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.records import Link
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.payloads import channel_payloads
from jaxmorph.runtime.queue import Pace
from jaxmorph.schedule.ops import OpKind
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel


@dataclass(frozen=True)
class StageSettings:
    """The settings from which a stage is built, besides the model.

    Attributes:
        layers: The layers of every virtual stage, in the order of the pipeline.
        shapes: The data of one microbatch.
        seed: The seed of the initial parameters, which don't depend on the number of stages.
        stash: Whether F keeps what B needs, or B computes it again.
        kinds: The kinds of op to compile.
        weight_group: How many microbatches one W covers.
        optimizer: AdamW's settings, or an Optax transformation: see `StageOptimizer`.
        pace: How long this stage's ops last, each of one chunk; None: as long as they take.
        transfer_timeout_s: How long to wait for a transfer.
        num_chunks: Virtual stages per rank.
        placement_kind: How virtual stages are placed on ranks.
        num_devices: Devices of a rank, over which its parameters are split.
        ranks: The run's rank of each stage; empty: the pipeline's own numbers.
        replica: Which copy of the pipeline the stage belongs to.
        divides_optimizer: Whether each replica keeps only its share of the optimizer's state.
        weights: Where to read stored weights; None: parameters start from `seed`.
        direct: The links that may be on the direct route; None: all of them.
        delegated: The links that may be delegated; programs for both routes are compiled ahead.
        fails_over: Whether a link becomes delegated when its direct path fails: then all links must
            be in `delegated`.
        hands_over: Whether such a link also becomes delegated when it becomes slow.
        direct_timeout_s: How long an emulated direct transfer may take once both ends have come to
            it; None: `transfer_timeout_s`.
        copies: How payloads are copied into slots: a backend's name, or "auto".
        free_slots_s: How long to wait until channels are at rest, so that slots that a plan doesn't
            need can be freed; None: keep them.
    """

    layers: tuple[range, ...]
    shapes: MicrobatchShapes
    seed: int
    kinds: frozenset[OpKind]
    optimizer: OptimizerSettings | optax.GradientTransformation
    stash: Literal["full", "recompute"] = "full"
    pace: Pace | None = None
    transfer_timeout_s: float = 60.0
    num_chunks: int = 1
    weight_group: int = 1
    placement_kind: PlacementKind = "wrap"
    num_devices: int = 1
    ranks: tuple[int, ...] = ()
    replica: Replica = ALONE
    divides_optimizer: bool = False
    weights: str | None = None
    direct: frozenset[Link] | None = None
    delegated: frozenset[Link] = frozenset()
    fails_over: bool = False
    hands_over: bool = False
    direct_timeout_s: float | None = None
    copies: str = AUTO
    free_slots_s: float | None = None

    @property
    def failing_over(self) -> frozenset[Link]:
        """The links that become delegated when their direct path fails."""
        if not self.fails_over:
            return frozenset()
        return self.delegated if self.direct is None else self.direct & self.delegated

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.layers) // self.num_chunks

    @property
    def placement(self) -> Placement:
        """Which rank runs which virtual stage."""
        return Placement(self.num_ranks, self.num_chunks, self.placement_kind)

    def own_stages(self, rank: int) -> list[int]:
        """The virtual stages of a rank, in the order of its chunks."""
        return self.placement.own_stages(rank)

    def chunks_of(self, rank: int) -> list[tuple[range, bool, bool]]:
        """The layers of each of a rank's chunks, and whether it has the embedding and the head."""
        last = len(self.layers) - 1
        return [(self.layers[at], at == 0, at == last) for at in self.own_stages(rank)]

    def message_bytes(self, model: PipelineModel) -> int:
        """Bytes of an activation, and of a gradient; 0 where there is only one stage."""
        payloads = self.payloads(model).items()
        carried = (it for channel, it in payloads if channel.payload is Payload.ACTIVATION)
        return max((prod(it.shape) * it.dtype.itemsize for it in carried), default=0)

    def payloads(self, model: PipelineModel) -> dict[Channel, PayloadShape]:
        """Every channel of the pipeline, with the payload of one message."""
        return channel_payloads(model, self.placement, self.shapes, self.num_devices)
