"""Every schedule gives one device's loss, gradients and parameters.

One launch per number of stages runs all schedules, microbatch counts and both tyings, with the same
compiled programs throughout.
"""

from functools import cache

import pytest

SINGLE, HALF = 1e-5, 3e-2  # relative, for float32 and bfloat16 compute
AS_USERS, EXAMPLES, RANDOM = "2 as users compile", "2 of examples", "2 of random models"
MORE_STAGES = [pytest.mark.long, pytest.mark.one_jax]
# Its first test of a number of stages waits for all that ranks compile: minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)
ALONE, FOUR = (pytest.param(stages, marks=MORE_STAGES) for stages in ("1", "4"))
TWO = ["2", pytest.param(AS_USERS, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def launch(run_as_ranks):
    """The reports of ranks by number of stages; each is launched once."""

    @cache
    def launched(stages):
        with pytest.MonkeyPatch.context() as patch:
            arguments = []
            if stages == AS_USERS:
                patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
                patch.delenv("XLA_FLAGS", raising=False)
                arguments = ["schedules"]
            if stages in (EXAMPLES, RANDOM):
                arguments = [stages.removeprefix("2 of ")]
            return run_as_ranks("parity_rank", int(stages[0]), arguments)

    return launched


@pytest.fixture(scope="module", params=[ALONE, *TWO, FOUR])
def results(request, launch):
    return launch(request.param)


@pytest.fixture(scope="module", params=[*TWO, FOUR])
def several(request, launch):
    return launch(request.param)


@pytest.fixture(scope="module", params=[ALONE, "2", FOUR])
def with_chunks(request, launch):
    return launch(request.param)


@pytest.fixture(scope="module", params=["2", FOUR])
def several_with_chunks(request, launch):
    return launch(request.param)


@pytest.fixture(scope="module", params=TWO)
def two_stages(request, launch):
    return launch(request.param)


@pytest.fixture(scope="module")
def random_models(launch):
    return launch(RANDOM)


def only(results, test, **case):
    chosen = [r for r in results if r["test"] == test and case.items() <= r.items()]
    assert chosen
    return chosen


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "adaptive", "initial"])
@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_loss_norm_and_gradients_match_one_device(results, schedule, microbatches, tied):
    case = {"schedule": schedule, "microbatches": microbatches, "tied": tied, "compute": "float32"}
    for result in only(results, "gradients", stash="full", **case):
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_interleaved_chunks_match_one_device(with_chunks, microbatches, tied):
    case = {"schedule": "interleaved", "chunks": 2, "microbatches": microbatches, "tied": tied}
    for result in only(with_chunks, "gradients", **case):
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_changing_the_schedule_compiles_nothing(results, tied):
    counted = only(results, "compilations", tied=tied)
    assert {result["count"] for result in counted} == {0}
    assert all(result["before"] > 5 for result in counted)  # the counter does count


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_a_microbatch_without_targets_contributes_nothing(results, tied):
    for result in only(results, "ignored microbatch", tied=tied):
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]
    assert all(result["same"] for result in only(results, "contribution vanishes", tied=tied))


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_schedules_that_split_the_backward_agree_bitwise(results, tied):
    assert all(result["same"] for result in only(results, "bitwise", tied=tied))


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_forwards_alone_give_the_steps_loss(results, schedule):
    forwards_alone_give_the_steps_loss(results, schedule)


@pytest.mark.multiprocess
def test_forwards_of_chunks_alone_give_the_steps_loss(with_chunks):
    forwards_alone_give_the_steps_loss(with_chunks, "interleaved")


def forwards_alone_give_the_steps_loss(results, schedule):
    found = only(results, "forwards alone", schedule=schedule)
    assert all(result["same"] for result in found)
    assert all(result["zero"] for result in found)
    assert all(result["loss_error"] <= SINGLE for result in found)
    assert {result["compiled"] for result in found} == {0}


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "adaptive"])
def test_all_routes_give_the_same_bits(several, schedule, tied):
    all_routes_give_the_same_bits(several, schedule, tied)


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_all_routes_give_chunks_the_same_bits(several_with_chunks, tied):
    all_routes_give_the_same_bits(several_with_chunks, "interleaved", tied)


