"""A rank's chunks in one process; `test_parity` has several ranks."""

import gc
import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from oracles.loopback import LoopbackNetwork

from jaxmorph.errors import UserError
from jaxmorph.models.gpt2 import build
from jaxmorph.program.lowering import lower
from jaxmorph.runtime.compiled_stage import is_compiled_alike
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_state import from_parts
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.model import MicrobatchShapes


def settings_of(num_layers, num_stages, num_chunks, kinds=()):
    return StageSettings(
        layers=cut_layers(num_layers, num_stages, num_chunks=num_chunks),
        shapes=MicrobatchShapes.of_text(1, 4),
        seed=0,
        kinds=frozenset(kinds),
        optimizer=OptimizerSettings(1e-3, 0, 1),
        num_chunks=num_chunks,
    )


def trainer_of(num_layers, num_chunks, kinds=(), plane=None, compiled=None, **others):
    """One rank with the whole model."""
    sizes = {"width": 8, "num_heads": 1, "num_layers": num_layers}
    model = build(preset="tiny", sequence_length=4, vocab_size=8, **sizes)
    settings = replace(settings_of(num_layers, 1, num_chunks, kinds), **others)
    return StageTrainer(model, settings, rank=0, plane=plane, compiled=compiled)


@pytest.mark.long
def test_chunks_that_are_built_alike_share_their_programs():
    trainer = trainer_of(num_layers=4, num_chunks=4)
    trainer.close()
    first, second, third, last = trainer.programs
    assert second is third
    assert len({first, second, last}) == 3
    assert [sorted(params) for params in trainer.params] == [
        ["embed", "layers"], ["layers"], ["layers"], ["head", "layers"],
    ]  # fmt: skip


@pytest.mark.one_jax
def test_an_unavailable_copy_backend_is_an_error():
    with closing(LoopbackNetwork().plane(0, [], [])) as plane:
        with closing(trainer_of(1, 1, plane=plane, copies="pinned_host")) as trainer:
            assert trainer.delegated is not None
            assert trainer.delegated.send_backend == "pinned_host"
        before = threading.enumerate()
        with pytest.raises(UserError, match=r"got copy_engine, .* expected auto"):
            trainer_of(1, 1, plane=plane, copies="copy_engine")
        assert set(threading.enumerate()) <= set(before)  # what had begun has been stopped


def test_evaluations_judge_no_links():
    outcome = SimpleNamespace(accumulators=(), stamps=[], arrivals=[])
    parts = {"_length_index": 0, "_weights": (), "_evaluated": (), "_accumulators": ()}
    executor = SimpleNamespace(execute=lambda *_, step: outcome)
    trainer = SimpleNamespace(_failover=SimpleNamespace(), executor=executor, **parts)
    for evaluates in (True, False):
        StageTrainer.run(trainer, (), StepInputs((), (), 1.0, evaluates=evaluates), 0)  # pyright: ignore
        assert trainer._failover.judges is not evaluates


def test_the_first_chunk_has_the_embedding_and_the_last_the_head():
    settings = settings_of(num_layers=6, num_stages=3, num_chunks=2)
    ends = [chunk[1:] for rank in range(3) for chunk in settings.chunks_of(rank)]
    assert ends == [(True, False), *[(False, False)] * 4, (False, True)]


@pytest.mark.long
@pytest.mark.in_ci
def test_chunks_may_split_their_backwards_too():
    trainer = trainer_of(num_layers=2, num_chunks=2, kinds=OpKind)
    tokens = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    inputs = StepInputs(tokens, tokens[::-1], 1 / 8)
    results = []
    for row in (
        "F0 1.F0 1.BW0 F1 BW0 1.F1 1.BW1 BW1",
        "F0 F1 1.F0 1.F1 1.B0 B0 1.B1 1.W0 B1 W0 1.W1 W1",
    ):
        schedule = Schedule.from_rows("hand", [row])
        planned = simulate(schedule, StageCosts.uniform(1, 1, 1, 1))
        (program,) = lower(schedule, planned, num_tied=1)
        outcome = trainer.run(program, inputs, step=0)
        results.append((outcome.loss, trainer.squared_norm(), jax.device_get(trainer.gradients)))
        trainer.discard()
    trainer.close()
    (loss, norm, whole), (split_loss, split_norm, split) = results
    assert split_loss == loss
    np.testing.assert_allclose(split_norm, norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), split, whole)
    assert norm > 0


@pytest.mark.parametrize(
    ("row", "weight_group"), [("F0 F1 B0 B1 W0 W1", 1), ("F0 F1 B0 B1 W0-1", 2)]
)
def test_every_w_takes_the_stashes_of_its_own_microbatches(row, weight_group):
    tokens = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    inputs = StepInputs(tokens, tokens[::-1], 1 / 8)
    results = []
    for each, group in ("F0 B0 W0 F1 B1 W1", 1), (row, weight_group):
        with closing(trainer_of(1, 1, kinds="FBW", weight_group=group)) as trainer:
            schedule = Schedule.from_rows("hand", [each])
            planned = simulate(schedule, StageCosts.uniform(1, 1, 1, 1))
            (program,) = lower(schedule, planned, num_tied=1)
            trainer.run(program, inputs, step=0)
            results.append(jax.device_get(trainer.gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), *results)


def live_bytes():
    gc.collect()
    return live_bytes_now()


def live_bytes_now():
    """Without a garbage collection, which is slow."""
    return sum(array.nbytes for array in jax.live_arrays())


def as_numpy(tree):
    return jax.tree.map(np.array, tree)


