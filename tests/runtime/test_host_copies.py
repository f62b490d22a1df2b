"""A step whose stashes go to host memory and back gives the same bits, and holds no more."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jaxmorph.program.check import check
from jaxmorph.program.lowering import lower
from jaxmorph.program.offload import count_offloads, offload
from jaxmorph.runtime.compilations import CompilationCounter
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.runtime.report import measured_timeline, rank_report
from jaxmorph.runtime.stage_trainer import StageSettings, StageTrainer
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.device_live import peak_on_device
from jaxmorph.schedule.memory import StageMemory
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.stage.model import cut_layers
from models.gpt2 import build

pytestmark = pytest.mark.usefixtures("compile_quickly_here")

SPLIT = "F0 F1 F2 F3 F4 B0 W0 B1 W1 F5 B2 B3 W2 B4 W3 W4 B5 W5"
WHOLE = "F0 1.F0 F1 1.F1 F2 1.F2 1.BW0 BW0 1.BW1 BW1 1.BW2 BW2"
PACE = Pace.of_stage(4.0, 4.0, 2.0)
COPY_S = 0.006


def trainer_of(num_chunks: int, pace: Pace | None) -> StageTrainer:
    """Of one rank that has the whole model."""
    model = build(
        preset="tiny", sequence_length=4, vocab_size=8, width=8, num_heads=1, num_layers=2
    )
    settings = StageSettings(
        layers=cut_layers(2, 1, num_chunks=num_chunks),
        microbatch_size=1,
        sequence_length=4,
        seed=0,
        kinds=frozenset(OpKind),
        optimizer=OptimizerSettings(1e-3, 0, 1),
        num_chunks=num_chunks,
        pace=pace,
    )
    return StageTrainer(model, settings, rank=0)


@dataclass(frozen=True)
class Result:
    outcome: StepOutcome
    norm: float
    gradients: list[np.ndarray]


def run(trainer: StageTrainer, row: str, room: int | None) -> Result:
    """One step of a row of ops, with room for so many stashes of all chunks together."""
    schedule = Schedule.from_rows("hand", [row])
    planned = simulate(schedule, StageCosts.uniform(1, 1, 1, 1))
    (program,) = lower(schedule, planned, num_tied=1)
    if room is not None:
        memory = StageMemory(1, 0, room)
        program = offload(program, memory, ahead=2)
        check([program], [memory])
        assert count_offloads([program]) > 0
    tokens = np.arange(4 * schedule.num_microbatches, dtype=np.int32).reshape(-1, 1, 4) % 8
    outcome = trainer.run(program, StepInputs(tokens, tokens[::-1], 1 / tokens.size), step=0)
    gradients = [np.array(leaf) for leaf in jax.tree.leaves(trainer.gradients)]
    norm = trainer.squared_norm()
    trainer.discard()
    return Result(outcome, norm, gradients)


def timeline_of(outcome: StepOutcome):
    message, timings = rank_report(outcome, 0.0, 0.0, 0)
    import json

    return measured_timeline([{**message, DETAIL: json.dumps(timings)}])


@pytest.mark.parametrize("pace", [None, PACE], ids=["unpaced", "paced"])
@pytest.mark.parametrize(("row", "chunks", "rooms"), [(SPLIT, 1, (3, 1)), (WHOLE, 2, (2, 1))])
def test_offloading_changes_no_bit_and_compiles_nothing(row, chunks, rooms, pace):
    trainer = trainer_of(chunks, pace)
    resident = run(trainer, row, None)
    compilations = CompilationCounter()
    for room in rooms:
        offloaded = run(trainer, row, room)
        assert offloaded.outcome.loss == resident.outcome.loss
        assert offloaded.norm == resident.norm > 0
        for got, expected in zip(offloaded.gradients, resident.gradients, strict=True):
            np.testing.assert_array_equal(got, expected)
        (peak,) = peak_on_device(timeline_of(offloaded.outcome))
        assert peak <= room * chunks
    assert compilations.count == 0
    assert resident.outcome.copies == []
    trainer.close()
