"""Data of a user's own: cut into microbatches, and refused where a step isn't like the first."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.training.own_data import OwnBatches
from jaxmorph.training.run_parts import load_parts

MODULE = """
import jax.numpy as jnp
import numpy as np


class Source:
    def __init__(self, given):
        self.given = given

    def inputs(self, step):
        return {"x": np.full((6, 5), step + 0.5)}

    def targets(self, step):
        return np.arange(6) - 1


def build_data(**given):
    source = Source(given)
    source.held_out = Source(given)
    return source


def build(**options):
    return MODEL


class MODEL:
    num_layers, tied = 3, ()
    init_embed = init_layer = init_head = embed = layer = head = print
"""


def config_of(**data):
    sizes = {"microbatches": 3, "microbatch_size": 2}
    given = {"batch": sizes, "data": {"factory": "own", **data}, "evaluation": {"every_steps": 1}}
    return check_config(given)


def batches_of(**functions):
    source = {"inputs": lambda step: np.zeros((6, 5)), "targets": lambda step: np.zeros((6, 1))}
    return OwnBatches(config_of(), SimpleNamespace(**{**source, **functions}))


def test_a_module_makes_batches_of_any_shape(tmp_path):
    (tmp_path / "own_data_module.py").write_text(MODULE)
    own = {"factory": "own_data_module", "folder": str(tmp_path)}
    config = config_of(**own, vocab_size=9)
    parts = load_parts(config.model_copy(update={"model": config.model.model_copy(update=own)}))
    assert (parts.shapes.inputs["x"].shape, parts.shapes.inputs["x"].dtype) == ((2, 5), np.float32)
    assert parts.batches.inputs(4)["x"][2, 1].tolist() == [4.5] * 5
    assert parts.batches.targets(4).tolist() == [[-1, 0], [1, 2], [3, 4]]
    assert parts.batches.extras(4) == {}
    assert parts.held_out is not None
    source: Any = parts.batches
    given = {"batch_size": 6, "sequence_length": 128, "seed": 0, "path": None}
    assert source._source.given == given
    assert parts.vocab_size == 9
    assert parts.data.digest
    for name, says in (
        ("jaxmorph.errors", "got 'jaxmorph.errors' without a function 'build_data', expected a mo"),
        ("no_such_module", "got 'no_such_module', expected a module with a function 'build_data' "),
    ):
        with pytest.raises(UserError, match=f"^data.factory: {says}"):
            load_parts(config_of(factory=name))


def test_what_the_users_code_raises_is_one_line_with_its_place(tmp_path):
    def fail(step):
        raise OSError("no such disk")

    with pytest.raises(UserError) as caught:
        batches_of(targets=fail).inputs(0)
    assert re.fullmatch(
        r"test_own_data\.py:\d+: step 0 of the data: OSError: no such disk", str(caught.value)
    )
    (tmp_path / "broken_data_module.py").write_text("def build_data(**_):\n    {}['path']\n")
    with pytest.raises(UserError) as caught:
        load_parts(config_of(factory="broken_data_module", folder=str(tmp_path)))
    assert str(caught.value) == "broken_data_module.py:2: build_data: KeyError: 'path'"


def by_step(first, later):
    return lambda step: later if step else first


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (
            {"inputs": lambda step: np.zeros((5, 5))},
            "step 0: got inputs of shape [5, 5], expected [6, ...]: batch.microbatches times "
            "batch.microbatch_size",
        ),
        (
            {"inputs": by_step(np.zeros((6, 5)), np.zeros((6, 4)))},
            "step 3: got inputs of shape [6, 4], expected [6, 5]: as in step 0",
        ),
        (
            {"extras": by_step({"mask": np.zeros(6, bool)}, {"mask": np.zeros(6, int)})},
            "step 3: got extras['mask'] of int64, expected bool",
        ),
        ({"targets": lambda step: ()}, "step 0: got targets without arrays, expected at least one"),
        (
            {"targets": lambda step: np.random.default_rng().normal(size=(6, 1))},
            "step 0: got other targets when read twice, expected the same: they must follow from "
            "the step's number alone",
        ),
        (
            {"targets": None},
            "got SimpleNamespace of build_data without targets, expected an object with "
            "inputs(step) and targets(step)",
        ),
    ],
)
def test_a_step_unlike_the_first_is_refused_by_name(functions, says):
    def read():
        batches = batches_of(**functions)
        return batches.inputs(3), batches.targets(3), batches.extras(3)

    with pytest.raises(UserError) as caught:
        read()
    assert str(caught.value) == f"data.factory: own: {says}"


LENGTHS = (4, 9, 4, 6, 9)


def in_lengths(lengths=LENGTHS, **functions):
    """Data whose steps have these lengths, again and again."""
    of = lambda step: lengths[step % len(lengths)]  # noqa: E731
    return SimpleNamespace(
        **{
            "bucket": of,
            "inputs": lambda step: np.full((6, of(step)), float(step)),
            "targets": lambda step: np.zeros((6, 1)),
            **functions,
        }
    )


def test_steps_may_have_a_few_lengths():
    batches = OwnBatches(config_of(), in_lengths())
    assert [each.inputs.shape for each in batches.shapes.lengths] == [(2, 9), (2, 6), (2, 4)]
    assert batches.first_steps == (1, 3, 0)
    assert [batches.length_index(step) for step in range(6)] == [2, 0, 2, 1, 0, 2]
    assert batches.inputs(3).shape == (3, 2, 6)
    held_out = OwnBatches(config_of(), in_lengths((6, 8)), "held_out", like=batches)
    assert (held_out.length_index(0), held_out.inputs(0).shape) == (1, (3, 2, 6))
    with pytest.raises(UserError, match=r"bucket\(1\): got 8, expected one of 9, 6, 4$"):
        held_out.inputs(1)


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (
            {"bucket": lambda step: step},
            "bucket(step): got 9 numbers in steps 0 to 8, expected at most 8: each has programs of "
            "its own",
        ),
        ({"bucket": lambda step: "long"}, "bucket(3): got str, expected a whole number"),
        (
            {"bucket": lambda step: LENGTHS[step % 5] // 6},
            "step 3: got inputs of shape [6, 6], expected [6, 9]: as in step 1",
        ),
    ],
)
def test_lengths_that_are_none_are_refused(functions, says):
    batches = OwnBatches(config_of(), in_lengths(**functions))
    with pytest.raises(UserError) as caught:
        batches.inputs(3)
    assert str(caught.value) == f"data.factory: own: {says}"


def test_calls_of_own_data_never_overlap():
    """Steps are read ahead on a thread, while another evaluates."""
    held: list[bool] = []

    def asked(result):
        held.append(batches._lock.locked() and held_out._lock.locked())
        return result

    functions = {
        "inputs": lambda step: asked(np.zeros((6, 5))),
        "targets": lambda step: asked(np.zeros((6, 1))),
        "extras": lambda step: asked({}),
        "bucket": lambda step: asked(0),
    }
    batches = batches_of(**functions)
    held_out = OwnBatches(config_of(), SimpleNamespace(**functions), "held_out", like=batches)
    for each in (batches, held_out):
        for read in (each.inputs, each.targets, each.extras):
            read(0)
    assert set(held) == {True}
    assert not batches._lock.locked()
