"""Stages whose device hangs, fails or is late: what each rank raises, and what is measured.

Two stages in one process, with a fake GPU each: everything but the device is the product's.
"""

import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from oracles.fake_gpu import LIMIT_S, OUT_OF_MEMORY, FakeGpu, Item, out_of_memory
from oracles.loopback import LoopbackNetwork, LoopbackPlane

from jaxmorph.models.gpt2 import build
from jaxmorph.program.instructions import Payload
from jaxmorph.program.lowering import lower
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.progress import StalledError
from jaxmorph.records import Link
from jaxmorph.runtime import stage_trainer
from jaxmorph.runtime.compiled_stage import compile_stage
from jaxmorph.runtime.executor import Executor, StepInputs
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.payloads import channel_specs
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.mesh import make_mesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.transport.names import PeerGoneError

LINK, MICROBATCHES = Link(0, 1), 3
MODEL = build(preset="tiny", sequence_length=4, vocab_size=8, width=8, num_heads=1, num_layers=2)
TOKENS = np.arange(4 * MICROBATCHES, dtype=np.int32).reshape(MICROBATCHES, 1, 4) % 8
INPUTS = StepInputs(TOKENS, TOKENS[::-1], 1 / TOKENS.size)
SETTINGS = StageSettings(
    layers=cut_layers(2, 2),
    shapes=MicrobatchShapes.of_text(1, 4),
    seed=0,
    kinds=frozenset((OpKind.F, OpKind.BW)),
    optimizer=OptimizerSettings(1e-3, 0, 1),
    direct=frozenset(),
    delegated=frozenset((LINK,)),
)


def programs_of_a_step():
    schedule = FIXED_SCHEDULES["1f1b"](2, MICROBATCHES)
    planned = simulate(schedule, StageCosts.uniform(2, 1.0, 1.0, 1.0))
    return lower(schedule, planned, {LINK: "delegated"}, num_tied=len(MODEL.tied))


PROGRAMS = programs_of_a_step()


@dataclass
class Stage:
    """A rank and its device."""

    trainer: StageTrainer
    gpu: FakeGpu
    plane: LoopbackPlane
    outcome = error = None

    def run(self):
        rank = self.plane.rank
        try:
            self.outcome = self.trainer.run(PROGRAMS[rank], INPUTS, step=0)
        except BaseException as error:
            self.error = error
            self.plane.close(flush=False)  # as the end of its process would


@pytest.fixture(scope="module")
def compiled():
    """Both stages' programs, compiled once: a stage whose step fails can't run another."""
    return [compile_stage(MODEL, SETTINGS, rank, make_mesh(1)) for rank in range(2)]


@pytest.fixture
def open_stages(compiled, monkeypatch):
    """Opens both stages with a time limit of transfers, in seconds."""
    run, gpus = Executor._run, [FakeGpu(), FakeGpu()]

    def end_as_the_device_does(executor, op, state):
        return gpus[state.program.rank].ending(op, run(executor, op, state))

    def open_stages(timeout_s=LIMIT_S):
        settings, network, made = (
            replace(SETTINGS, transfer_timeout_s=timeout_s),
            LoopbackNetwork(),
            [],
        )
        payloads = settings.payloads(MODEL)
        planes = [
            network.plane(rank, *channel_specs(payloads, settings.delegated, rank))
            for rank in range(2)
        ]
        for rank, plane in enumerate(planes):
            opened.callback(plane.close, flush=False)
            plane.connect({1 - rank: planes[1 - rank].addresses()}, b"secret")
        for rank, (plane, gpu) in enumerate(zip(planes, gpus, strict=True)):
            monkeypatch.setattr(stage_trainer, "open_copies", gpu.open_copies)
            trainer = StageTrainer(MODEL, settings, rank, plane=plane, alone=make_mesh(1))
            opened.callback(trainer.close)
            trainer.add_slots(slots_needed(PROGRAMS))
            made.append(Stage(trainer, gpu, plane))
        return made

    monkeypatch.setattr(Executor, "_run", end_as_the_device_does)
    monkeypatch.setattr(stage_trainer, "compile_stage", lambda *of: compiled[of[2]])
    for gpu in gpus:
        gpu.go.set()
    with ExitStack() as opened:
        yield open_stages
        for gpu in gpus:
            opened.callback(gpu.close)
            for item in gpu.items.values():
                item.may_end.set()


@contextmanager
def running(stages):
    """Run a step on both stages, in a thread each; afterwards both have ended."""
    threads = [threading.Thread(target=stage.run, daemon=True) for stage in stages]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()


def test_a_late_item_is_the_devices_time_not_the_links(open_stages):
    first, second = open_stages()
    late = first.gpu.items[Op(OpKind.F, 1)] = Item()
    with running((first, second)):
        time.sleep(0.2)  # as long as the device takes
        ended_s = time.monotonic()
        late.may_end.set()
    assert (first.error, second.error) == (None, None)
    (op,) = [stamp for stamp in first.outcome.stamps if stamp.label == Op(OpKind.F, 1)]
    assert op.end_s >= ended_s
    (arrival,) = [
        stamp
        for stamp in second.outcome.arrivals
        if stamp.label.microbatch == 1 and stamp.label.payload is Payload.ACTIVATION
    ]
    assert arrival.start_s >= ended_s  # the message counts as sent once the device had it


def test_no_memory_for_an_op_is_its_ranks_own_error(open_stages):
    first, second = open_stages()
    item = first.gpu.items[Op(OpKind.F, 1)] = Item(out_of_memory())
    item.may_end.set()
    # Else the first rank might send its last forward, which ends the second one's step, before the
    # thread that watches its queue has run.
    gradient = second.gpu.items[Op(OpKind.BW, 0)] = Item()
    with running((first, second)) as (of_first, _):
        of_first.join(LIMIT_S)
        gradient.may_end.set()
    assert isinstance(first.error, jax.errors.JaxRuntimeError)
    assert str(first.error) == OUT_OF_MEMORY
    assert isinstance(second.error, PeerGoneError), repr(second.error)


@pytest.mark.long
def test_no_memory_for_a_received_message_is_its_ranks_own_error(open_stages):
    first, second = open_stages()
    second.gpu.receive_error = out_of_memory()
    with running((first, second)):
        pass
    assert isinstance(second.error, jax.errors.JaxRuntimeError)
    assert str(second.error) == OUT_OF_MEMORY
    assert isinstance(first.error, PeerGoneError)


@pytest.mark.long
def test_a_rank_whose_own_device_hangs_says_so(open_stages):
    """It waits for a message that the other end can't send before its own has come."""
    first, second = open_stages(timeout_s=3.0)
    first.gpu.items[Op(OpKind.BW, 2)] = Item()
    with running((first, second)):
        pass
    assert isinstance(first.error, StalledError)
    assert "its queue is at BW2; so it waited in vain: " in str(first.error)
    assert not isinstance(second.error, StalledError)
