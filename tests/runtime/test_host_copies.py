"""Offloading stashes changes no bits and keeps within its room."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from test_stage_trainer import trainer_of

from jaxmorph.program.check import check
from jaxmorph.program.instructions import Buffer, BufferKind, Fetch, RankInstructions
from jaxmorph.program.lowering import lower
from jaxmorph.program.offload import count_offloads, offload
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.host_copies import AwayStash, HostCopies, wait_for
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.launcher import OFFLOADING_THREADS
from jaxmorph.runtime.queue import Pace, PacedQueue
from jaxmorph.runtime.report import StepReport, StepTimings, measured_timeline
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import StageCosts, StageMemory
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline, peak_on_device

SPLIT = "F0 F1 F2 F3 B0 W0 F4 B1 B2 W1 W2 B3 B4 W3 W4"
WHOLE = "F0 F1 F2 F3 BW0 F4 BW1 BW2 BW3 BW4"
PACE = Pace.of_stage(4.0, 4.0, 2.0)
COPY_BYTES_PER_S = 1e6


def stash(microbatch: int) -> Buffer:
    return Buffer(BufferKind.STASH, microbatch)


@pytest.fixture(scope="module")
def trainer() -> Iterator[StageTrainer]:
    """One rank with the whole model."""
    with closing(trainer_of(num_layers=2, num_chunks=1, kinds=OpKind)) as trainer:
        yield trainer


@pytest.fixture
def paced(trainer):
    """The same stage on a paced queue."""
    queue, copies, unpaced = PacedQueue(), HostCopies(COPY_BYTES_PER_S), trainer.executor
    trainer.executor = replace(unpaced, queue=queue, pace=PACE, copies=copies)
    yield trainer
    trainer.executor = unpaced
    queue.close()
    copies.close()


@dataclass(frozen=True)
class Result:
    """The results of a step."""

    outcome: StepOutcome
    norm: float
    gradients: list[np.ndarray]

    @property
    def timeline(self) -> Timeline:
        began_s = min(stamp.start_s for stamp in self.outcome.stamps)
        timings = StepTimings.of_step(self.outcome, began_s)
        return measured_timeline([StepReport(0.0, self.norm, detail=timings.detail())])


def program_of(row: str, room: int | None) -> RankInstructions:
    """A row of ops, with room for so many stashes."""
    schedule = Schedule.from_rows("hand", [row])
    planned = simulate(schedule, StageCosts.uniform(1, 1, 1, 1))
    (program,) = lower(schedule, planned, num_tied=1)
    if room is None:
        return program
    placed = offload(program, StageMemory(1, 0, room), ahead=2)
    check([placed], [StageMemory(1, 0, room)])
    assert count_offloads([placed]) > 0
    return placed


def run(trainer: StageTrainer, program: RankInstructions) -> Result:
    tokens = np.arange(4 * program.num_microbatches, dtype=np.int32).reshape(-1, 1, 4) % 8
    outcome = trainer.run(program, StepInputs(tokens, tokens[::-1], 1 / tokens.size), step=0)
    norm = trainer.squared_norm()
    gradients = [np.array(leaf) for leaf in jax.tree.leaves(trainer.gradients)]
    trainer.discard()
    return Result(outcome, norm, gradients)


@pytest.mark.parametrize("row", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("queue", ["trainer", "paced"])
def test_offloading_changes_no_bit_within_its_room(queue, row, request):
    trainer = request.getfixturevalue(queue)
    resident = run(trainer, program_of(row, None))
    assert resident.outcome.copies == []
    compilations = CompilationCounter()
    for room in (2, 1):
        moved = run(trainer, program_of(row, room))
        assert moved.outcome.loss == resident.outcome.loss
        assert moved.norm == resident.norm > 0
        for got, expected in zip(moved.gradients, resident.gradients, strict=True):
            np.testing.assert_array_equal(got, expected)
        assert peak_on_device(moved.timeline) <= (room,)
    assert compilations.count == 0


def test_paced_copies_take_the_time_of_their_bytes(paced):
    (programs,) = paced.programs
    copy_ms = 1e3 * programs.memory.after_forward_bytes / COPY_BYTES_PER_S
    timeline = run(paced, program_of(WHOLE, 2)).timeline  # F1 >1 ~1 F2 >2 ~2 F3 BW0 F4 >4 <1:4
    spans = {(copy.kind, copy.microbatch): copy for copy in timeline.copies}
    ops = {str(span.op): span for span in timeline.spans()}
    assert all(copy.end_ms - copy.start_ms >= copy_ms - 2e-3 for copy in timeline.copies)
    assert spans["offload", 1].start_ms == ops["F1"].end_ms
    assert ops["F2"].start_ms >= spans["offload", 1].end_ms
    assert spans["fetch", 1].start_ms == spans["offload", 4].end_ms  # whose place it takes
    assert spans["fetch", 2].start_ms >= spans["fetch", 1].end_ms  # they share the bandwidth
    assert ops["BW1"].start_ms >= spans["fetch", 1].end_ms


def test_the_source_of_a_copy_is_deleted(trainer):
    copies, away = HostCopies(), AwayStash(stash(0))
    sharding = trainer.executor.placement
    arrays = (jax.device_put(np.arange(3.0), sharding), jax.device_put(np.ones(2), sharding))
    copies.offload(away, arrays, 0.0)
    away.gone.result(5)
    on_host = away.arrays
    assert all(leaf.is_deleted() for leaf in arrays)
    assert [leaf.sharding.memory_kind for leaf in on_host] == ["pinned_host"] * 2
    copies.fetch(away, None, 0.0)
    away.back.result(5)
    assert all(leaf.is_deleted() for leaf in on_host)
    back = away.take()
    assert away.arrays is None  # only the reader keeps it
    assert [leaf.sharding for leaf in back] == [sharding] * 2
    np.testing.assert_array_equal(back[0], np.arange(3.0))
    copies.close()


def test_a_fetch_waits_for_the_stash_it_replaces(trainer):
    copies, first, second = HostCopies(), AwayStash(stash(0)), AwayStash(stash(1))
    copies.offload(first, jax.device_put(np.ones(2), trainer.executor.placement), 0.0)
    copies.fetch(first, second, 0.0)
    with pytest.raises(TimeoutError):
        first.back.result(0.05)  # the second hasn't begun to leave
    copies.offload(second, jax.device_put(np.ones(2), trainer.executor.placement), 0.0)
    assert first.back.result(5).start_s >= second.gone.result(5).end_s
    copies.close()


def test_a_queue_error_ends_the_wait_for_a_copy():
    def failed() -> None:
        raise ArithmeticError("the op before has failed")

    with pytest.raises(ArithmeticError, match="the op before"):
        wait_for(AwayStash(stash(0)).gone, float("inf"), failed)
    with pytest.raises(TimeoutError, match="a copy of a stash took too long"):
        wait_for(AwayStash(stash(0)).gone, 0.0, lambda: None)


def test_a_stage_continues_after_an_error(trainer):
    program = program_of(WHOLE, 1)
    expected = run(trainer, program)
    instead = Fetch(stash(99))  # of no microbatch
    broken = tuple(instead if isinstance(s, Fetch) else s for s in program.instructions)
    with pytest.raises(KeyError):
        run(trainer, replace(program, instructions=broken))
    trainer.discard()
    assert run(trainer, program).norm == expected.norm


@pytest.mark.multiprocess
def test_copies_do_not_wait_for_a_waiting_transfer(run_as_ranks):
    reports = run_as_ranks("waiting_link_rank", 2, least_threads=OFFLOADING_THREADS)
    assert [message["copied"] for message in reports if message["rank"] == 0] == [True]
