import pytest

from jaxmorph.config import placed_error
from jaxmorph.errors import UserError

STAGES = UserError("parallelism.stages: got 9, expected at most 8 layers")


def test_an_error_found_later_names_the_file():
    error = placed_error("a.yaml", ["run.steps=3"], STAGES)
    assert str(error) == "a.yaml: parallelism.stages: got 9, expected at most 8 layers"


def test_an_error_found_later_names_the_override():
    error = placed_error("a.yaml", ["parallelism.stages=9"], STAGES)
    assert str(error) == "parallelism.stages=9 (command line): got 9, expected at most 8 layers"


def test_the_last_override_of_a_key_is_the_one_named():
    error = placed_error("a.yaml", ["parallelism={stages: 7}", "parallelism.stages=9"], STAGES)
    assert str(error).startswith("parallelism.stages=9 (command line)")


@pytest.mark.parametrize("text", ["no key here", "two words: then more"])
def test_an_error_that_names_no_key_stays_as_it_is(text):
    assert str(placed_error("a.yaml", [], UserError(text))) == text


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ([], "a.yaml: schedule.max_live[2]"),
        (
            ["schedule.max_live=[4, 3, 3]"],
            "schedule.max_live=[4, 3, 3] (command line): schedule.max_live[2]",
        ),
    ],
)
def test_an_error_of_one_value_of_a_list_names_the_place_of_the_list(overrides, place):
    error = placed_error("a.yaml", overrides, UserError("schedule.max_live[2]: got 3"))
    assert str(error) == f"{place}: got 3"
