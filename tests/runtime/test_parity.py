"""Every schedule gives one device's loss, gradients and parameters.

One launch per number of stages runs all schedules and microbatch counts, tied and, but for four
stages, untied, with the same compiled programs throughout.
"""

from functools import cache
from itertools import product

import pytest

SINGLE, HALF = 1e-5, 3e-2  # relative, for float32 and bfloat16 compute
AS_USERS, EXAMPLES, RANDOM = "2 as users compile", "2 of examples", "2 of random models"
MORE = "2 of more models"
SPLIT = "split stages"
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "adaptive", "initial"]
TESTS_OF_WHOLE_STAGES = {
    "first", "gradients", "compilations", "ignored microbatch", "contribution vanishes", "bitwise",
    "forwards alone", "routes", "route changes", "pairs", "overflow", "parameters",
}  # fmt: skip
TYINGS = (("tied", True), ("untied", False))
IN_CI = [pytest.mark.long, pytest.mark.one_jax, pytest.mark.in_ci]
NOT_IN_CI = [pytest.mark.long, pytest.mark.one_jax]
# Its first test of a number of stages waits for all that ranks compile: minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)
TWO = [pytest.param(("2", tied), id=f"2 {name}") for name, tied in TYINGS]
ALONE = [pytest.param(("1", tied), id=f"1 {name}", marks=IN_CI) for name, tied in TYINGS]
TIED_LAUNCHES = [
    pytest.param("1", marks=IN_CI),
    "2",
    pytest.param("4", marks=IN_CI),
]
FOUR = [pytest.param(("4", True), id="4 tied", marks=IN_CI)]


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
                arguments = ["whole stages"]
            if stages in (EXAMPLES, RANDOM, MORE):
                arguments = [stages.removeprefix("2 of ")]
            if stages.endswith(SPLIT):
                arguments = [SPLIT, *stages.split()[1:-2]]
            return run_as_ranks("parity_rank", int(stages[0]), arguments)

    return launched


def of_case(launch, case):
    stages, tied = case
    return [result for result in launch(stages) if result["tied"] == tied]


@pytest.fixture(scope="module", params=[*ALONE, *TWO, *FOUR])
def results(request, launch):
    return of_case(launch, request.param)


@pytest.fixture(scope="module", params=[*TWO, *FOUR])
def several(request, launch):
    return of_case(launch, request.param)


@pytest.fixture(scope="module")
def two_stages(launch):
    return launch("2")


@pytest.fixture(scope="module")
def random_models(launch):
    return launch(RANDOM)


def only(results, test, **case):
    chosen = [r for r in results if r["test"] == test and case.items() <= r.items()]
    assert chosen
    return chosen


def assert_within(bound, result):
    """Loss, norm and every parameter's gradient are those of one device."""
    assert result["loss_error"] <= bound
    assert result["norm_error"] <= bound
    assert result["worst_leaf"][0] <= bound, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_loss_norm_and_gradients_match_one_device(results, schedule, microbatches):
    case = {"schedule": schedule, "microbatches": microbatches, "compute": "float32"}
    for result in only(results, "gradients", stash="full", **case):
        assert_within(SINGLE, result)


@pytest.mark.multiprocess
@pytest.mark.parametrize("microbatches", [4, 8])
def test_interleaved_chunks_match_one_device(results, microbatches):
    case = {"schedule": "interleaved", "chunks": 2, "microbatches": microbatches}
    for result in only(results, "gradients", **case):
        assert_within(SINGLE, result)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("zb-v", 1), ("zb-v", 4), ("zb-v", 8), ("dualpipe-v", 8)]
)
def test_chunks_in_a_v_match_one_device(results, schedule, microbatches):
    case = {"schedule": schedule, "placement": "v", "microbatches": microbatches}
    for result in only(results, "gradients", **case):
        assert_within(SINGLE, result)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "launched",
    [
        pytest.param(f"{stages} {SPLIT}", marks=marks)
        for stages, marks in (
            ("2 tied", IN_CI),
            ("2 untied", NOT_IN_CI),
            ("1 tied untied", IN_CI),
            ("4 tied untied", NOT_IN_CI),
        )
    ],
)
def test_stages_of_two_devices_match_one_device(launch, launched):
    found = launch(launched)
    assert {result["devices"] for result in found} == {2}
    schedules = {result["schedule"] for result in only(found, "gradients")}
    assert schedules == {"gpipe", "1f1b", "zb-h2", "adaptive", "zb-v", "dualpipe-v"}
    for result in found:
        errors = [result[name] for name in ("loss_error", "norm_error") if name in result]
        assert max([*errors, result.get("worst_leaf", [0.0])[0]]) <= SINGLE, result
        assert result.get("same", True), result
        assert result.get("compiled", 0) == 0, result


@pytest.mark.multiprocess
def test_changing_the_schedule_compiles_nothing(results):
    counted = only(results, "compilations")
    assert {result["count"] for result in counted} == {0}
    assert all(result["before"] > 5 for result in counted)  # the counter does count


@pytest.mark.multiprocess
def test_a_microbatch_without_targets_contributes_nothing(results):
    for result in only(results, "ignored microbatch"):
        assert result["norm_error"] <= SINGLE
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]
    assert all(result["same"] for result in only(results, "contribution vanishes"))


