import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.build import OP_KINDS, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.stage_functions import StashPolicy
from tests.goldens import lowered
from tests.goldens.__main__ import committed, differences
from tests.goldens.cases import STAGES
from tests.stage.in_turn import Pipeline, expected_gradients, joined, largest_error, split_backward

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # Python may collect here what another test has left open.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]

MICROBATCHES, BATCH, LENGTH, VOCAB, LAYERS = 3, 2, 8, 32, 5
LOSS_WEIGHT = jnp.float32(1 / (MICROBATCHES * BATCH * LENGTH))
TOKENS, TARGETS = np.random.default_rng(1).integers(
    VOCAB, size=(2, MICROBATCHES, BATCH, LENGTH), dtype=np.int32
)
TARGETS[:, 0, 2] = -1
# `tests/runtime/test_parity.py` recomputes in `make test`, and with the newest JAX.
RECOMPUTE = pytest.param("recompute", marks=[pytest.mark.long, pytest.mark.one_jax])


@pytest.fixture(scope="module")
def stage_of(model_of):
    """The programs of a stage, compiled once for each set of arguments."""

    @cache
    def stage_of(
        num_layers,
        is_first,
        is_last,
        dtype="float32",
        stash: StashPolicy = "full",
        kinds=OP_KINDS,
        weight_group=1,
    ):
        return build_stage(
            model_of(dtype=dtype),
            stage_submesh(make_mesh(1), 0),
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
            shapes=MicrobatchShapes.of_text(BATCH, LENGTH),
            stash=stash,
            kinds=kinds,
            weight_group=weight_group,
        )

    return stage_of


@pytest.fixture(scope="module")
def pipeline_of(stage_of, initial_part):
    """Pipelines of a number of stages; tied and untied ones run the same programs."""

    def pipeline_of(num_stages, stash: StashPolicy = "full", tied=True, **settings):
        cut = cut_layers(LAYERS, num_stages)
        places = [(i == 0, i == num_stages - 1) for i in range(num_stages)]
        stages = [
            stage_of(len(layers), *place, stash=stash, **settings)
            for layers, place in zip(cut, places, strict=True)
        ]
        params = [initial_part(layers, tied) for layers in cut]
        return Pipeline(stages, params, LOSS_WEIGHT)

    return cache(pipeline_of)


@pytest.fixture(scope="module")
def bfloat16_pipeline(pipeline_of):
    return pipeline_of(1, dtype="bfloat16", kinds=("F", "B", "W"))


@pytest.fixture(scope="module")
def reference(model_of, initial_params):
    """The loss and gradients of the whole model, by `tied`."""
    return cache(
        lambda tied: expected_gradients(
            model_of(), initial_params(tied), TOKENS, TARGETS, LOSS_WEIGHT
        )
    )


@pytest.mark.parametrize("split", [True, False], ids=["B and W", "BW"])
@pytest.mark.parametrize("stash", ["full", RECOMPUTE])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "num_stages", [pytest.param(1, marks=[pytest.mark.long, pytest.mark.one_jax]), 3]
)
def test_gradients_are_those_of_the_whole_model(
    num_stages, tied, stash, split, pipeline_of, reference
):
    expected_loss, expected = reference(tied)
    loss, sums = pipeline_of(num_stages, stash, tied).gradients(split, TOKENS, TARGETS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert largest_error(joined(sums), expected) < 1e-5


def test_bfloat16_gradients_are_within_two_percent_of_float32(bfloat16_pipeline, reference):
    expected_loss, expected = reference(tied=True)
    loss, sums = bfloat16_pipeline.gradients(True, TOKENS, TARGETS)
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    assert largest_error(joined(sums), expected) < 0.02


def test_a_microbatch_without_targets_adds_nothing(pipeline_of):
    pipeline = pipeline_of(1)
    first = np.arange(MICROBATCHES)[:, None, None] == 0
    _, without = pipeline.gradients(True, TOKENS, np.where(first, TARGETS, -1))
    _, nothing = pipeline.gradients(True, TOKENS, np.full_like(TARGETS, -1))
    _, everything = pipeline.gradients(True, TOKENS, TARGETS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing))
    _, others = pipeline.gradients(True, TOKENS, np.where(first, -1, TARGETS))
    both = jax.tree.map(np.add, without, others)
    assert largest_error(joined(everything), joined(both)) < 1e-6


@pytest.mark.parametrize("kind", OP_KINDS)
def test_programs_do_not_grow_with_depth(kind, stage_of):
    texts = [stage_of(n, True, False, stash="full").compiled[kind].as_text() or "" for n in (2, 8)]
    shallow, deep = (len(re.findall(r"^\s+\S+ = ", text, re.MULTILINE)) for text in texts)
    assert shallow == deep > 100


