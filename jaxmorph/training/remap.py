"""Ranks change places in the mesh: noticed and decided between steps, carried out between loops.

The rank that records the run watches how long the sums of gradients over replicas take
(`control.remap`). When it has found a better layout, it sends that to all ranks with the scalars
that end a step. Ranks that get another stage compile it while all still train. Once these are
ready, all ranks leave the loop together. Then, in `train` or a script's `Trainer`, ranks send each
other the states of the stages that they take over, close their stages, open the next ones, and
continue at the same step.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.control.remap import (
    SlowPair,
    SumWatch,
    by_hosts,
    by_other_stages,
    choose_layout,
    slow_pairs,
)
from jaxmorph.placement import Layout, Position
from jaxmorph.progress import progress
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.compiled_stage import CompiledStage
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.link_connections import open_connections
from jaxmorph.runtime.rank_process import in_one_line
from jaxmorph.runtime.reduction import BUCKET_BYTES
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import SumTook
from jaxmorph.runtime.stage_state import receive_state, send_state
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.stage.compiling import in_background
from jaxmorph.training.callbacks import SaveRequest, SkippedSteps
from jaxmorph.training.loop import GOES_ON, Callback, Effect, Loop
from jaxmorph.training.open_stage import listening_host
from jaxmorph.training.step_recorder import StepRecorder

_log = logging.getLogger(__name__)

Parts = tuple[Any, ...]
"""The state of a stage: see `StageTrainer.state`."""


@dataclass(frozen=True)
class Moves:
    """What ranks do after a step.

    Attributes:
        ranks: The next layout, by replica and stage; empty: there is no new one.
        probe: The stages whose ranks time sums over each pair of replicas.
        again: Pairs of ranks that time another sum, each with the bytes of that sum.
        ready: Whether this rank has compiled what it needs for the last layout.
    """

    ranks: tuple[tuple[int, ...], ...] = ()
    probe: tuple[int, ...] = ()
    again: tuple[tuple[int, int, int], ...] = ()
    ready: bool = True

    def joined(self, of_replicas: Sequence[Self]) -> "Moves":
        """The moves of the replica that records the run; ready if all ranks of the stage are."""
        asked = (each for each in of_replicas if each.ranks or each.probe or each.again)
        return replace(next(asked, Moves()), ready=all(each.ready for each in of_replicas))


@dataclass(frozen=True)
class PairTimes:
    """How many seconds sums took.

    Attributes:
        took_s: The sum of a stage over each pair of replicas, such as `0-2`.
        of_ranks: Sums over pairs of ranks that were slow before, such as `1-5`.
    """

    took_s: Mapping[str, float] = field(default_factory=dict)
    of_ranks: Mapping[str, float] = field(default_factory=dict)

    def joined(self, of_replicas: Sequence[Self]) -> "PairTimes":
        """All pairs' times."""
        return PairTimes(
            least_of(each.took_s for each in of_replicas),
            least_of(each.of_ranks for each in of_replicas),
        )


