"""The end of a step in a run with replicas: they agree on losses, gradients, and new parameters.

This module chooses the route that carries them; `reduction` has the routes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmorph.plain_json import Json
from jaxmorph.progress import progress
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.direct import is_of_path
from jaxmorph.runtime.emulated_links import EmulatedSum
from jaxmorph.runtime.executor import StepOutcome
from jaxmorph.runtime.rank_process import in_one_line
from jaxmorph.runtime.reduction import DelegatedSum, DirectGather, DirectSum
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.report import LinkEvent, SumTook
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.stage.mesh import make_data_mesh
from jaxmorph.transport.plane import DataPlane

Tree = Any
_FAILED_S = 1e6  # longer than any sum


@dataclass
class GradientSum:
    """Sums a step's gradients, losses and reports over the replicas; all their ranks call it.

    Attributes:
        direct: None where the route is delegated from the start.
        delegated: Takes over when the direct route fails; None: a failure ends the run.
        num_rounds: How many messages follow one another in a sum.
        num_bytes: Of the stage's gradients.
        emulated_over: What is emulated of a direct sum over two ranks of the run.
        timeout_s: How long an emulated delay may be.
        has_failed_over: Whether the delegated route has taken over. Its time is then not reported:
            it is no sign of a slow pair.
        events: What has changed since the last `take_events`.
        gather: Makes whole parameters from shares; only with a direct route.
        plane: Carries the delegated sums.
    """

    replicas: Replicas
    direct: DirectSum | None
    delegated: DelegatedSum | None = None
    num_rounds: int = 2
    num_bytes: int = 1
    emulated_over: Callable[[tuple[int, int]], EmulatedSum | None] = lambda ranks: None
    timeout_s: float = math.inf
    events: list[LinkEvent] = field(default_factory=list)
    gather: DirectGather | None = None
    has_failed_over: bool = False
    plane: DataPlane | None = None

    def run(
        self, stage: StageTrainer, outcome: StepOutcome, parts: Sequence[Any], step: int
    ) -> tuple[StepOutcome, list[Any]]:
        """Sum over the replicas: the stage's gradients, and the outcome and parts that it returns.

        A direct sum may fail in only some replicas, so all agree whether it succeeded before
        the replicas' own gradients are dropped.
        """
        if self.direct is not None:
            # A direct sum has a deadline, and a late replica must not look like a failed path.
            progress.stamp("waits for other replicas, to sum gradients")
            self.replicas.of_stage(bool, True)
        progress.stamp("sums its gradients with those of other replicas")
        began_s = time.monotonic()
        if self.direct is None:  # in all replicas
            sums, failure = self._over_hosts(stage, step), ""
        else:
            sums, failure = self._directly(self.direct, stage.gradients, step)
        sum_s = 0.0 if self.has_failed_over else time.monotonic() - began_s
        outcome, parts, all_have = self.replicas.join(
            outcome,
            parts,
            SumTook(sum_s, self.num_rounds, self.num_bytes),
            is_summed=sums is not None,
        )
        if sums is None or not all_have:
            sums = self._over_hosts(stage, step, failure)
        stage.replace_gradients(sums)
        return outcome, parts

    def _over_hosts(self, stage: StageTrainer, step: int, failure: str = "") -> Tree:
        return self._instead_of_direct(failure).run(stage.gradients, step)

    def squared_norm(self, stage: StageTrainer) -> float:
        """The sum of squares of the stage's summed gradients, the same in all replicas."""
        own = stage.squared_norm()
        return own if stage.shares is None else sum(self.replicas.of_stage(float, own))

    def complete(self, stage: StageTrainer, step: int) -> None:
        """Make the stage's parameters whole, where each replica has updated its share.

        Shares are dropped only once all replicas have whole parameters, as gradients are in `run`.
        """
        if stage.shares is None:
            return
        progress.stamp("exchanges its updated parameters with other replicas")
        whole, failure = self._directly(self.gather, stage.params, step)
        # Where the route is delegated already, all know it.
        all_have = self.direct is not None and all(self.replicas.of_stage(bool, whole is not None))
        if whole is None or not all_have:
            delegated = self._instead_of_direct(failure)
            whole = delegated.gather(stage.params, step)
        stage.complete(whole)

    def _directly(
        self, program: DirectSum | DirectGather | None, arrays: Tree, step: int
    ) -> tuple[Tree | None, str]:
        """What the program makes, or None with the reason if it can't be made directly."""
        if self.direct is None or program is None:
            return None, ""
        try:
            return program.run(arrays, step), ""
        except Exception as error:
            if self.delegated is None or not _other_route_helps(error):
                raise
            return None, in_one_line(error)

    def _instead_of_direct(self, failure: str) -> DelegatedSum:
        """Switch to the delegated route, and return it."""
        if self.direct is not None:
            self.direct, self.gather, self.has_failed_over = None, None, True
            why = failure or "it failed in another replica"
            detail = f"gradients are summed over hosts from now on: {why}"
            self.events.append(LinkEvent(time.monotonic(), EventKind.ROUTE_CHANGED, detail))
        if self.delegated is None:
            raise ValueError("gradients have no route to the other replicas")
        return self.delegated

    def probe(self, gradients: Tree, step: int) -> dict[str, float]:
        """Seconds that a sum takes over each pair of replicas with this one, by names like `0-2`.

        All replicas' ranks of the stage call it together, between two steps.

        Args:
            gradients: Of the form of the stage's; they stay as they are.
        """
        own, found = self.replicas.own, {}
        for pair in combinations(range(own.count), 2):
            if own.index in pair:
                progress.stamp(f"sums with one other replica, to see how long that takes: {pair}")
                found[str(Link(*pair))] = self._pair_s(pair, gradients, step)
        return found

    def time_ranks(
        self, ranks: tuple[int, int], gradients: Tree, num_bytes: int, step: int
    ) -> float:
        """How many seconds a direct sum of so many bytes takes over two ranks of the run.

        They may be of different stages. Both call it together, between two steps.

        Args:
            gradients: Arrays on the devices that sum.
        """
        progress.stamp(f"sums with one other rank, to see how long that takes: {ranks}")
        where = jax.tree.leaves(gradients)[0].sharding
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, PartitionSpec())
        bucket = jax.device_put(np.zeros(num_bytes // 4, np.float32), where)
        mesh = make_data_mesh(ranks, len(where.device_set))
        emulated = self.emulated_over(ranks)
        return _timed_s(lambda: DirectSum(mesh, bucket, emulated, self.timeout_s), bucket, step)

    def _pair_s(self, pair: tuple[int, int], gradients: Tree, step: int) -> float:
        def alone() -> DirectSum | DelegatedSum:
            if self.direct is None:
                return self._instead_of_direct("").of_pair(pair)
            return self.direct.of_pair(pair, gradients)

        return _timed_s(alone, gradients, step)

    def take_events(self) -> list[LinkEvent]:
        """What has changed since the last call."""
        events, self.events = self.events, []
        of_plane = self.plane.events() if self.plane is not None else ()
        return [*events, *map(self._of_plane, of_plane)]

    def _of_plane(self, record: Json) -> LinkEvent:
        """An event of the connection with another replica, which is no link of the pipeline."""
        event = LinkEvent.of(record)
        if event.peer is None:
            return event
        where = f"sums with rank {self.replicas.peers.members[event.peer]}"
        return replace(event, peer=None, detail=f"{where}: {event.detail}")


def _timed_s(make: Callable[[], DirectSum | DelegatedSum], gradients: Tree, step: int) -> float:
    try:
        alone = make()
        alone.run(gradients, step)  # so that both begin the next one together
        began_s = time.monotonic()
        alone.run(gradients, step)
    except Exception as error:  # lack of memory too: it only measures
        if not (isinstance(error, jax.errors.JaxRuntimeError) or _other_route_helps(error)):
            raise
        return _FAILED_S
    return time.monotonic() - began_s


def _other_route_helps(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or is_of_path(error)
