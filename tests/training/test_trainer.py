"""Errors that a trainer raises before it compiles, and its steps on doubles."""

import math
import shutil
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxmorph.config import check_config
from jaxmorph.control.link_state import FailedPaths, PathFailure
from jaxmorph.control.rank_times import timeline_of
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.models import gpt2
from jaxmorph.placement import Layout
from jaxmorph.program.instructions import Payload, Send, Transfer, channel_of
from jaxmorph.records import Link
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.kept_programs import KeptPrograms
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import RendezvousError, SoleRank
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.report import StepTimings
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.stage.model import last_activations
from jaxmorph.stage.parameters import init_stage_params, write_model
from jaxmorph.training.adaptation import Adaptation
from jaxmorph.training.callbacks import SkippedSteps
from jaxmorph.training.loop import Loop
from jaxmorph.training.script import configure, script_directory, sections_without_effect
from jaxmorph.training.trainer import Trainer

MODEL = gpt2.build(
    preset="tiny", sequence_length=128, vocab_size=16, num_layers=2, width=8, num_heads=2
)
SMALL = gpt2.build(
    preset="tiny", sequence_length=8, vocab_size=16, num_layers=1, width=8, num_heads=2
)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"parallelism": {"stages": 2}},
            "parallelism.stages: got 2, expected the number of the script's processes, 1 "
            "(`jaxmorph launch --stages 2 SCRIPT` starts 2 here)",
        ),
        (
            {"batch": {"microbatchs": 4}},
            "config: batch.microbatchs: unknown key; did you mean 'microbatches'?",
        ),
        (
            {"timeouts": {"step_s": object}},
            "config: timeouts.step_s: got <class 'object'>, expected a number above 0",
        ),
        ({"parallelism": 3}, "config: parallelism: got 3, expected a section of keys"),
        (7, "config: got int, expected a mapping of sections, a path or a Config"),
        ("none.yaml", "none.yaml: no such file, expected a YAML file"),
        (
            {"parallelism": {"layers": [3]}},
            "parallelism.layers: got [3], expected 1 positive counts",
        ),
        (
            {"schedule": {"name": "interleaved"}, "parallelism": {"chunks": 3}},
            "parallelism.chunks: got 3 chunks on each of 1 stages",
        ),
        ({"model": {"weights": "nowhere"}}, "model.weights"),
    ],
)
def test_mismatches_are_one_line(config, says):
    with pytest.raises(UserError) as caught:
        Trainer(MODEL, config)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_an_optimizer_by_name_is_one_line():
    with pytest.raises(UserError, match=r"^optimizer: got 'adam', expected an Optax transform"):
        Trainer(MODEL, {}, optimizer=cast(Any, "adam"))


def test_ignored_sections_are_named(caplog):
    asked = {"checkpoint": {"every_steps": 100}, "trace": {"every_steps": 5}}
    with pytest.raises(UserError, match="nowhere"):  # it reads the configuration first
        Trainer(MODEL, {**asked, "model": {"weights": "nowhere"}})
    assert caplog.messages == [
        "Trainer ignores checkpoint, trace: only `jaxmorph train` reads these sections"
    ]
    assert not sections_without_effect(check_config({"run": {"steps": 50}}))


def test_a_run_directory_enables_its_sections(tmp_path):
    sections = {name: {} for name in ("checkpoint", "evaluation")}
    asked = {**sections, "checkpoint": {"every_steps": 7}, "restart_policy": {"max_restarts": 1}}
    config = check_config(asked)
    assert sections_without_effect(config, tmp_path) == ["restart_policy"]
    assert sections_without_effect(config) == ["checkpoint", "restart_policy"]
    for kept, ignored in ((False, []), (True, ["restart_policy"])):
        config = check_config({"restart_policy": {"compilation_cache": kept}})
        assert sections_without_effect(config) == ignored
        assert sections_without_effect(config, tmp_path) == []


def test_the_next_trainer_compiles_no_part_of_its_stage(tmp_path, monkeypatch):
    config = {
        "batch": {"microbatches": 2, "microbatch_size": 1},
        "data": {"sequence_length": 16},
        "restart_policy": {"compilation_cache": str(tmp_path)},
    }
    model = gpt2.build(
        preset="tiny", sequence_length=16, vocab_size=16, num_layers=1, width=8, num_heads=2
    )
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16) % 16

    def first_loss():
        with Trainer(model, config) as trainer:
            return trainer.step((tokens, tokens)).loss

    loss = first_loss()
    assert {path.suffix for path in (tmp_path / "rank_0").iterdir()} == {".program"}
    monkeypatch.setattr(KeptPrograms, "_compiled", None)
    assert first_loss() == loss