def same_bits(one, other):
    pairs = zip(jax.tree.leaves(as_numpy(one)), jax.tree.leaves(other), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.long
def test_a_restored_stage_needs_no_extra_memory():
    before = live_bytes()
    fresh = trainer_of(num_layers=1, num_chunks=1)
    saved = as_numpy(fresh.state)
    fresh.update(1.0)
    fresh.close()
    fresh_bytes = live_bytes() - before
    del fresh
    assert live_bytes() == before
    restored = trainer_of(num_layers=1, num_chunks=1)
    restored.close()
    restored.restore(list(saved))
    restored.update(1.0)
    assert live_bytes() - before == fresh_bytes


@pytest.mark.long
@pytest.mark.in_ci
def test_a_stage_that_was_compiled_before_compiles_and_keeps_nothing_else():
    trainer = trainer_of(num_layers=1, num_chunks=1)
    trainer.close()
    compiled, saved, counter = trainer.compiled, as_numpy(trainer.state), CompilationCounter()
    trainer.update(1.0)
    expected = as_numpy(trainer.state)
    trainer.drop_state()
    before, count = live_bytes(), counter.count
    again = trainer_of(num_layers=1, num_chunks=1, compiled=compiled)
    again.close()
    assert counter.count == count
    assert live_bytes() - before == sum(leaf.nbytes for leaf in jax.tree.leaves(again.gradients))
    again.restore(saved)
    again.update(1.0)
    assert same_bits(again.state, expected)


def test_stages_of_equal_size_and_place_are_compiled_alike():
    settings = settings_of(num_layers=4, num_stages=4, num_chunks=1)
    alike = [[is_compiled_alike(settings, a, settings, b) for b in range(4)] for a in range(4)]
    assert alike == [
        [True, False, False, False],
        [False, True, True, False],
        [False, True, True, False],
        [False, False, False, True],
    ]


@pytest.fixture(scope="module")
def updated():
    """A stage after one update, and its state."""
    trainer = trainer_of(num_layers=1, num_chunks=1)
    trainer.close()
    trainer.update(1.0)
    return trainer, as_numpy(trainer.state)


def test_a_restore_frees_the_old_state_first(updated, monkeypatch):
    trainer, saved = updated
    replaced, present = jax.tree.leaves(trainer.state), []

    def make(*arguments):
        present.extend(array for array in replaced if not array.is_deleted())
        return from_parts(*arguments)

    monkeypatch.setattr("jaxmorph.runtime.stage_trainer.from_parts", make)
    trainer.restore(saved)
    assert present == []
    assert len(replaced) > 3
    assert same_bits(trainer.state, saved)


def test_discarded_gradients_free_their_memory_first(updated, monkeypatch):
    trainer, _ = updated
    old, present = jax.tree.leaves(trainer.gradients), []
    (programs,) = trainer.programs
    make = programs.zero_accumulators

    def zeros():
        present.extend(array for array in old if not array.is_deleted())
        return make()

    monkeypatch.setattr(type(programs), "zero_accumulators", lambda self: zeros())
    trainer.discard()
    assert present == []
    assert len(old) > 3
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(trainer.gradients))


def test_no_weights_are_held_while_parameters_are_updated(updated, monkeypatch):
    trainer, saved = updated
    held, optimizer = [], trainer.compiled.optimizer
    update = optimizer.update

    def updated_now(*arguments):
        held.append(trainer._weights)
        return update(*arguments)

    monkeypatch.setattr(optimizer, "update", updated_now)
    trainer.update(1.0)
    assert held == [()]
    assert trainer._weights != ()
    trainer.restore(saved)


def test_a_state_that_does_not_fit_changes_nothing(updated):
    trainer, saved = updated
    (part,) = saved
    changed = part | {"params": jax.tree.map(lambda leaf: leaf[..., :1], part["params"])}
    with pytest.raises(UserError, match="expected float32"):
        trainer.restore([changed])
    assert same_bits(trainer.state, saved)


def test_a_stage_can_restore_its_own_state(updated):
    trainer, saved = updated
    trainer.restore(trainer.state)
    assert same_bits(trainer.state, saved)
    trainer.restore(jax.device_get(trainer.state))  # which may be the same memory
    assert same_bits(trainer.state, saved)


def test_memory_is_freed_while_the_device_lags(monkeypatch):
    trainer = trainer_of(num_layers=1, num_chunks=1, kinds=(OpKind.F, OpKind.B, OpKind.W))
    row = " ".join(f"F{i} B{i} W{i}" for i in range(4))
    schedule = Schedule.from_rows("one by one", [row])
    timeline = simulate(schedule, StageCosts.uniform(1, 1.0, 1.0, 1.0), {})
    (program,) = lower(schedule, timeline)
    tokens = np.arange(16, dtype=np.int32).reshape(4, 1, 4) % 8
    queue, held, may_watch = trainer.executor.queue, [], threading.Event()
    enqueue, drain = queue.enqueue, queue.drain

    def record(label, work, duration_s=None):
        held.append(live_bytes_now())
        enqueue(label, work, duration_s)

    def watch_later(now_s):
        assert may_watch.wait(60.0)

    def drain_once_all_is_dispatched(timeout_s):
        may_watch.set()
        return drain(timeout_s)

    monkeypatch.setattr(queue, "enqueue", record)
    monkeypatch.setattr(queue, "drain", drain_once_all_is_dispatched)
    with closing(trainer):
        before = live_bytes()
        queue.enqueue_after(watch_later)  # as behind a long op
        trainer.run(program, StepInputs(tokens, tokens[::-1], 1 / 16), step=0)
    memory, scalars = trainer.stash_memory, 32 * 4
    together = memory.after_forward_bytes + memory.after_backward_input_bytes
    assert len(held) == 4 * 5  # three ops and what two of them free
    assert max(held) - before <= together + scalars
    assert max(held[::5]) - before <= scalars  # nothing is left before each F
