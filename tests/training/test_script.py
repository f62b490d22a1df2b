"""A script's batches, and how its processes meet and end."""

import subprocess
import sys
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.config import Config, check_config
from jaxmorph.errors import UserError
from jaxmorph.models.gpt2 import build
from jaxmorph.stage.model import vocabulary_of
from jaxmorph.training.script import cut_batch

CONFIG = check_config(
    {
        "batch": {"microbatches": 3, "microbatch_size": 2},
        "data": {"sequence_length": 4},
        "parallelism": {"stages": 3},
    }
)
TOKENS = np.arange(24).reshape(6, 4)


def test_stages_get_tokens_targets_or_neither():
    targets = np.where(TOKENS % 4 == 0, -1, TOKENS)
    first, middle, last = (cut_batch((TOKENS, targets), CONFIG, rank) for rank in range(3))
    assert first.targets is middle.tokens is middle.targets is last.tokens is None
    assert first.tokens is not None
    assert last.targets is not None
    assert first.tokens.tolist() == TOKENS.reshape(3, 2, 4).tolist()
    assert last.targets.tolist() == targets.reshape(3, 2, 4).tolist()
    assert first.tokens.dtype == last.targets.dtype == np.int32
    assert first.loss_weight == middle.loss_weight == last.loss_weight == 1 / 18


def test_batches_may_be_jax_arrays_and_cut():
    one = Config(batch=CONFIG.batch, data=CONFIG.data)
    given = jnp.asarray(TOKENS.reshape(3, 2, 4), jnp.uint8)
    inputs = cut_batch([given, given], one, 0)
    assert inputs.tokens is not None
    assert inputs.targets is not None
    assert inputs.tokens.tolist() == inputs.targets.tolist() == given.tolist()


def test_a_batch_without_targets_weighs_nothing():
    assert cut_batch((TOKENS, TOKENS * 0 - 1), CONFIG, 2).loss_weight == 1.0


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (TOKENS, "got ndarray, expected a pair of tokens and targets"),
        (7, "got int, expected a pair of tokens and targets"),
        ((TOKENS[:5], TOKENS), r"got tokens of shape \[5, 4\], expected \[6, 4\]: batch.micro"),
        ((TOKENS, TOKENS.T), r"got targets of shape \[4, 6\], expected \[6, 4\]"),
        ((TOKENS, TOKENS * 1.0), "got targets of float64, expected whole numbers"),
        ((TOKENS > 3, TOKENS), "got tokens of bool, expected whole numbers"),
    ],
)
def test_any_other_batch_is_refused(batch, says):
    with pytest.raises(UserError, match=f"^batch: {says}"):
        cut_batch(batch, CONFIG, 0)


SCRIPT = """
import atexit, sys
from jaxmorph.errors import UserError
from jaxmorph.training.script import end_if_failed, end_on_uncaught_errors
end_on_uncaught_errors()
atexit.register(print, "cleaned up")
try:
    raise KeyError("caught")
except KeyError:
    print("went on")
"""


@pytest.mark.parametrize(
    ("ends", "code", "last_line"),
    [
        ("raise UserError('batch: a wombat')", 2, "jaxmorph.errors.UserError: batch: a wombat"),
        ("raise ArithmeticError('upside down')", 1, "ArithmeticError: upside down"),
    ],
)
def test_an_uncaught_error_skips_the_clean_up(ends, code, last_line):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ends],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == last_line
    assert done.stdout == "went on\n"


@pytest.mark.parametrize(
    ("code", "ends_with", "cleaned_up"),
    [("3", 3, ""), ("'no data'", 1, ""), ("0", 0, "cleaned up\n"), ("None", 0, "cleaned up\n")],
)
def test_a_failing_exit_skips_the_clean_up(code, ends_with, cleaned_up):
    done = subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}end_if_failed(SystemExit({code}))"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ends_with
    assert done.stdout == f"went on\n{cleaned_up}"
    assert done.stderr == ("no data\n" if "data" in code else "")


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((TOKENS, TOKENS), "got tokens from 0 to 23, expected ids from 0 to below 23, the model"),
        ((TOKENS - 1, TOKENS - 1), "got tokens from -1 to 22, expected ids from 0 to below 23"),
        ((TOKENS * 0, TOKENS), "got targets from 0 to 23, expected ids from 0 to below 23"),
    ],
)
def test_ids_beyond_the_models_vocabulary_are_refused(batch, says):
    for rank in range(3):
        with pytest.raises(UserError, match=f"^batch: {says}"):
            cut_batch(batch, CONFIG, rank, 23)


def test_the_vocabulary_is_that_of_the_logits():
    sizes = {"preset": "tiny", "width": 16, "num_heads": 2, "num_layers": 1}
    model = build(**sizes, sequence_length=8, vocab_size=77)
    assert vocabulary_of(model, 8) == 77
    assert vocabulary_of(cast(Any, object()), 8) is None