@pytest.fixture
def begin(tmp_path):
    """Makes a trainer of one stage with a run directory, and a batch for it."""

    def begin(resume=False, **sections):
        config = {
            "run": {"dir": str(tmp_path / "run")},
            "batch": {"microbatches": 1, "microbatch_size": 1},
            "data": {"sequence_length": 8},
        }
        tokens = np.arange(8, dtype=np.int32).reshape(1, 8)
        return Trainer(SMALL, config | sections, resume=resume), (tokens, tokens)

    return begin


def test_a_run_with_a_directory_does_not_go_back(begin):
    trainer, batch = begin()
    with trainer:
        state = jax.device_get(trainer.state)
        for _ in range(2):
            trainer.step(batch)
        with pytest.raises(UserError, match=r"next_step: got 1, expected at least 2: run.dir has"):
            trainer.restore(state, next_step=1)
        trainer.restore(state, next_step=2)
        assert trainer.step(batch).step == 2


def test_a_script_that_is_asked_to_stop_is_saved(begin, tmp_path):
    trainer, batch = begin(checkpoint={"every_steps": 100})
    with trainer:
        assert not trainer.step(batch).stopped
        trainer.ask_to_stop()
        assert trainer.step(batch).stopped
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert saved.name == "step_2"
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"asked to end after 2 steps"' in events


def test_a_resume_needs_no_initial_weights(begin, tmp_path):
    weights = tmp_path / "weights"
    params = init_stage_params(SMALL, jax.random.key(1), range(1), is_first=True, is_last=True)
    write_model(SMALL, str(weights), [(range(1), params)])
    sections = {
        "run": {"dir": str(tmp_path / "second")},
        "model": {"weights": str(weights)},
        "checkpoint": {"every_steps": 1},
    }
    trainer, batch = begin(**sections)
    with trainer:
        trainer.step(batch)
        loss = trainer.step(batch).loss
    shutil.rmtree(weights)
    with pytest.raises(UserError, match=r"model\.weights"):
        begin(**sections | {"run": {"dir": str(tmp_path / "third")}})
    assert not (tmp_path / "third").exists()
    trainer, _ = begin(resume=True, **sections)
    with trainer:
        assert trainer.next_step == 2
        assert trainer.step(batch).loss < loss


def directory_of(source):
    directory, config = script_directory(source, configure(source)[0])
    return None if directory is None else str(directory), config.checkpoint.saves


def test_run_dir_and_checkpoint_enable_writing(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {steps: 3}\ncheckpoint: {every_steps: 2}\n")
    assert directory_of(path)[0] is None
    path.write_text("run: {dir: there}\ncheckpoint: {every_steps: 2}\n")
    assert directory_of(path) == ("there", True)
    path.write_text("run: {dir: runs/mine}\n")  # as without it
    assert directory_of(path)[0] == "runs/mine"
    assert directory_of({"run": {"dir": "there"}}) == ("there", False)
    assert directory_of({"run": {"steps": 3}})[0] is None
    assert directory_of(check_config({"run": {"dir": "there"}})) == ("there", False)
    assert directory_of(None)[0] is None


def test_resuming_without_a_run_directory_is_refused():
    with pytest.raises(UserError, match=r"^resume: got True, expected run\.dir in the config"):
        Trainer(MODEL, {}, resume=True)


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (UserError("run.dir: it is in use"), UserError("run.dir: it is in use")),
        (
            OSError(28, "No space left"),
            RendezvousError("rank 0 failed: OSError: [Errno 28] No space left"),
        ),
    ],
)
def test_all_ranks_raise_rank_0s_directory_error(monkeypatch, tmp_path, error, elsewhere):
    def fail(config, *, resume):
        raise error

    of_rank_0 = []

    def agreed(rendezvous, kind, own):
        of_rank_0.extend([own] if rendezvous.rank == 0 else [])
        return of_rank_0[0]

    monkeypatch.setattr("jaxmorph.training.verification.start_of_script", fail)
    monkeypatch.setattr("jaxmorph.training.verification.agree", agreed)
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config = check_config({})
    for rank, expected in enumerate([error, elsewhere]):
        trainer._rendezvous = SoleRank()
        trainer._rendezvous.rank = rank
        with pytest.raises(type(expected)) as raised:
            trainer._find_start(tmp_path, resume=False)
        assert str(raised.value) == str(expected)
        assert (raised.value is error) == (rank == 0)


