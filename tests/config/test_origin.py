from jaxmorph.config import config_error, unknown_key_error


def test_an_error_found_later_names_the_file():
    error = config_error("a.yaml", ["run.steps=3"], "parallelism.stages", 9, "at most 8 layers")
    assert str(error) == "a.yaml: parallelism.stages: got 9, expected at most 8 layers"


def test_an_error_found_later_names_the_override():
    error = config_error("a.yaml", ["parallelism.stages=9"], "parallelism.stages", 9, "at most 8")
    assert str(error) == "parallelism.stages=9 (command line): got 9, expected at most 8"


def test_the_last_override_of_a_key_is_the_one_named():
    overrides = ["parallelism={stages: 7}", "parallelism.stages=9"]
    error = config_error("a.yaml", overrides, "parallelism.stages", 9, "at most 8")
    assert str(error).startswith("parallelism.stages=9 (command line)")


def test_an_unknown_option_of_a_model_gets_the_nearest_name():
    error = unknown_key_error("a.yaml", [], "model.widht", ("num_layers", "width"))
    assert str(error) == "a.yaml: model.widht: unknown key; did you mean 'width'?"
