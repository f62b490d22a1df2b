"""What is told of gradients that are not finite, and what comes of it on every rank."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxmorph.runtime.report import StepTotals, total
from jaxmorph.training.gradients import apply_gradients, told_not_finite


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


def told(loss, squared_norm, *chunks):
    stage: Any = Stage(*chunks)
    return told_not_finite(stage, loss, squared_norm)


def test_of_a_finite_step_nothing_is_told_and_gradients_are_not_looked_at():
    unread: Any = SimpleNamespace()
    assert told_not_finite(unread, 2.5, 1.0) == {}


def test_what_is_not_finite_is_named_as_the_model_names_it():
    layers = {"layers": {"attention": arrays(kernel=math.inf), "norm": arrays(scale=1.0)}}
    assert told(0.0, math.inf, layers) == {
        "not_finite": "gradients of 1 of 2 arrays (layers/attention/kernel)"
    }


def test_of_many_arrays_a_few_are_named_and_a_bad_loss_comes_first():
    many = {"layers": arrays(a=math.nan, b=1.0, c=math.inf, d=math.nan)}
    assert told(math.nan, math.nan, many) == {
        "not_finite": "loss nan, gradients of 3 of 4 arrays (layers/a, layers/c, ...)"
    }


def test_arrays_of_several_chunks_are_told_apart():
    chunks = {"layers": arrays(a=1.0)}, {"layers": arrays(a=math.nan)}
    assert told(0.0, math.nan, *chunks) == {
        "not_finite": "gradients of 1 of 2 arrays (chunk 1 layers/a)"
    }


def test_squares_may_overflow_though_gradients_do_not():
    told_of = told(0.0, math.inf, {"layers": arrays(a=1e30)})
    assert told_of == {"not_finite": "finite gradients, the sum of whose squares is not"}


def test_all_ranks_totals_say_which_stage_found_what():
    sound = {"loss": 0.0, "squared_norm": 4.0}
    bad = {"loss": math.inf, "squared_norm": 5.0, "not_finite": "loss inf"}
    totals = total([sound, bad])
    assert (totals.grad_norm, totals.not_finite) == (3.0, {1: "loss inf"})
    assert totals.in_words() == "loss inf, gradient norm 3; stage 1: loss inf"
    assert not totals.is_finite
    assert total([sound, sound | {"loss": 2.0}]).is_finite


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_neither_a_loss_nor_a_norm_that_is_not_finite_updates_anything(loss, norm):
    stage: Any = Stage()
    assert not apply_gradients(stage, StepTotals(loss, norm), clip_norm=1.0)
    assert stage.done == ["discarded"]


def test_finite_gradients_are_clipped_and_applied():
    stage: Any = Stage()
    assert apply_gradients(stage, StepTotals(1.0, 4.0), clip_norm=1.0)
    assert stage.done == [0.25]