def test_a_lost_peer_closes_the_trainer(monkeypatch):
    def finish():
        raise RendezvousError("rank 1 is gone")

    closed, left = [], []
    monkeypatch.setattr("jaxmorph.training.trainer.leave", lambda: left.append(True))
    trainer: Any = Trainer.__new__(Trainer)
    trainer._training, trainer._opened = SimpleNamespace(finish=finish), ExitStack()
    trainer._run = SimpleNamespace(checkpoints=None)
    trainer._opened.push(lambda kind, *_: closed.append(kind))
    with pytest.raises(RendezvousError, match="rank 1 is gone"):
        trainer.close()
    assert (closed, left) == ([RendezvousError], [True])


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_of_a_script_fail_where_a_file_cannot_be_written(rank):
    """Only rank 0 writes; the others would begin their next trainer, and wait for it."""
    full = "metrics.jsonl: cannot be written: No space left on device"

    class OneOfTwo(SoleRank):
        def exchange(self, message, detail=b"", addressed=()):
            assert message == {"value": "" if rank else full}
            return [{"value": full}, {"value": ""}]

    recorder, closed = SimpleNamespace(unwritten=""), []
    trainer: Any = Trainer.__new__(Trainer)
    trainer._rendezvous, trainer._opened = OneOfTwo(), ExitStack()
    recording = SimpleNamespace(finish=lambda replicas: None)
    trainer._training = SimpleNamespace(finish=str, recorder=recorder, recording=recording)
    trainer._run = SimpleNamespace(checkpoints=object(), replicas=None)

    def close():  # the recorder may find it as late as this
        closed.append(True)
        recorder.unwritten = "" if rank else full

    trainer._opened.callback(close)
    with pytest.raises(RunFailedError, match=f"^{full}$"):
        trainer.close()
    assert closed == [True]
    # Without a directory a script's ranks don't wait for one another at the end.
    trainer._training = SimpleNamespace(finish=str, recorder=recorder)
    trainer._run = SimpleNamespace(checkpoints=None)
    trainer.close()


@pytest.mark.parametrize("directory", [None, "a run's"])
def test_a_closing_script_records_what_replicas_have(directory):
    """Its files are open until then, and the save that is awaited may be the last one."""
    done: list[Any] = []
    trainer: Any = Trainer.__new__(Trainer)
    trainer._rendezvous, trainer._opened = SoleRank(), ExitStack()
    trainer._opened.callback(done.append, "closed")
    trainer._training = SimpleNamespace(
        recording=SimpleNamespace(finish=done.append),
        finish=lambda: done.append("saved") or "",
        recorder=SimpleNamespace(unwritten=""),
    )
    trainer._run = SimpleNamespace(checkpoints=directory, replicas="replicas")
    trainer.close()
    assert done == [*(["replicas"] if directory else []), "saved", "closed"]


def test_a_script_takes_batches_of_a_few_lengths():
    """The first one is short, but steps are measured and planned for the longest."""

    def batch(length):
        ids = np.random.default_rng(length).integers(9, size=(4, length + 1))
        return ids[:, :-1], ids[:, 1:]

    model = gpt2.build(
        preset="tiny", sequence_length=6, vocab_size=9, width=8, num_layers=2, num_heads=2
    )
    config = {
        "batch": {"microbatches": 2, "microbatch_size": 2},
        "data": {"sequence_length": 6},
        "schedule": {"name": "1f1b"},
    }

    @jax.jit
    def loss_sum(params, tokens, targets):
        return model.head(params["head"], last_activations(model, params, tokens), targets)

    with Trainer(model, config, example=batch(6), shorter=[batch(3)]) as trainer:
        for step, length in enumerate((3, 6, 3)):
            (params,), (tokens, targets) = jax.device_get(trainer.params), batch(length)
            loss = float(loss_sum(params, tokens, targets)) / targets.size
            np.testing.assert_allclose(trainer.evaluate((tokens, targets)), loss, rtol=1e-5)
            metrics = trainer.step((tokens, targets))
            assert (metrics.step, metrics.updated) == (step, True)
            np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)


