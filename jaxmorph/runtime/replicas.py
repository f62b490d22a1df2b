"""A rank's place among the replicas of the pipeline, and what they agree on at the end of a step.

A rank belongs to two groups: the stages of its replica, and the same stage in all replicas. First
the ranks of a stage exchange what they have, then the ranks of a replica do. So all ranks know the
sum over all, and no exchange joins more ranks than one of these groups has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from jaxmorph.placement import ALONE, Layout, Replica
from jaxmorph.plain_json import Json, parse
from jaxmorph.runtime.executor import StepOutcome
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank, gather
from jaxmorph.runtime.report import SumTook, named_parts

_Part = TypeVar("_Part")


@runtime_checkable
class JoinsReplicas(Protocol):
    """A part of a rank's report that all replicas must know alike (`named_parts`).

    A stage's ranks in all replicas report such a part, or none of them does.
    """

    def joined(self, of_replicas: Sequence[Self], /) -> Self:
        """The part that stands for those of a stage's ranks in all replicas."""
        ...


@dataclass(frozen=True)
class StageOfReplica:
    """A stage's report to the same stage of other replicas, once its ops have run.

    Attributes:
        loss: Its part of the mean loss.
        aux: Its auxiliary losses by name.
        is_summed: Whether the gradients were summed over the direct route.
        sum_s: How long that took this replica.
        parts: `JoinsReplicas`, by the names of their dataclasses.
    """

    loss: float
    aux: Mapping[str, float]
    is_summed: bool
    sum_s: float
    parts: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Replicas:
    """A rank's replica, and both groups of ranks that it belongs to.

    Attributes:
        layout: Of all ranks.
        pipeline: The ranks of its replica, by stage.
        peers: The ranks of its stage, by replica.
        all_ranks: Of the run.
    """

    own: Replica
    layout: Layout
    pipeline: Rendezvous
    peers: Rendezvous
    all_ranks: Rendezvous

    @classmethod
    def of(cls, rendezvous: Rendezvous, layout: Layout) -> Self:
        """Divide a run's ranks into replicas; all ranks call this together."""
        if layout.num_replicas == 1:
            peers = SoleRank(rendezvous.members[rendezvous.rank])
            return cls(ALONE, layout, rendezvous, peers, rendezvous)
        index, stage = layout.positions[rendezvous.rank]
        own, peers = layout.ranks[index], layout.peers(stage)
        return cls(
            Replica(index, layout.num_replicas),
            layout,
            rendezvous.group(f"replica {own}", own),
            rendezvous.group(f"stage {peers}", peers),
            rendezvous,
        )

    def join(
        self, outcome: StepOutcome, parts: Sequence[Any], took: SumTook, *, is_summed: bool
    ) -> tuple[StepOutcome, list[Any], bool]:
        """Exchange a step's scalars and parts among the replicas of this stage.

        Returns:
            The outcome with the loss of all replicas, the parts, and whether all have summed their
            gradients.
        """
        shared = named_parts(each for each in parts if isinstance(each, JoinsReplicas))
        own = StageOfReplica(outcome.loss, outcome.aux, is_summed, took.seconds, shared)
        found = gather(self.peers, StageOfReplica, own)
        aux = {name: sum(each.aux[name] for each in found) / len(found) for name in outcome.aux}
        # Without its own gradients, which are summed by now and would take memory until the end.
        loss = sum(each.loss for each in found)
        joined = replace(outcome, accumulators=(), loss=loss, aux=aux)
        joined_parts = [
            _joined(each, found) if isinstance(each, JoinsReplicas) else each for each in parts
        ]
        joined_parts.append(replace(took, seconds=min(each.sum_s for each in found)))
        return joined, joined_parts, all(each.is_summed for each in found)

    def of_stage(self, kind: type[_Part], own: _Part) -> list[_Part]:
        """This stage's values in all replicas."""
        return gather(self.peers, kind, own)


def _joined(part: Any, found: Sequence[StageOfReplica]) -> Any:
    kind = type(part)
    sent = (each.parts.get(kind.__name__) for each in found)
    return part.joined(
        [kind() if each is None else parse(kind, each, f"replica {index}'s {kind.__name__}")
         for index, each in enumerate(sent)]
    )  # fmt: skip
