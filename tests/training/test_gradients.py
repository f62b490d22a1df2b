"""What is told of gradients that are not finite, and what comes of it on every rank."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxmorph.runtime.report import StepTotals, total
from jaxmorph.training.gradients import SkippedSteps, apply_gradients, told_not_finite

SOUND = StepTotals(2.0, 1.0)
BAD = StepTotals(math.nan, math.inf, {2: "loss nan"})


class Stage:
    """A trainer that keeps books of what is done with its gradients."""

    def __init__(self, *chunks):
        self.gradients, self.done = chunks, []

    def update(self, scale):
        self.done.append(scale)

    def discard(self):
        self.done.append("discarded")


def arrays(**values):
    return {name: jnp.full((2, 3), value) for name, value in values.items()}


def test_of_a_finite_step_nothing_is_told_and_gradients_are_not_looked_at():
    unread: Any = SimpleNamespace()
    assert told_not_finite(unread, 2.5, 1.0) == {}


@pytest.mark.parametrize(
    ("loss", "chunks", "says"),
    [
        (
            0.0,
            [{"attention": arrays(kernel=math.inf), "norm": arrays(scale=1.0)}],
            "gradients of 1 of 2 arrays (layers/attention/kernel)",
        ),
        (
            math.nan,
            [arrays(a=math.nan, b=1.0, c=math.inf, d=math.nan)],
            "loss nan, gradients of 3 of 4 arrays (layers/a, layers/c, ...)",
        ),
        (
            0.0,
            [arrays(a=1.0), arrays(a=math.nan)],
            "gradients of 1 of 2 arrays (chunk 1 layers/a)",
        ),
        (0.0, [arrays(a=1e30)], "finite gradients, the sum of whose squares is not"),
    ],
)
def test_what_is_not_finite_is_named_as_the_model_names_it(loss, chunks, says):
    stage: Any = Stage(*({"layers": chunk} for chunk in chunks))
    assert told_not_finite(stage, loss, math.inf) == {"not_finite": says}


def test_all_ranks_totals_say_which_stage_found_what():
    sound = {"loss": 0.0, "squared_norm": 4.0}
    bad = {"loss": math.inf, "squared_norm": 5.0, "not_finite": "loss inf"}
    totals = total([sound, bad])
    assert (totals.grad_norm, totals.not_finite) == (3.0, {1: "loss inf"})
    assert totals.in_words() == "loss inf, gradient norm 3; stage 1: loss inf"
    assert not totals.is_finite
    assert total([sound, sound | {"loss": 2.0}]).is_finite


@pytest.mark.parametrize(
    ("loss", "norm", "done"),
    [
        (1.0, 4.0, 0.25),  # clipped
        (math.nan, 1.0, "discarded"),
        (math.inf, 1.0, "discarded"),
        (1.0, math.nan, "discarded"),
        (1.0, math.inf, "discarded"),
    ],
)
def test_only_a_finite_loss_and_norm_update_anything(loss, norm, done):
    stage: Any = Stage()
    assert apply_gradients(stage, StepTotals(loss, norm), clip_norm=1.0) == (done == 0.25)
    assert stage.done == [done]


def noted(stop_after, *steps):
    """Whether each was one too many, and why in the end."""
    skipped = SkippedSteps(stop_after)
    return [skipped.note(number, each) for number, each in enumerate(steps)], skipped.why_stop


def test_so_many_in_a_row_stop_the_run_with_the_last_finite_step_and_what_to_try():
    stops, last = noted(3, BAD, SOUND, BAD, BAD, SOUND, BAD, BAD, BAD)
    assert stops == [False] * 7 + [True]
    assert last.startswith("3 steps in a row were not finite, the latest, step 7, with loss nan, ")
    assert "; stage 2: loss nan; the last finite step was 4, and parameters are as it left" in last
    assert "; try an earlier checkpoint with a lower optimizer.learning_rate" in last
    assert last.endswith("(optimizer.stop_after_skipped: 3)")
    assert "\n" not in last


def test_a_run_without_any_finite_step_says_so():
    assert "no step since the start was finite" in noted(2, BAD, BAD)[1]


def test_without_a_number_no_run_is_stopped():
    assert noted(None, *[BAD] * 50) == ([False] * 50, "")


def saved_after(steps, every, keep_last=True):
    """After how many steps there is a save, of which every so manieth should be one."""
    skipped, saved = SkippedSteps(None), []
    for done, totals in enumerate(steps, start=1):
        skipped.note(done - 1, totals)
        is_last = keep_last and done == len(steps)
        if skipped.lets_save(done % every == 0 or is_last, is_last):
            saved.append(done)
    return saved


def test_what_is_skipped_is_not_saved_and_what_fell_due_comes_after_the_next_update():
    steps = [SOUND, SOUND, BAD, BAD, BAD, SOUND, SOUND, SOUND, BAD]
    assert saved_after(steps, every=1, keep_last=False) == [1, 2, 6, 7, 8]
    assert saved_after(steps, every=4, keep_last=False) == [6, 8]


def test_the_last_state_is_saved_whatever_its_step_was():
    assert saved_after([SOUND, BAD, BAD], every=2) == [3]
