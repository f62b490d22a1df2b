import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.stage.model import cut_layers
from jaxmorph.stage.parameters import init_stage_params
from models.gpt2 import build

KEY = jax.random.key(7)


def model_of(tied=True):
    return build(preset="tiny", sequence_length=9, vocab_size=37, width=24, num_heads=2, tied=tied)


def test_initial_values_do_not_depend_on_the_cut():
    whole = init_stage_params(model_of(), KEY, range(8), is_first=True, is_last=True)
    stages = [
        init_stage_params(model_of(), KEY, layers, layers.start == 0, layers.stop == 8)
        for layers in cut_layers(8, 2)
    ]
    assert [sorted(stage) for stage in stages[:1] + stages[-1:]] == [
        ["embed", "layers"],
        ["head", "layers"],
    ]
    layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[s["layers"] for s in stages])
    got = {"embed": stages[0]["embed"], "layers": layers, "head": stages[-1]["head"]}
    jax.tree.map(np.testing.assert_array_equal, got, whole)


def test_layers_differ_and_so_do_keys():
    one = init_stage_params(model_of(), KEY, range(2), is_first=False, is_last=False)
    other = init_stage_params(model_of(), jax.random.key(8), range(2), False, False)
    kernel = one["layers"]["expand"]["kernel"]
    assert not jnp.allclose(kernel[0], kernel[1])
    assert not jnp.allclose(kernel, other["layers"]["expand"]["kernel"])


def test_a_tied_parameter_starts_with_one_value_in_both_places():
    params = init_stage_params(model_of(), KEY, range(1), is_first=True, is_last=True)
    np.testing.assert_array_equal(params["head"]["token"], params["embed"]["token"])
    untied = init_stage_params(model_of(tied=False), KEY, range(1), is_first=True, is_last=True)
    assert not jnp.allclose(untied["head"]["token"], untied["embed"]["token"])
