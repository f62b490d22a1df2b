"""Models and their initial parameters, compiled once for several test modules."""

from functools import cache

import jax
import numpy as np
import pytest

from jaxmorph.models.gpt2 import build
from jaxmorph.stage.parameters import init_stage_params
from tests.stage.in_turn import part_of


@pytest.fixture(scope="session")
def model_of():
    """The smallest GPT-2 with stages of one and of several layers, by (tied, dtype)."""

    @cache
    def model_of(tied=True, dtype="float32"):
        sizes = {"width": 16, "num_heads": 2, "num_layers": 5, "tied": tied}
        return build(preset="tiny", sequence_length=8, vocab_size=32, compute_dtype=dtype, **sizes)

    return model_of


@pytest.fixture(scope="session")
def initial_params(model_of):
    """The whole model's initial float32 parameters, from key 7, by `tied`."""

    @cache
    def initial_params(tied=True):
        key = jax.random.key(7)
        return init_stage_params(model_of(tied), key, range(5), is_first=True, is_last=True)

    return initial_params


@pytest.fixture(scope="session")
def initial_part(initial_params):
    """A stage's part of them, which `test_parameters` compares with its initial parameters."""

    def initial_part(layers, tied=True):
        return part_of(jax.tree.map(np.asarray, initial_params(tied)), layers, 5)

    return initial_part
