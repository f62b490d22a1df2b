import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.errors import UserError
from jaxmorph.models import llama
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.parameters import (
    check_weights,
    init_stage_params,
    read_stage_params,
    write_model,
)
from tests.stage.in_turn import joined


@pytest.mark.one_jax
def test_initial_values_do_not_depend_on_the_cut(model_of, initial_params):
    stages = [
        init_stage_params(
            model_of(), jax.random.key(7), layers, layers.start == 0, layers.stop == 5
        )
        for layers in cut_layers(5, 3, [2, 1, 2])
    ]
    assert sorted(stages[0]) == ["embed", "layers"]
    assert sorted(stages[-1]) == ["head", "layers"]
    jax.tree.map(np.testing.assert_array_equal, joined(stages), initial_params())


def test_layers_and_keys_give_different_values(model_of, initial_params):
    kernel = initial_params()["layers"]["expand"]["kernel"]
    other = init_stage_params(model_of(), jax.random.key(8), range(2), False, False)
    assert not jnp.allclose(kernel[0], kernel[1])
    assert not jnp.allclose(kernel[:2], other["layers"]["expand"]["kernel"])


LAYERS = 5


def stages_of(model, counts, num_chunks=1):
    cut = cut_layers(LAYERS, len(counts) // num_chunks, counts, num_chunks)
    return [(layers, layers.start == 0, layers.stop == LAYERS) for layers in cut]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("written", "read"), [([2, 3], [1, 1, 3]), ([1, 2, 1, 1], [5])])
def test_a_model_written_from_one_cut_starts_another(
    tmp_path, model_of, initial_part, written, read, tied
):
    model = model_of(tied)
    parts = [(place[0], initial_part(place[0], tied)) for place in stages_of(model, written)]
    write_model(model, str(tmp_path), parts)
    check_weights(model, str(tmp_path))
    for place in stages_of(model, read):
        got = read_stage_params(model, str(tmp_path), *place)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(got))
        jax.tree.map(np.testing.assert_array_equal, got, initial_part(place[0], tied))


def test_a_model_without_weight_hooks_is_refused(tmp_path):
    model = llama.build(preset="tiny", sequence_length=8, vocab_size=8)
    expected = r"model Llama has no read_weights, expected one that has"
    for call in (
        lambda: check_weights(model, "some/where"),
        lambda: read_stage_params(model, "some/where", range(1), False, False),
    ):
        with pytest.raises(
            UserError, match=rf"^model.weights: got 'some/where', but the {expected}"
        ):
            call()
    with pytest.raises(UserError, match=r"^the model Llama has no write_weights"):
        write_model(model, str(tmp_path), [])


def test_mistakes_in_the_path_name_the_key(tmp_path, model_of):
    with pytest.raises(UserError, match=r"^model.weights: .*none: no such file or folder") as error:
        check_weights(model_of(), str(tmp_path / "none"))
    assert "\n" not in str(error.value)


def test_an_unwritable_folder_is_one_line(tmp_path, model_of, initial_params):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(UserError, match=r"file: cannot be written: File exists") as error:
        write_model(model_of(), str(in_the_way), [(range(LAYERS), initial_params())])
    assert "\n" not in str(error.value)


def with_reader(model, read_weights):
    """A copy of a model with a reader of its own."""
    changed = type(model)(model.config)
    changed.read_weights = read_weights
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda params: params,
            r"\['head'\]\['norm'\]\['bias'\]: .* nothing, expected float32 \[16\]",
        ),
        (
            lambda params: jax.tree.map(np.float64, params),
            r"\['embed'\]\['position'\]: .* float64 \[8, 16\], expected float32",
        ),
    ],
)
def test_a_reader_with_a_wrong_result_is_refused(model_of, initial_params, change, message):
    whole = jax.tree.map(np.asarray, initial_params())
    part = change({"embed": whole["embed"], "layers": whole["layers"]})
    model = with_reader(model_of(), lambda *_: part)
    with pytest.raises(UserError, match=message):
        read_stage_params(model, "anywhere", range(LAYERS), True, True)


def test_the_written_config_names_the_sizes(tmp_path, model_of, initial_params):
    write_model(model_of(), str(tmp_path), [(range(LAYERS), initial_params())])
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = {"n_layer": 5, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 32}
    assert sizes.items() <= config.items()