@pytest.mark.multiprocess
def test_schedules_that_split_the_backward_agree_bitwise(results):
    assert all(result["same"] for result in only(results, "bitwise"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("launched", TIED_LAUNCHES)
def test_one_w_for_several_microbatches_matches_one_device(launch, launched):
    found = launch(launched)
    for weight_group in (2, 4):
        results = only(found, "weight groups", weight_group=weight_group)
        named = {result["schedule"] for result in results}
        assert named == {"zb-h1", "adaptive", "initial", "zb-v"}
        for result in results:
            assert_within(SINGLE, result)
        assert all(
            r["same"] for r in only(found, "bits of weight groups", weight_group=weight_group)
        )


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "interleaved"])
def test_forwards_alone_give_the_steps_loss(results, schedule):
    found = only(results, "forwards alone", schedule=schedule)
    assert all(result["same"] for result in found)
    assert all(result["zero"] for result in found)
    assert all(result["loss_error"] <= SINGLE for result in found)
    assert {result["compiled"] for result in found} == {0}


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "adaptive", "interleaved"])
def test_all_routes_give_the_same_bits(several, schedule):
    found = only(several, "routes", schedule=schedule)
    mixes = {tuple(sorted(result["routes"].items())) for result in found}
    assert len(mixes) == (1 if len(next(iter(mixes))) == 1 else 3)
    assert all(result["same"] for result in found)


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-eager", "zb-h2", "adaptive", "interleaved"])
def test_pairs_change_no_bit_and_compile_nothing(several, schedule):
    found = only(several, "pairs", schedule=schedule)
    num_stages = 1 + max(result["rank"] for result in found)
    for result in found:
        assert result["same"]
        assert result["pairs"] >= 8 // num_stages  # longer warm-ups leave fewer of 8 microbatches
        assert result["compiled"] == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("chunks", [1, 2])
def test_changing_routes_compiles_nothing(several, chunks):
    for result in only(several, "route changes", chunks=chunks):
        assert result["compiled"] == 0
        # No send needs to wait for a slot; how long a freed one's notice takes is the machine's.
        assert result["scarce"] == {}
        assert result["skipped"] == 0


@pytest.mark.multiprocess
def test_an_overflow_on_one_stage_updates_none(results):
    found = only(results, "overflow")
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
@pytest.mark.parametrize("chunks", [1, 2])
def test_clipped_adamw_steps_match_one_device(results, chunks):
    for result in only(results, "parameters", chunks=chunks):
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_bfloat16_compute_stays_within_its_bound(two_stages, schedule):
    for result in only(two_stages, "gradients", compute="bfloat16", schedule=schedule):
        assert_within(HALF, result)


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_recomputing_the_stash_changes_no_gradient(two_stages, schedule):
    for result in only(two_stages, "gradients", stash="recompute", schedule=schedule):
        assert result["worst_leaf"][0] <= SINGLE, result["worst_leaf"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2", "adaptive"])
@pytest.mark.parametrize(
    ("launched", "model"),
    [
        pytest.param(EXAMPLES, "moe_decoder", marks=IN_CI),
        pytest.param(EXAMPLES, "patch_encoder", marks=IN_CI),
        pytest.param(RANDOM, "dropout", marks=IN_CI),
        pytest.param(MORE, "packed_llama", marks=NOT_IN_CI),
        pytest.param(MORE, "Auxiliary", marks=NOT_IN_CI),
    ],
)
def test_gradients_of_other_models_match_one_device(launch, launched, model, schedule):
    results = only(launch(launched), model, schedule=schedule)
    assert len(results) == 4  # of two ranks, on both routes
    for result in results:
        assert_within(SINGLE, result)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("schedule", "stash"),
    [
        ("interleaved", "full"),
        *product(("gpipe", "1f1b", "zb-h2", "adaptive"), ("full", "recompute")),
    ],
)
@pytest.mark.parametrize(
    ("launched", "model"),
    [
        pytest.param(EXAMPLES, "moe_decoder", marks=IN_CI),
        pytest.param(EXAMPLES, "patch_encoder", marks=IN_CI),
        pytest.param(RANDOM, "packed_and_dropping", marks=IN_CI),
        pytest.param(MORE, "Auxiliary", marks=NOT_IN_CI),
    ],
)
def test_cuts_offloads_and_lengths_change_no_gradient(launch, launched, model, schedule, stash):
    results = only(launch(launched), f"{model} otherwise", schedule=schedule, stash=stash)
    num_lengths = 3 if model == "moe_decoder" and stash == "recompute" else 1
    assert len(results) == 2 * 2 * 2 * num_lengths  # on two ranks and both routes, each twice
    for result in results:
        assert_within(SINGLE, result)


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
@pytest.mark.in_ci
def test_dropout_follows_from_the_step_alone(random_models):
    for result in only(random_models, "dropout bits"):
        assert result["same"] == [True, True, False]
    assert {result["count"] for result in only(random_models, "dropout compilations")} == {0}


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.one_jax
@pytest.mark.in_ci
def test_an_evaluation_drops_nothing(random_models):
    assert all(r["loss_error"] <= SINGLE for r in only(random_models, "dropout evaluates"))


@pytest.mark.multiprocess
def test_flipped_bits_are_found_and_change_nothing(two_stages):
    found = only(two_stages, "corruption")
    assert all(result["same"] for result in found)
    assert all(result["spoilt"] >= 5 for result in found)
    assert all(result["found"] >= 2 for result in found)


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.in_ci
def test_what_users_compile_gives_the_same(launch):
    """Programs with all of XLA's optimisations: whole stages under every schedule and route."""
    found = launch(AS_USERS)
    assert {result["test"] for result in found} == TESTS_OF_WHOLE_STAGES
    gradients = only(found, "gradients", compute="float32")
    assert {result["schedule"] for result in gradients} == set(SCHEDULES)
    assert only(found, "gradients", compute="bfloat16")
    for result in found:
        bound = HALF if result["compute"] == "bfloat16" else SINGLE
        errors = [result[name] for name in ("loss_error", "norm_error") if name in result]
        assert all(each <= bound for each in [*errors, result.get("worst_leaf", [0.0])[0]]), result
        assert result.get("same", True), result