def least_of(of_all: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The shortest of each pair's times."""
    found: dict[str, float] = {}
    for each in of_all:
        for pair, took_s in each.items():
            found[pair] = min(took_s, found.get(pair, took_s))
    return found


@dataclass(frozen=True)
class Decision:
    """A better layout, and why.

    Attributes:
        slow: All pairs that the layout avoids.
    """

    layout: Layout
    slow: tuple[SlowPair, ...]
    reason: str


@dataclass
class Moved:
    """Ranks have changed places in the mesh.

    `stage` and `state` take memory, and are emptied once the stage is open.

    Attributes:
        step: The next step.
        stage: The rank's closed stage, if the rank keeps it.
        compiled: The rank's new stage, if it gets another one.
        state: The state of the new stage, on the host.
        slow: The pairs of ranks that the layout avoids, on the rank that decides.
        skipped: Has counted the skipped steps so far.
        began_s: When the step before ended, on the monotonic clock.
        exchanged_s: Seconds from then until all ranks had their states.
    """

    layout: Layout
    step: int
    stage: StageTrainer | None
    compiled: CompiledStage | None
    state: Sequence[Any]
    slow: tuple[SlowPair, ...]
    skipped: SkippedSteps
    began_s: float
    exchanged_s: float

    def restore(self, opened: StageTrainer) -> None:
        """Restore the state of an opened stage, unless the rank has kept its stage."""
        if self.stage is None:
            opened.restore(self.state)
        self.stage, self.compiled, self.state = None, None, ()

    def report(self, recorder: StepRecorder) -> None:
        """Record that training continues, and how long it was interrupted."""
        opened_s = time.monotonic() - self.began_s - self.exchanged_s
        detail = (
            f"no step between for {self.exchanged_s + opened_s:.2g} s: {self.exchanged_s:.2g} s to "
            f"end and exchange states, {opened_s:.2g} s to open links, measure and plan"
        )
        phases_s = {"exchange": self.exchanged_s, "open": opened_s}
        recorder.emit(self.step, EventKind.REOPENED, detail, {"phases_s": phases_s})


class Remapping(Callback):
    """Ends the loop when ranks are to change places.

    Args:
        predicted_s: See `choose_layout`.
        gradient_sum: Times sums over pairs.
        compile_stage: Compiles a stage of the mesh for this rank.
        known: The pairs that were slow before: nothing says yet that they have recovered.
        active: Whether this rank decides.
        last_step: Nothing changes after it.

    Attributes:
        layout: The layout of the next loop; None: it doesn't change.
        compiled: This rank's next stage, if that is another one.
        slow: On the rank that decides, the slow pairs that layouts avoid.
    """

    def __init__(
        self,
        config: Config,
        predicted_s: Callable[[Mapping[Link, float]], float],
        recorder: StepRecorder,
        gradient_sum: GradientSum,
        stage: StageTrainer,
        compile_stage: Callable[[Position], CompiledStage],
        *,
        known: tuple[SlowPair, ...] = (),
        active: bool,
        last_step: int | None,
    ) -> None:
        self.layout: Layout | None = None
        self.compiled: CompiledStage | None = None
        self._awaited: Layout | None = None  # the next one, while ranks compile
        self._compile_stage = compile_stage
        self._compiling: Future[CompiledStage] | None = None
        self.slow = known
        self._config, self._predicted_s = config, predicted_s
        self._gradient_sum, self._stage = gradient_sum, stage
        self._before = layout = gradient_sum.replicas.layout
        self._compares = [
            len({layout.host_of[rank] for rank in layout.peers(stage)}) == layout.num_replicas
            for stage in range(len(layout.ranks[0]))
        ]
        self._to_probe: tuple[int, ...] = ()
        self._excess_s: dict[int, float] = {}  # of stages whose slow pairs are not known yet
        self._probed = PairTimes()
        self._pair_times_s: dict[int, Mapping[str, float]] = {}
        self._recorder, self._last_step = recorder, last_step
        self._active = active
        self._watch = SumWatch()
        self._deciding: Future[Decision | None] | None = None
        self._recheck_at: int | None = None  # the step in which known pairs are timed again
        self._slow_stages: set[int] = set()
        self._decision: Decision | None = None

    def report(self, step: int, took_s: float) -> tuple[Moves, PairTimes]:
        """What this rank decides, and the times of pairs that it has measured."""
        del took_s
        probed, self._probed = self._probed, PairTimes()
        return (Moves(ready=False) if step == self._last_step else self._due(step)), probed

    def _due(self, step: int) -> Moves:
        compiling = self._compiling
        ready = compiling is None or (compiling.done() and compiling.exception() is None)
        probe, self._to_probe = self._to_probe, ()
        if probe or self._deciding is None or not self._deciding.done():
            return Moves(probe=probe, again=self._to_recheck(step), ready=ready)
        decision, self._deciding = self._deciding.result(), None
        if decision is None:
            return Moves()
        self._decision = decision
        return Moves(decision.layout.ranks)

    def _to_recheck(self, step: int) -> tuple[tuple[int, int, int], ...]:
        """The known pairs that are to be timed now: one for each pair of hosts."""
        next_step = step + self._config.adaptation.recheck_steps
        self._recheck_at = self._recheck_at or next_step
        if step < self._recheck_at or self._is_busy or self._gradient_sum.direct is None:
            return ()
        self._recheck_at = next_step
        known = by_hosts(self._before, self.slow).values()
        return tuple((*each.ranks, each.bucket_bytes) for each in known)

    def after(self, result: StepResult) -> Effect:
        """End the loop if ranks move after this step; else watch its sums."""
        of_ranks = result.parts_of(Moves)
        if any(each.stop_asked for each in result.parts_of(SaveRequest)):
            return GOES_ON
        if self._awaited is not None and all(each.ready for each in of_ranks):
            return self._move(self._awaited, result.step)
        moves = of_ranks[0]
        if moves.ranks:
            self._prepare(replace(self._before, ranks=moves.ranks))
        if self._gradient_sum.replicas.pipeline.rank in moves.probe:
            self._probed = PairTimes(self._gradient_sum.probe(self._stage.gradients, result.step))
        if moves.again:
            self._probed = replace(self._probed, of_ranks=self._timed(moves.again, result.step))
        of_stages = result.parts_of(PairTimes)
        self._pair_times_s |= {
            stage: times.took_s for stage, times in enumerate(of_stages) if times.took_s
        }
        if self._active:
            self._forget(least_of(each.of_ranks for each in of_stages))
            if result.updated:
                self._observe(result)
            if not self.slow and not self._is_busy:
                self._go_back()
        return GOES_ON

    def _timed(self, again: Iterable[tuple[int, int, int]], step: int) -> dict[str, float]:
        """The times of those pairs that include this rank."""
        own, of_run = self._gradient_sum, self._gradient_sum.replicas.all_ranks
        return {
            str(Link(low, high)): own.time_ranks(
                (low, high), self._stage.gradients, num_bytes, step
            )
            for low, high, num_bytes in again
            if of_run.rank in (low, high)
        }

    @property
    def _is_busy(self) -> bool:
        """Whether a layout is being chosen or prepared."""
        return self._deciding is not None or self._awaited is not None

    def _prepare(self, layout: Layout) -> None:
        """Begin to compile this rank's stage of the next layout, if it is another one."""
        self._awaited, rank = layout, self._gradient_sum.replicas.all_ranks.rank
        divides = self._stage.shares is not None
        if rank in _sources(self._before, layout, divides=divides):
            at = layout.positions[rank]
            self._compiling = in_background(partial(self._compile_stage, at), "next stage")
            self._compiling.add_done_callback(_warn_of_failure)

    def _move(self, layout: Layout, step: int) -> Effect:
        self.layout = layout
        self.compiled = self._compiling and self._compiling.result()
        if self._decision is not None:
            self.slow = self._decision.slow
            self._recorder.emit(step, EventKind.REMAPPED, self._decision.reason)
        return Effect(ends=True)

    def change_places(self, loop: Loop, skipped: SkippedSteps) -> Moved:
        """Get the state of this rank's next stage; all ranks call this once their loops end."""
        if self.layout is None:
            raise ValueError("layout: got None, expected the one for which the loop has ended")
        timeouts, replicas, stage = self._config.timeouts, self._gradient_sum.replicas, self._stage
        # As at a start: some ranks compile while others wait for them.
        replicas.all_ranks.limit(max(timeouts.compile_s, timeouts.restore_s, timeouts.start_s))
        with progress.within(timeouts.restore_s, "exchanges the stages' states"):
            state = exchange_states(
                replicas.all_ranks,
                self._before,
                self.layout,
                stage.state,
                listening_host(self._config, replicas.all_ranks),
                timeouts.restore_s,
                divides=stage.shares is not None,
            )
        took_s = time.monotonic() - loop.began_s
        if state:
            stage.drop_state()
        return Moved(
            layout=self.layout,
            step=loop.next_step,
            stage=None if state else stage,
            compiled=self.compiled if state else None,
            state=state,
            slow=self.slow,
            skipped=skipped,
            began_s=loop.began_s,
            exchanged_s=took_s,
        )

    def _observe(self, result: StepResult) -> None:
        of_stages = result.parts_of(SumTook)
        took_s = [each.seconds for each in of_stages]
        sizes = [each.num_bytes for each in of_stages]
        by_others_s = by_other_stages(took_s, sizes, self._compares)
        self._watch = self._watch.after(took_s, result.step_s, by_others_s)
        slow = self._watch.slow()
        new, self._slow_stages = slow.keys() - self._slow_stages, {*slow}
        for stage in sorted(new):
            ranks = " and ".join(map(str, self._before.peers(stage)))
            detail = f"stage {stage}: the sum over ranks {ranks} takes {slow[stage]:.3g} s more"
            self._recorder.emit(result.step, EventKind.SUM_SLOW, detail)
        self._excess_s |= {stage: slow[stage] for stage in new}
        self._to_probe = tuple(sorted(new)) if self._before.num_replicas > 2 else ()
        if not self._is_busy:
            stages = [*self._excess_s]
            if pairs := [pair for stage in stages for pair in self._pairs(stage, of_stages[stage])]:
                self._deciding = in_background(partial(self._decide, pairs), "layout")

    def _forget(self, of_ranks: Mapping[str, float]) -> None:
        """Drop the pairs that have recovered."""
        recovered = {
            hosts
            for hosts, pair in by_hosts(self._before, self.slow).items()
            if pair.has_recovered(of_ranks.get(str(Link(*pair.ranks)), math.inf))
        }
        kept = (pair for pair in self.slow if self._before.hosts_of(pair.ranks) not in recovered)
        self.slow = tuple(kept)

    def _go_back(self) -> None:
        """Decide to return to the first layout, unless it is in use."""
        first = replace(self._before, ranks=self._config.layout.ranks)
        if first != self._before:
            reason = f"{self._moves_to(first)}: no pair of hosts is slow any more"
            self._deciding = Future()
            self._deciding.set_result(Decision(first, (), reason))

    def _pairs(self, stage: int, of_stage: SumTook) -> list[SlowPair]:
        """The slow pairs of ranks of a slow stage; none until they are known."""
        peers, took_s = self._before.peers(stage), self._pair_times_s.get(stage, {})
        if len(peers) > 2 and not took_s:
            return []
        excess_s = self._excess_s.pop(stage)
        delay_ms, usual_ms = (
            1e3 * each_s / of_stage.num_rounds for each_s in (excess_s, self._watch.usual_s[stage])
        )
        num_bytes = min(BUCKET_BYTES, of_stage.num_bytes)
        pairs = (sorted((peers[a], peers[b])) for a, b in slow_pairs(took_s, len(peers)))
        return [
            SlowPair((low, high), excess_s, delay_ms, usual_ms, num_bytes) for low, high in pairs
        ]

    def _decide(self, new: Sequence[SlowPair]) -> Decision | None:
        began_s = time.monotonic()
        pairs = (*self.slow, *new)
        links = possible_links(self._config.parallelism.stages)
        # Without a link of the first and the last stage that only tied gradients take.
        is_falcons = self._config.adaptation.remaps == "pipeline"
        pipeline = self._config.placement.links if is_falcons else ()
        found = choose_layout(self._before, pairs, links, self._predicted_s, pipeline)
        if found is None:
            return None
        took_s = time.monotonic() - began_s
        return Decision(found, pairs, f"{self._moves_to(found)}; chosen in {took_s:.2g} s")

    def _moves_to(self, found: Layout) -> str:
        was, now = self._before.positions, found.positions
        moved = [rank for rank in now if was[rank] != now[rank]]
        places = ", ".join(f"rank {rank} is {now[rank]}" for rank in moved)
        return f"{places}, instead of {' and '.join(str(was[rank]) for rank in moved)}"


def _warn_of_failure(compiling: "Future[CompiledStage]") -> None:
    if error := compiling.exception():
        _log.warning("no rank moves, as the next stage can't be compiled: %s", in_one_line(error))


def exchange_states(
    all_ranks: Rendezvous,
    before: Layout,
    after: Layout,
    own: Parts,
    host: str,
    timeout_s: float,
    *,
    divides: bool,
) -> Parts:
    """The state of this rank's new stage, () if it keeps its own; all ranks call this together.

    A rank gets it from the rank that had its place, over the hosts' network: on the devices'
    network the slow pair may be in between.

    Args:
        own: The state of its old stage.
        host: The address where this rank listens.
        divides: Whether each replica has a share of the optimizer's state.
    """
    sources = _sources(before, after, divides=divides)
    links = {Link.of(*pair) for pair in sources.items()}
    rank, found = all_ranks.rank, ()
    with open_connections(all_ranks, links, host, timeout_s, number=1) as of_links:
        for link in sorted(of_links):
            (connection,) = of_links[link]
            connection.limit(timeout_s)
            peer = sum(link) - rank
            # The lower rank sends first, so that no two ranks only send.
            for sends in (rank < peer, rank > peer):
                if sends and sources.get(peer) == rank:
                    send_state(connection, own)
                elif not sends and sources.get(rank) == peer:
                    found = receive_state(connection)
        all_ranks.exchange({})  # no end closes before the other one has read
    return found


def _sources(before: Layout, after: Layout, *, divides: bool) -> dict[int, int]:
    """For each rank that gets another state, the rank that sends it."""
    was, sources = before.positions, {}
    for rank, at in after.positions.items():
        if was[rank].stage != at.stage or (divides and was[rank] != at):
            sources[rank] = before.ranks[at.replica][at.stage]
    return sources
