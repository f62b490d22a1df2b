"""Our models against Hugging Face's with the same random weights; needs torch."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxmorph.models import gpt2, llama
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.model import join_stages, model_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.extras

GPT2_SIZES = {
    "narrow": {"width": 32, "num_layers": 2, "num_heads": 4, "length": 16, "vocabulary": 61},
    "wide": {"width": 192, "num_layers": 5, "num_heads": 6, "length": 96, "vocabulary": 1009},
}


@pytest.fixture(autouse=True)
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def randomised(reference, scale=0.1):
    """Changes all parameters, so that none has a value that hides its use, such as a bias of 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return reference.eval()


def gpt2_reference(width, num_layers, num_heads, length, vocabulary, **settings):
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    torch.manual_seed(0)
    return randomised(transformers.GPT2LMHeadModel(config))


def gpt2_model(width, num_layers, num_heads, length, vocabulary, **changes):
    return gpt2.build(
        preset="tiny",
        sequence_length=length,
        vocab_size=vocabulary,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        **changes,
    )


def some_tokens(length, vocabulary):
    return np.random.default_rng(2).integers(vocabulary, size=(2, length), dtype=np.int32)


def reference_logits(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def logits_of(model, params, tokens):
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(partial(model_logits, model))(params, tokens))


def read_in_stages(model, path, cut):
    """The whole model's parameters, read stage by stage."""
    num_layers = model.num_layers
    return join_stages(
        (
            layers,
            model.read_weights(str(path), layers, layers.start == 0, layers.stop == num_layers),
        )
        for layers in cut_layers(num_layers, len(cut), cut)
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("size", GPT2_SIZES)
def test_gpt2s_logits_are_hugging_faces(tmp_path, size, tied):
    sizes = GPT2_SIZES[size]
    reference = gpt2_reference(**sizes, tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path)
    model = gpt2_model(**sizes, tied=tied)
    cut = [1, model.num_layers - 1]
    tokens = some_tokens(sizes["length"], sizes["vocabulary"])
    got = logits_of(model, read_in_stages(model, tmp_path, cut), tokens)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_gpt2_without_its_head_and_in_several_files_is_read(tmp_path):
    sizes = GPT2_SIZES["wide"]
    reference = gpt2_reference(**sizes)
    reference.transformer.save_pretrained(tmp_path, max_shard_size="2MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = gpt2_model(**sizes)
    tokens = some_tokens(sizes["length"], sizes["vocabulary"])
    got = logits_of(model, read_in_stages(model, tmp_path, [2, 2, 1]), tokens)
    np.testing.assert_allclose(got, reference_logits(reference, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("size", GPT2_SIZES)
def test_hugging_face_loads_what_we_write(tmp_path, size, tied):
    sizes = GPT2_SIZES[size]
    reference = gpt2_reference(**sizes, tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path / "theirs")
    model = gpt2_model(**sizes, tied=tied)
    params = read_in_stages(model, tmp_path / "theirs", [1, model.num_layers - 1])
    model.write_weights(str(tmp_path / "ours"), [(range(model.num_layers), params)])
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    ours, theirs = loaded.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    tokens = some_tokens(sizes["length"], sizes["vocabulary"])
    np.testing.assert_array_equal(
        reference_logits(loaded.eval(), tokens), reference_logits(reference, tokens)
    )


LLAMA_SIZES = {
    "narrow": {"width": 32, "num_layers": 2, "num_heads": 4, "groups": 2, "hidden": 48},
    "wide": {"width": 192, "num_layers": 4, "num_heads": 6, "groups": 2, "hidden": 512},
}
LLAMA_LENGTH, LLAMA_VOCABULARY = 80, 211


def llama_params(reference):
    """The reference's weights in our layout: matrices transposed, and some of them joined."""
    theirs = {name: array.numpy() for name, array in reference.state_dict().items()}

    def layer(number):
        def matrix(name):
            return theirs[f"model.layers.{number}.{name}_proj.weight"].T

        def scale(name):
            return {"scale": theirs[f"model.layers.{number}.{name}_layernorm.weight"]}

        q, k, v = (matrix(f"self_attn.{name}") for name in "qkv")
        num_groups = reference.config.num_key_value_heads
        groups = [part.reshape(len(part), num_groups, -1) for part in (q, k, v)]
        return {
            "attention_norm": scale("input"),
            "attention": {
                "qkv": {"kernel": np.concatenate(groups, axis=-1).reshape(len(q), -1)},
                "out": {"kernel": matrix("self_attn.o")},
            },
            "mlp_norm": scale("post_attention"),
            "expand": {"kernel": np.stack([matrix("mlp.gate"), matrix("mlp.up")], axis=1)},
            "contract": {"kernel": matrix("mlp.down")},
        }

    layers = [layer(number) for number in range(reference.config.num_hidden_layers)]
    return {
        "embed": {"token": theirs["model.embed_tokens.weight"]},
        "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers),
        "head": {
            "norm": {"scale": theirs["model.norm.weight"]},
            "token": theirs["lm_head.weight"],
        },
    }


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("size", "base"), [("narrow", 500_000.0), ("wide", 10_000.0)])
def test_llamas_logits_are_hugging_faces(size, base, tied):
    sizes = LLAMA_SIZES[size]
    config = transformers.LlamaConfig(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=sizes["width"],
        intermediate_size=sizes["hidden"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["groups"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    reference = randomised(transformers.LlamaForCausalLM(config))
    model = llama.build(
        preset="tiny",
        sequence_length=LLAMA_LENGTH,
        vocab_size=LLAMA_VOCABULARY,
        width=sizes["width"],
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        num_key_value_heads=sizes["groups"],
        hidden_width=sizes["hidden"],
        rotary_base=base,
        tied=tied,
    )
    params = llama_params(reference)
    assert jax.tree.map(np.shape, params["head"]) == jax.tree.map(
        np.shape, jax.eval_shape(model.init_head, jax.random.key(0))
    )
    tokens = some_tokens(LLAMA_LENGTH, LLAMA_VOCABULARY)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits_of(model, params, tokens), expected, rtol=0, atol=1e-4)
