import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.stage.model import cut_layers
from jaxmorph.stage.parameters import init_stage_params


def test_initial_values_do_not_depend_on_the_cut(model_of, initial_params):
    stages = [
        init_stage_params(
            model_of(), jax.random.key(7), layers, layers.start == 0, layers.stop == 5
        )
        for layers in cut_layers(5, 3, [2, 1, 2])
    ]
    assert sorted(stages[0]) == ["embed", "layers"]
    assert sorted(stages[-1]) == ["head", "layers"]
    parts = [stage["layers"] for stage in stages]
    layers = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    got = {"embed": stages[0]["embed"], "layers": layers, "head": stages[-1]["head"]}
    jax.tree.map(np.testing.assert_array_equal, got, initial_params())


def test_layers_differ_and_so_do_keys(model_of, initial_params):
    kernel = initial_params()["layers"]["expand"]["kernel"]
    other = init_stage_params(model_of(), jax.random.key(8), range(2), False, False)
    assert not jnp.allclose(kernel[0], kernel[1])
    assert not jnp.allclose(kernel[:2], other["layers"]["expand"]["kernel"])


def test_a_tied_parameter_starts_with_one_value_in_both_places(initial_params):
    tied, untied = initial_params(tied=True), initial_params(tied=False)
    np.testing.assert_array_equal(tied["head"]["token"], tied["embed"]["token"])
    assert not jnp.allclose(untied["head"]["token"], untied["embed"]["token"])