@pytest.mark.parametrize("kind", ["W", "BW"])
def test_accumulators_are_added_to_in_place(kind, pipeline_of):
    pipeline = pipeline_of(1)
    stage, weights = pipeline.stages[0], pipeline.weights[0]
    _, stash, *_ = stage.forward(weights, TOKENS[0], TARGETS[0])
    _, weight_stash, _ = stage.backward_input(weights, stash, LOSS_WEIGHT)
    sums = stage.zero_accumulators()
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(sums)]
    if kind == "W":
        added, _ = stage.backward_weight(weights, (weight_stash,), sums)
    else:
        _, added, _ = stage.backward(weights, stash, LOSS_WEIGHT, sums)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(sums))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(added)] == addresses


def test_one_w_for_a_group_adds_what_one_each_adds(pipeline_of):
    single = pipeline_of(1)
    grouped = pipeline_of(1, kinds=("W",), weight_group=MICROBATCHES).stages[0]
    stage, weights = single.stages[0], single.weights[0]
    stashes = []
    for tokens, targets in zip(TOKENS, TARGETS, strict=True):
        _, stash, *_ = stage.forward(weights, tokens, targets)
        stashes.append(stage.backward_input(weights, stash, LOSS_WEIGHT)[1])
    expected = stage.zero_accumulators()
    for weight_stash in stashes:
        expected, _ = stage.backward_weight(weights, (weight_stash,), expected)
    got, _ = grouped.backward_weight(weights, tuple(stashes), stage.zero_accumulators())
    assert largest_error(got, expected) < 1e-6


@pytest.mark.parametrize("stash_policy", ["full", RECOMPUTE])
def test_memory_is_what_the_arrays_take(stash_policy, pipeline_of):
    pipeline = pipeline_of(1, stash_policy)
    stage, weights = pipeline.stages[0], pipeline.weights[0]
    _, stash, *_ = stage.forward(weights, TOKENS[0], TARGETS[0])
    _, weight_stash, _ = stage.backward_input(weights, stash, LOSS_WEIGHT)
    held = [sum(array.nbytes for array in arrays) for arrays in (stash, weight_stash)]
    memory = stage.memory
    assert held == [memory.after_forward_bytes, memory.after_backward_input_bytes]


def test_b_passes_arrays_of_the_stash_on_without_a_copy(pipeline_of):
    pipeline = pipeline_of(3)
    stage, weights = pipeline.stages[1], pipeline.weights[1]
    x = jnp.ones((BATCH, LENGTH, 16))
    _, stash, *_ = stage.forward(weights, x)
    _, weight_stash, _ = stage.backward_input(weights, stash, x)
    assert len(stage.passed_on) > 0
    for position, array in zip(stage.passed_on, weight_stash, strict=False):
        assert array is stash[position]


def test_recompute_keeps_less_after_f_and_no_more_after_b(stage_of):
    full, recompute = (stage_of(2, False, False, stash=s).memory for s in ("full", "recompute"))
    assert recompute.after_forward_bytes == 2 * BATCH * LENGTH * 16 * 4
    assert recompute.after_forward_bytes < full.after_forward_bytes / 10
    ratio = recompute.after_backward_input_bytes / full.after_backward_input_bytes
    assert ratio < 1.05


def test_float32_weights_are_the_parameters_themselves(pipeline_of):
    pipeline = pipeline_of(1)
    leaves = {id(leaf) for leaf in jax.tree.leaves(pipeline.params[0])}
    assert {id(weight) for weight in pipeline.weights[0]} == leaves


def test_bfloat16_weights_are_converted_once(bfloat16_pipeline):
    weights = bfloat16_pipeline.weights[0]
    kernels = [w for w in weights if w.dtype == jnp.bfloat16]
    assert len(kernels) == 4 + 1
    assert not [w for w in weights if w.dtype == jnp.float32 and w.ndim == 3]


def test_read_only_numpy_arrays_give_the_same_bits(pipeline_of):
    pipeline = pipeline_of(3)
    stage, weights = pipeline.stages[1], pipeline.weights[1]
    given = np.random.default_rng(1).normal(size=(2, BATCH, LENGTH, 16)).astype(np.float32)
    given.setflags(write=False)

    def results(x, gradient):
        output, stash, *_ = stage.forward(weights, x)
        split = split_backward(stage, weights, stash, gradient, stage.zero_accumulators())
        whole = stage.backward(weights, stash, gradient, stage.zero_accumulators())
        return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), (output, split, whole))

    before = given.tobytes()
    assert results(*given) == results(*jax.device_put((given[0], given[1])))
    assert given.tobytes() == before


def test_only_the_kinds_asked_for_are_compiled(bfloat16_pipeline):
    (stage,) = bfloat16_pipeline.stages
    assert set(stage.compiled) == {"prepare", "zero", "F", "B", "W"}


def test_unknown_kinds_are_refused(stage_of):
    with pytest.raises(ValueError, match=r"^kinds: got 'X', expected some of F, B, W, BW$"):
        stage_of(1, False, False, kinds=("X",))


@pytest.mark.parametrize("case", STAGES, ids=lambda case: case["name"])
def test_programs_are_those_committed(case):
    """If a change is meant: `make goldens ONLY=stages UPDATE=1`, and say in the commit why."""
    was = committed("stages")[case["name"]]
    changed = list(differences(was, lowered.stage(case), tolerance=0.0, where=case["name"]))
    assert not changed, "\n".join(changed)