@pytest.fixture
def trainer_of(monkeypatch):
    """A trainer with a given stage and rendezvous, without batches and updates."""

    def trainer_of(rendezvous, next_step=0, stop_after=None, **stage):
        device = SimpleNamespace(memory_stats=lambda: None)
        whole = {
            "shares": None,
            "squared_norm": lambda: 4.0,
            "update": lambda scale: None,
            "events": list,
        }
        given = {
            **whole,
            "reads_extras": False,
            "take_link_failures": list,
            "device": device,
            **stage,
        }
        own: Any = SimpleNamespace(**given)
        trainer: Any = Trainer.__new__(Trainer)
        trainer.config, trainer.rank, trainer._next_step = check_config({}), 0, next_step
        trainer._rendezvous, trainer._failed = rendezvous, FailedPaths()
        replicas = Replicas.of(rendezvous, Layout.first(1))
        trainer._run = SimpleNamespace(rendezvous=rendezvous, replicas=replicas, leads=True)
        trainer._stage = own
        trainer._vocab_size = trainer._shapes = trainer._last = None
        trainer._programs_ran = lambda: None
        skipped, none = SkippedSteps(stop_after), cast(Any, None)
        ends = Adaptation(rendezvous, own, none, None, last_step=99, adapts=False)
        runner = StepRunner(own, rendezvous, clip_norm=1.0)
        loop = Loop(runner, none, [skipped, ends])
        trainer._training = SimpleNamespace(loop=loop, skipped=skipped, remapping=None)
        return trainer

    inputs = StepInputs(None, None, 1.0)
    monkeypatch.setattr("jaxmorph.training.trainer.cut_batch", lambda *_, **named: inputs)
    return trainer_of


def test_a_step_begins_when_all_ranks_have_called(monkeypatch, trainer_of):
    clock_s, details = [0.0], []

    def wait_for_the_last_rank():
        clock_s[0] = max(clock_s[0], 5.0)

    def exchange(message, detail=b"", addressed=()):
        wait_for_the_last_rank()
        details.append(detail)
        return [message]

    def run(program, inputs, step):
        wait_for_the_last_rank()
        clock_s[0] += 1.0
        return StepOutcome(0.5, (), [Stamp(Op(OpKind.F, 0), clock_s[0] - 0.25, clock_s[0])])

    clock = SimpleNamespace(monotonic=lambda: clock_s[0])
    monkeypatch.setattr("jaxmorph.runtime.step.time", clock)
    monkeypatch.setattr("jaxmorph.training.loop.time", clock)
    rendezvous = SimpleNamespace(exchange=exchange, rank=0, members=[0])
    metrics = trainer_of(rendezvous, 7, run=run).step(None)
    assert (metrics.step, metrics.grad_norm, metrics.step_s) == (7, 2.0, 1.0)
    assert metrics.failed_links == ()
    (span,) = timeline_of([StepTimings.of_detail(details[-1])]).spans()
    assert (str(span.op), span.start_ms, span.end_ms) == ("F0", 750.0, 1000.0)


def test_a_failed_link_is_reported_in_one_step(trainer_of):
    """A receiver may report it at the end of a step, and its sender later."""
    failure = PathFailure(Link(0, 1), "its cable")
    failures = [[failure], [failure], []]
    trainer = trainer_of(
        SoleRank(),
        run=lambda program, inputs, step: StepOutcome(0.5, (), []),
        take_link_failures=lambda: failures.pop(0),
    )
    assert [trainer.step(None).failed_links for _ in range(3)] == [("0-1",), (), ()]


def test_too_many_skipped_steps_raise(trainer_of):
    discarded = []
    trainer = trainer_of(
        SoleRank(),
        stop_after=2,
        run=lambda program, inputs, step: StepOutcome(math.inf, (), []),
        squared_norm=lambda: math.nan,
        gradients=({"layers": {"kernel": np.full(3, math.nan)}},),
        discard=lambda: discarded.append(True),
    )
    assert trainer.step(None).updated is False
    with pytest.raises(RunFailedError, match=r"^2 steps in a row .* stage 0: loss inf, gradients"):
        trainer.step(None)
    assert len(discarded) == 2


def test_forwards_have_slots_for_any_number_of_microbatches():
    asked = []
    trainer: Any = SimpleNamespace(
        _has_slots_for=None,
        _training=None,
        _stage=SimpleNamespace(add_slots=lambda slots, sending: asked.append(slots)),
        _run=SimpleNamespace(rendezvous=SoleRank()),
        config=check_config({"batch": {"microbatches": 6}}),
    )
    sends = Send(Transfer(Payload.ACTIVATION, 0, 1, 0), "delegated")
    Trainer._add_slots_for_forwards(trainer, cast(Any, SimpleNamespace(instructions=[sends])))
    assert asked == [{channel_of(sends.transfer): 8}] * 2  # slots are a power of two