def all_routes_give_the_same_bits(several, schedule, tied):
    found = only(several, "routes", schedule=schedule, tied=tied)
    mixes = {tuple(sorted(result["routes"].items())) for result in found}
    assert len(mixes) == (1 if len(next(iter(mixes))) == 1 else 3)
    assert all(result["same"] for result in found)


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_changing_routes_compiles_nothing(several, tied):
    changing_routes_compiles_nothing(several, tied, chunks=1)


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_changing_routes_compiles_nothing_for_chunks(several_with_chunks, tied):
    changing_routes_compiles_nothing(several_with_chunks, tied, chunks=2)


def changing_routes_compiles_nothing(several, tied, chunks):
    for result in only(several, "route changes", chunks=chunks, tied=tied):
        assert result["compiled"] == 0
        assert result["counts"]["slot_waits"] == 0
        assert result["counts"]["skipped"] == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_an_overflow_on_one_stage_updates_none(results, tied):
    found = only(results, "overflow", tied=tied)
    last, is_alone = str(max(result["rank"] for result in found)), len(found) == 1
    for result in found:
        assert not result["updated"]
        if is_alone:  # the embedding overflows, too, and a norm takes that out of the loss
            assert result["loss"] != "nan"
            assert result["stages"][last].startswith("gradients of ")
        else:
            assert result["loss"] == "nan"
            assert result["stages"][last].startswith("loss nan, gradients of ")
        assert result["same"]
        assert result["zero"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_clipped_adamw_steps_match_one_device(results, tied):
    clipped_adamw_steps_match_one_device(results, tied, chunks=1)


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False])
def test_clipped_adamw_steps_of_chunks_match_one_device(with_chunks, tied):
    clipped_adamw_steps_match_one_device(with_chunks, tied, chunks=2)


def clipped_adamw_steps_match_one_device(results, tied, chunks):
    for result in only(results, "parameters", chunks=chunks, tied=tied):
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_bfloat16_compute_stays_within_its_bound(two_stages, schedule):
    for result in only(two_stages, "gradients", compute="bfloat16", schedule=schedule):
        assert result["loss_error"] <= HALF
        assert result["norm_error"] <= HALF
        assert result["worst_leaf"][0] <= HALF, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_recomputing_the_stash_changes_no_gradient(two_stages, schedule):
    for result in only(two_stages, "gradients", stash="recompute", schedule=schedule):
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
@pytest.mark.parametrize("stash", ["full", "recompute"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2", "adaptive"])
@pytest.mark.parametrize("case", ["dropout", "auxiliary"])
def test_gradients_of_random_models_match_one_device(random_models, case, schedule, stash):
    for result in only(random_models, case, stash=stash, schedule=schedule):
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
@pytest.mark.parametrize("stash", ["full", "recompute"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2", "adaptive"])
@pytest.mark.parametrize("model", ["moe_decoder", "patch_encoder"])
def test_gradients_of_the_examples_match_one_device(launch, model, schedule, stash):
    results = only(launch(EXAMPLES), model, stash=stash, schedule=schedule)
    assert len(results) == 4  # of two ranks, on both routes
    for result in results:
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h2", "interleaved"])
@pytest.mark.parametrize(
    ("launched", "model"),
    [(EXAMPLES, "moe_decoder"), (EXAMPLES, "patch_encoder"), (RANDOM, "packed_and_dropping")],
)
def test_cuts_offloads_and_lengths_change_no_gradient(launch, launched, model, schedule):
    results = only(launch(launched), f"{model} otherwise", schedule=schedule)
    num_lengths = 3 if model == "moe_decoder" and schedule == "zb-h2" else 1
    assert len(results) == 2 * 2 * 2 * num_lengths  # on two ranks and both routes, each twice
    for result in results:
        assert result["loss_error"] <= SINGLE
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
def test_dropout_follows_from_the_step_alone(random_models):
    for result in only(random_models, "dropout bits"):
        assert result["same"] == [True, True, False]
    assert {result["count"] for result in only(random_models, "dropout compilations")} == {0}


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
def test_an_evaluation_drops_nothing(random_models):
    assert all(r["loss_error"] <= SINGLE for r in only(random_models, "dropout evaluates"))


@pytest.mark.multiprocess
def test_flipped_bits_are_found_and_change_nothing(two_stages):
    found = only(two_stages, "corruption")
    assert all(result["same"] for result in found)
    assert all(result["spoilt"] >= 5 for result in found)
    assert all(result["found"] >= 2 for result in found)
