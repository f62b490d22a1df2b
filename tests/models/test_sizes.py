"""Sizes of both models: presets, counts of parameters, what is refused, and what needs no JAX."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmorph.models import gpt2, llama
from jaxmorph.stage.parameters import parameter_count

KEY = jax.random.key(0)
SMALL: dict[str, Any] = {"preset": "tiny", "sequence_length": 8, "vocab_size": 11}


def of_preset(module, preset, vocabulary) -> Any:
    return module.build(preset=preset, sequence_length=1024, vocab_size=vocabulary)


@pytest.mark.parametrize(
    ("module", "vocabulary", "counts"),
    [
        (
            gpt2,
            50_257,
            {"124M": 124_439_808, "355M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200},
        ),
        (
            llama,
            32_000,
            {
                "1.1B": 1_100_048_384, "7B": 6_738_415_616, "13B": 13_015_864_320,
                "70B": 68_976_648_192,
            },
        ),
        (llama, 128_256, {"8B": 8_030_261_248}),
    ],
)  # fmt: skip
def test_presets_have_the_published_parameter_counts(module, vocabulary, counts):
    for preset, count in counts.items():
        assert parameter_count(of_preset(module, preset, vocabulary)) == count


@pytest.mark.parametrize(
    ("preset", "billions"), [("7B", 7), ("14B", 14), ("30B", 30), ("60B", 60), ("140B", 140)]
)
def test_the_papers_presets_have_about_the_papers_sizes(preset, billions):
    model = of_preset(gpt2, preset, 50_257)
    assert model.config.width // model.config.num_heads == 128
    assert abs(parameter_count(model) / 1e9 / billions - 1) < 0.06


@pytest.mark.parametrize("module", [gpt2, llama])
def test_an_untied_head_counts_by_itself(module):
    tied, untied = (module.build(**SMALL, tied=tied) for tied in (True, False))
    assert parameter_count(untied) - parameter_count(tied) == 11 * tied.config.width
    assert bool(module.build(**SMALL).tied) == (module is gpt2)  # as published


def test_fewer_key_value_heads_are_fewer_parameters():
    sizes: Any = {"width": 24, "num_heads": 6, "hidden_width": 20, "num_layers": 3}
    all_heads, grouped = (
        llama.build(**SMALL, **sizes, num_key_value_heads=heads) for heads in (6, 2)
    )
    assert parameter_count(all_heads) - parameter_count(grouped) == 3 * 2 * 24 * (6 - 2) * (24 // 6)


@pytest.mark.parametrize(
    ("module", "preset"), [(module, each) for module in (gpt2, llama) for each in module.PRESETS]
)
def test_every_preset_can_be_traced(module, preset):
    model = module.build(**SMALL | {"preset": preset}, compute_dtype="bfloat16")
    embed, layer = (jax.eval_shape(init, KEY) for init in (model.init_embed, model.init_layer))
    assert {leaf.dtype for leaf in jax.tree.leaves((embed, layer))} == {jnp.dtype("float32")}
    x = jax.eval_shape(model.embed, embed, jax.ShapeDtypeStruct((1, 8), jnp.int32))
    assert x == jax.ShapeDtypeStruct((1, 8, model.config.width), jnp.bfloat16)
    assert jax.eval_shape(model.layer, layer, x) == x


@pytest.mark.parametrize(
    ("module", "wrong", "message"),
    [
        *(
            (module, *each)
            for module in (gpt2, llama)
            for each in [
                ({"preset": "huge"}, "preset: got 'huge', expected one of tiny, "),
                ({"widht": 3}, "got 'widht', expected one of preset, width, "),
                ({"width": 130}, "width: got 130, expected a multiple of num_heads=4"),
                ({"num_layers": 0}, "num_layers: got 0, expected a whole number of at least 1"),
                ({"num_heads": 2.0}, "num_heads: got 2.0, expected a whole number"),
                ({"tied": "yes"}, "tied: got 'yes', expected true or false"),
                ({"compute_dtype": "float16"}, "compute_dtype: got 'float16', expected float32 or"),
                ({"attention": "flash"}, "attention: got 'flash', expected auto, xla or cudnn"),
                ({"attention": "cudnn"}, "got 'cudnn', expected auto or xla with compute_dtype="),
            ]
        ),
        (llama, {"width": 12}, "got 12, expected heads of an even width: num_heads=4 has 3"),
        (llama, {"num_key_value_heads": 3}, "got 4, expected a multiple of num_key_value_heads=3"),
        (llama, {"hidden_width": 0}, "hidden_width: got 0, expected a whole number of at least 1"),
        (llama, {"rotary_base": 1}, "rotary_base: got 1, expected a number above 1"),
        (llama, {"rotary_base": "big"}, "rotary_base: got 'big', expected a number above 1"),
    ],
)
def test_wrong_sizes_are_named_with_what_was_expected(module, wrong, message):
    with pytest.raises(ValueError, match=message):
        module.build(**SMALL | wrong)


def test_the_sizes_are_known_without_jax():
    code = "import sys, jaxmorph.models.gpt2, jaxmorph.models.llama; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
