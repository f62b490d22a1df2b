"""Which steps are evaluated, on which text, with what result; on made-up ranks."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.data import Tokens, hold_out
from jaxmorph.errors import UserError
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.runtime.executor import StepOutcome
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.training.evaluation import Evaluation, held_out_batches
from jaxmorph.training.plan_in_force import PlanInForce, plan_step
from jaxmorph.training.run_parts import step_reader

MICROBATCHES = 3


def config_of(stages=1, **changes):
    tree = {
        "run": {"steps": 10},
        "data": {"sequence_length": 4, "held_out_fraction": 0.5},
        "batch": {"microbatches": MICROBATCHES, "microbatch_size": 2},
        "parallelism": {"stages": stages},
        "schedule": {"name": "zb-h1"},
        "evaluation": {"every_steps": 4, "batches": 2},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree[section] = {**tree.get(section, {}), name: value}
    return Config.model_validate(tree)


def held_out_of(num_tokens):
    return hold_out(Tokens(np.arange(2 * num_tokens, dtype=np.uint16), 1000, "some text"), 0.5)[1]


def plan_of(config):
    profile = Profile(StageCosts.uniform(config.parallelism.stages, 1.0, 1.0, 1.0), {})
    made = plan_step(config, profile)
    programs = lower_step(made.schedule, profile, made.routes)
    return PlanInForce(made, programs, 0, slots_needed(programs))


PROGRAM = plan_of(config_of()).program


def held_out(evaluation, step):
    ended: Any = SimpleNamespace(step=step, program=PROGRAM)
    effect = evaluation.after(ended)
    assert effect.paused_s == evaluation.latest.took_s
    return evaluation.latest


class FakeTrainer:
    """Records its runs; the losses of a batch sum to the number of runs so far."""

    def __init__(self):
        self.params, self.ran, self.reads_extras = {}, [], False

    def run(self, program, inputs, step):
        self.ran.append((program, inputs, step))
        return StepOutcome(float(len(self.ran)), accumulators=(), stamps=[])


def evaluation_of(config, num_tokens=49):
    trainer: Any = FakeTrainer()
    batches = held_out_batches(config, held_out_of(num_tokens))
    programs = plan_of(config).programs
    runner = StepRunner(trainer, SoleRank())
    read = batches and step_reader(config, batches, 0, trainer)
    return Evaluation(config, runner, programs, read), trainer, batches


def test_every_nth_and_the_last_step_are_evaluated():
    evaluation, trainer, _ = evaluation_of(config_of())
    losses = [held_out(evaluation, step).loss for step in range(10)]
    assert [step for step, loss in enumerate(losses) if loss is not None] == [3, 7, 9]
    assert [step for _, _, step in trainer.ran] == [3, 3, 7, 7, 9, 9]


def test_the_loss_is_the_mean_of_all_tokens():
    evaluation, trainer, batches = evaluation_of(config_of())
    assert batches is not None
    began_s = time.monotonic()
    first, second = held_out(evaluation, 3), held_out(evaluation, 7)
    assert first.loss == (1.0 + 2.0) / (2 * MICROBATCHES * 2 * 4)
    assert second.loss == (3.0 + 4.0) / (2 * MICROBATCHES * 2 * 4)
    assert 0 < first.took_s + second.took_s <= time.monotonic() - began_s
    for at, (_, inputs, _) in enumerate(trainer.ran):
        np.testing.assert_array_equal(inputs.inputs, batches.inputs(at % 2))
        np.testing.assert_array_equal(inputs.targets, batches.targets(at % 2))
        assert inputs.loss_weight == 1.0
    assert batches.inputs(0).min() >= 49  # the other half is for training
    assert np.any(batches.inputs(0) != batches.inputs(1))


def test_evaluation_messages_have_their_own_microbatches():
    evaluation, trainer, _ = evaluation_of(config_of())
    held_out(evaluation, 3)
    numbers = [[op.microbatch for op in program.ops()] for program, _, _ in trainer.ran]
    assert numbers == [[3, 4, 5], [6, 7, 8]]
    assert [inputs.first_microbatch for _, inputs, _ in trainer.ran] == [3, 6]


def test_without_evaluation_nothing_runs():
    config = config_of(evaluation__every_steps=None)
    evaluation, trainer, batches = evaluation_of(config)
    assert batches is None
    assert all(held_out(evaluation, step).loss is None for step in range(10))
    assert trainer.ran == []


def test_too_little_held_out_text_is_refused():
    assert held_out_batches(config_of(), held_out_of(49)) is not None
    with pytest.raises(UserError) as caught:
        held_out_batches(config_of(), held_out_of(48))
    assert str(caught.value) == (
        "data.held_out_fraction: got 0.5, 48 tokens, expected at least 49: evaluation.batches, "
        "2, of 24 tokens each, and one more token"
    )


def test_every_seed_evaluates_the_same_text():
    made = [held_out_batches(config_of(run__seed=seed), held_out_of(490)) for seed in (1, 2)]
    first, second = (batches.inputs(0) for batches in made if batches is not None)
    assert np.array_equal(first, second)


def test_forwards_alone_get_their_slots():
    delegated = config_of(4, routes__default="delegated", batch__microbatches=16)
    plan = plan_of(delegated)
    with_room = plan.with_slots_to_evaluate()
    assert with_room.slots.keys() == plan.slots.keys()
    assert all(with_room.slots[channel] >= slots for channel, slots in plan.slots.items())
    assert max(with_room.slots.values()) == 16 > max(plan.slots.values())
