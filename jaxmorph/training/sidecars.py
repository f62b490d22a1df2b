"""How many sidecars each rank gets, from what one of them had to do in the measured steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmorph.config import Config
from jaxmorph.control.rank_times import RankTimes
from jaxmorph.program.slots_needed import FIRST_SLOTS
from jaxmorph.runtime.rendezvous import Rendezvous, gather
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.transport.host import cores_identity, usable_cores
from jaxmorph.transport.several_sidecars import sidecars_needed


@dataclass(frozen=True)
class SidecarLoad:
    """What one rank's sidecar had to do, and where.

    Attributes:
        step_s: Processor time for a step's messages; 0: none was delegated.
        host: The same for ranks that share their processor cores.
        cores: Those that the rank may use, with the ranks that share them.
        is_used: Whether the rank has a delegated link.
        compute_s: How long the busiest stage computes in a step; 0: only rank 0 has measured that.
    """

    step_s: float
    host: str
    cores: float
    is_used: bool = True
    compute_s: float = 0.0


@dataclass(frozen=True)
class SidecarChoice:
    """The sidecars of each rank.

    Attributes:
        busy: How much of a step the busiest rank's sidecar alone would compute; 0: not measured.
    """

    count: int
    busy: float = 0.0

    def __str__(self) -> str:
        each = "1 sidecar a rank" if self.count == 1 else f"{self.count} sidecars a rank"
        return f"{each} (one would be busy for {self.busy:.0%} of a step)" if self.busy else each


def agree_on_sidecars(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    loads_s: Sequence[float],
    steps: Sequence[Sequence[RankTimes]],
) -> str:
    """Give each rank the sidecars that it needs; all ranks call this between two steps.

    Args:
        loads_s: The processor time of this rank's sidecar for a step, in each series of measured
            steps.
        steps: All ranks' times in the measured steps, on rank 0.

    Returns:
        How many there are, in words; "" if no rank has any.
    """
    transport, emulation = config.transport, config.emulation
    # A sidecar that was replaced meanwhile has used less than before.
    own = SidecarLoad(
        max([0.0, *loads_s]),
        cores_identity(),
        usable_cores(),
        trainer.delegated is not None,
        min(map(busiest_stage_s, steps), default=0.0),
    )
    loads = gather(rendezvous, SidecarLoad, own)
    if transport.sidecars == "auto":
        # Several would share no emulated bandwidth; RDMA leaves the work to the network cards.
        # The host's budget counts one slot for each sidecar of a channel up to `FIRST_SLOTS`.
        fixed = transport.backend != "tcp" or emulation.links or emulation.trace
        most = FIRST_SLOTS if config.limits.host_gib is not None else None
        choice = choose_sidecars(loads, most=1 if fixed else most)
        if choice.count > 1:
            trainer.change_sidecars(rendezvous, choice.count)
    else:
        choice = SidecarChoice(transport.sidecars)
    return str(choice) if any(load.is_used for load in loads) else ""


def choose_sidecars(loads: Sequence[SidecarLoad], most: int | None = None) -> SidecarChoice:
    """The number that the busiest rank needs, within the cores of the rank that has fewest.

    A step lasts at least as long as its busiest stage computes, so that is the time in which a
    sidecar must move a step's messages.
    """
    compute_s = loads[0].compute_s
    busy = max(load.step_s for load in loads) / compute_s if compute_s else 0.0
    sharing = Counter(load.host for load in loads)
    cores = min(load.cores / sharing[load.host] for load in loads) - 1  # the rank itself takes one
    return SidecarChoice(sidecars_needed(busy, cores if most is None else min(cores, most)), busy)


def busiest_stage_s(ranks: Sequence[RankTimes]) -> float:
    """How long the stage computes in a step that computes longest."""
    return max(each.busy_ms for each in ranks) / 1e3
