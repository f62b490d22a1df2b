"""GPT-2's weights in Hugging Face's files, without torch: names, layouts and mistakes."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmorph.models.gpt2 import build
from jaxmorph.models.gpt2.hugging_face import StoredTensors
from jaxmorph.models.gpt2.model import by_heads
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.model import model_logits

LENGTH, VOCAB, WIDTH, HEADS, LAYERS = 6, 11, 8, 2, 3


def model_of(**changes):
    sizes = {"width": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, **changes}
    return build(**{"preset": "tiny", "sequence_length": LENGTH, "vocab_size": VOCAB, **sizes})


def random_tensors(prefix="transformer.", seed=0, positions=LENGTH):
    """A GPT-2's tensors, with Hugging Face's names and shapes written out by hand."""
    wide, random = 4 * WIDTH, np.random.default_rng(seed)
    shapes = {
        "wte.weight": (VOCAB, WIDTH),
        "wpe.weight": (positions, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "ln_1.weight": (WIDTH,),
            "ln_1.bias": (WIDTH,),
            "attn.c_attn.weight": (WIDTH, 3 * WIDTH),
            "attn.c_attn.bias": (3 * WIDTH,),
            "attn.c_proj.weight": (WIDTH, WIDTH),
            "attn.c_proj.bias": (WIDTH,),
            "ln_2.weight": (WIDTH,),
            "ln_2.bias": (WIDTH,),
            "mlp.c_fc.weight": (WIDTH, wide),
            "mlp.c_fc.bias": (wide,),
            "mlp.c_proj.weight": (wide, WIDTH),
            "mlp.c_proj.bias": (WIDTH,),
        }.items():
            shapes[f"h.{layer}.{name}"] = shape
    return {
        prefix + name: 0.5 * random.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }


def reference_logits(tensors, tokens, prefix="transformer."):
    """GPT-2 by the names in the file, position by position, in float64 numpy."""
    t = {name.removeprefix(prefix): array.astype(np.float64) for name, array in tensors.items()}

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(name, x):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["wte.weight"][tokens] + t["wpe.weight"][: len(tokens)]
    each = WIDTH // HEADS
    for layer in range(LAYERS):
        qkv = linear(f"h.{layer}.attn.c_attn", norm(f"h.{layer}.ln_1", x))
        q, k, v = qkv[:, :WIDTH], qkv[:, WIDTH : 2 * WIDTH], qkv[:, 2 * WIDTH :]
        context = np.zeros_like(x)
        for position in range(len(tokens)):
            for own in (slice(head * each, (head + 1) * each) for head in range(HEADS)):
                scores = k[: position + 1, own] @ q[position, own] / np.sqrt(each)
                weights = np.exp(scores - scores.max())
                context[position, own] = weights / weights.sum() @ v[: position + 1, own]
        x = x + linear(f"h.{layer}.attn.c_proj", context)
        u = linear(f"h.{layer}.mlp.c_fc", norm(f"h.{layer}.ln_2", x))
        gelu = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        x = x + linear(f"h.{layer}.mlp.c_proj", gelu)
    return norm("ln_f", x) @ t.get("lm_head.weight", t["wte.weight"]).T


def logits_of(model, params, tokens):
    return np.asarray(model_logits(model, params, tokens[None]))[0]


def read_whole(model, path):
    return model.read_weights(str(path), range(model.num_layers), is_first=True, is_last=True)


def sharded(folder, tensors, num_files=2):
    """Writes the tensors to several files with an index, as large models are published."""
    names = list(tensors)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = names[number::num_files]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


TOKENS = np.array([3, 0, 10, 7, 3, 1], np.int32)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_logits_match_a_reference_by_tensor_names(tmp_path, prefix):
    tensors = random_tensors(prefix)
    save_file(tensors, tmp_path / "model.safetensors")
    model = model_of()
    got = logits_of(model, read_whole(model, tmp_path), TOKENS)
    np.testing.assert_allclose(got, reference_logits(tensors, TOKENS, prefix), atol=1e-4)


@pytest.mark.parametrize("place", ["", "model.safetensors.index.json"])
def test_sharded_files_read_like_one(tmp_path, place):
    tensors = random_tensors()
    save_file(tensors, tmp_path / "whole.safetensors")
    (tmp_path / "parts").mkdir()
    sharded(tmp_path / "parts", tensors)
    model = model_of()
    got = read_whole(model, tmp_path / "parts" / place)
    expected = read_whole(model, tmp_path / "whole.safetensors")
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("layers", "is_first", "is_last"),
    [(range(1), True, False), (range(1, 2), False, False), (range(1, 3), False, True)],
)
def test_a_stage_reads_only_its_own_tensors(tmp_path, monkeypatch, layers, is_first, is_last):
    save_file(random_tensors(), tmp_path / "model.safetensors")
    model, loaded, read = model_of(), [], StoredTensors.read

    def recorded(self, name, *arguments):
        loaded.append(name)
        return read(self, name, *arguments)

    whole = read_whole(model, tmp_path)
    monkeypatch.setattr(StoredTensors, "read", recorded)
    got = model.read_weights(str(tmp_path), layers, is_first, is_last)
    own = [f"h.{layer}." for layer in layers]
    own += ["wpe.", "wte."] * is_first + ["ln_f.", "wte."] * is_last
    names = [name.removeprefix("transformer.") for name in random_tensors()]
    wanted = [name for name in names if name.startswith(tuple(own))]
    assert sorted(loaded) == sorted(f"transformer.{name}" for name in wanted)
    part = {"layers": jax.tree.map(lambda leaf: leaf[layers.start : layers.stop], whole["layers"])}
    part |= {
        name: whole[name] for name, here in {"embed": is_first, "head": is_last}.items() if here
    }
    jax.tree.map(np.testing.assert_array_equal, got, part)


def test_without_layers_files_are_only_checked(tmp_path, monkeypatch):
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.delattr(StoredTensors, "read")
    params = model_of().read_weights(str(tmp_path), range(0), is_first=False, is_last=False)
    assert list(params) == ["layers"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params)} == {0}
    with pytest.raises(ValueError, match=r"wte.weight: got"):
        model_of(vocab_size=12).read_weights(str(tmp_path), range(0), False, False)


def initial_params(model, layers, is_first, is_last):
    key = jax.random.key(5)
    stacked = [model.init_layer(jax.random.fold_in(key, layer)) for layer in layers]
    params = {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *stacked)}
    if is_first:
        params["embed"] = jax.tree.map(np.asarray, model.init_embed(key))
    if is_last:
        head = model.init_head(jax.random.fold_in(key, 99))
        tied = {"token": model.init_embed(key)["token"]} if model.tied else {}
        params["head"] = jax.tree.map(np.asarray, {**head, **tied})
    return params


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cut", [[3], [1, 2], [1, 1, 1]])
def test_weights_read_back_to_the_bit(tmp_path, cut, tied):
    model = model_of(tied=tied)
    stages = [
        (layers, initial_params(model, layers, layers.start == 0, layers.stop == LAYERS))
        for layers in cut_layers(LAYERS, len(cut), cut)
    ]
    model.write_weights(str(tmp_path / "made"), reversed(stages))
    for layers, params in stages:
        got = model.read_weights(
            str(tmp_path / "made"), layers, is_first="embed" in params, is_last="head" in params
        )
        jax.tree.map(np.testing.assert_array_equal, got, params)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    assert set(tensors) == {*random_tensors(), *([] if tied else ["lm_head.weight"])}
    assert {array.dtype for array in tensors.values()} == {np.dtype("float32")}


def test_files_in_half_precision_become_float32(tmp_path):
    tensors = random_tensors()
    half = {
        name: array.astype(ml_dtypes.bfloat16 if "attn" in name else np.float16)
        for name, array in tensors.items()
    }
    save_file(half, tmp_path / "model.safetensors")
    got = read_whole(model_of(), tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype("float32")}
    columns = half["transformer.h.1.attn.c_attn.weight"].astype(np.float32)
    expected = by_heads(columns, HEADS)
    np.testing.assert_array_equal(got["layers"]["attention"]["qkv"]["kernel"][1], expected)


def test_positions_beyond_the_models_are_dropped(tmp_path):
    tensors = random_tensors(positions=LENGTH + 4)
    save_file(tensors, tmp_path / "model.safetensors")
    got = read_whole(model_of(), tmp_path)["embed"]["position"]
    np.testing.assert_array_equal(got, tensors["transformer.wpe.weight"][:LENGTH])


def test_masks_in_older_files_are_ignored(tmp_path):
    tensors = random_tensors("")
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 6, 6), np.uint8),
        "h.0.attn.masked_bias": np.float32(0),
    }
    save_file(tensors | {n: np.asarray(a) for n, a in masks.items()}, tmp_path / "a.safetensors")
    got = logits_of(model_of(), read_whole(model_of(), tmp_path / "a.safetensors"), TOKENS)
    np.testing.assert_allclose(got, reference_logits(tensors, TOKENS, ""), atol=1e-4)


def test_an_untied_head_is_read_or_copies_the_embedding(tmp_path):
    tensors, other = random_tensors(), random_tensors(seed=1)["transformer.wte.weight"]
    untied = model_of(tied=False)
    save_file(tensors | {"lm_head.weight": other}, tmp_path / "untied.safetensors")
    save_file(tensors, tmp_path / "tied.safetensors")
    got = read_whole(untied, tmp_path / "untied.safetensors")["head"]["token"]
    np.testing.assert_array_equal(got, other)
    got = read_whole(untied, tmp_path / "tied.safetensors")["head"]["token"]
    np.testing.assert_array_equal(got, tensors["transformer.wte.weight"])
    with pytest.raises(
        ValueError, match=r"got a lm_head.weight other than wte.weight, expected tied"
    ):
        read_whole(model_of(), tmp_path / "untied.safetensors")
    same = {"lm_head.weight": tensors["transformer.wte.weight"].copy()}
    save_file(tensors | same, tmp_path / "both.safetensors")
    read_whole(model_of(), tmp_path / "both.safetensors")


def without(tensors, name):
    return {key: array for key, array in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        (
            lambda t: t,
            {"vocab_size": 12},
            r"wte.weight: got \[11, 8\], expected \[12, 8\] \(vocab_",
        ),
        (
            lambda t: t,
            {"sequence_length": 7},
            r"wpe.weight: got \[6, 8\], expected at least \[7, 8",
        ),
        (
            lambda t: t,
            {"num_layers": 2},
            r"got transformer.h.2.attn.c_attn.bias and 11 more as well",
        ),
        (
            lambda t: t,
            {"num_layers": 4},
            r"got no transformer.h.3.ln_1.weight and 11 more, expected",
        ),
        (
            lambda t: without(t, "transformer.ln_f.bias"),
            {},
            r"got no transformer.ln_f.bias, expected those of a GPT-2 of 3 layers",
        ),
        (
            lambda t: t | {"score.weight": np.ones((2, 8), np.float32)},
            {},
            r"got score.weight as well, expected those of a GPT-2",
        ),
        (
            lambda t: t | {"transformer.h.0.mlp.c_fc.weight": np.ones((32, 8), np.float32)},
            {},
            r"h.0.mlp.c_fc.weight: got \[32, 8\], expected \[8, 32\] \(width, 4 \* width\)",
        ),
        (lambda t: {"a": np.ones(2)}, {}, r"got no wte.weight, nor one after transformer"),
        (
            lambda t: t | {"transformer.ln_f.bias": np.ones(8, np.int32)},
            {},
            r"ln_f.bias: got I32, expected one of F16, BF16",
        ),
    ],
)
def test_files_of_another_model_are_refused_in_one_line(tmp_path, change, sizes, message):
    save_file(change(random_tensors()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        read_whole(model_of(**sizes), tmp_path)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_head": 4}, "n_head: got 4, expected 2"),
        ({"model_type": "gpt_neo"}, "model_type: got 'gpt_neo', expected 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function: got 'relu', expected 'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "got True, expected False"),
    ],
)
def test_a_config_of_another_computation_is_refused(tmp_path, setting, message):
    save_file(random_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(setting))
    with pytest.raises(ValueError, match=message):
        read_whole(model_of(), tmp_path)


def write_no_header(folder):
    (folder / "model.safetensors").write_bytes(b"nothing of the kind")


def write_lying_index(folder):
    tensors = random_tensors()
    sharded(folder, tensors)
    save_file({"other": np.ones(1)}, folder / "model-00002-of-00002.safetensors")


def write_index_without_files(folder):
    sharded(folder, random_tensors())
    (folder / "model-00001-of-00002.safetensors").unlink()


def write_other_json(folder):
    (folder / "model.safetensors.index.json").write_text("[1]")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, "no safetensors there, expected a folder with model.safetensors or"),
        (lambda folder: folder.rmdir(), "no such file or folder, expected a folder with"),
        (write_no_header, "cannot be read as safetensors"),
        (write_lying_index, "which the index says it has"),
        (write_index_without_files, "cannot be read as safetensors: No such file"),
        (write_other_json, "got list, expected a JSON object"),
    ],
)
def test_paths_without_weights_are_refused_in_one_line(tmp_path, write, message):
    folder = tmp_path / "weights"
    folder.mkdir()
    write(folder)
    with pytest.raises(ValueError, match=message) as error:
        read_whole(model_of(), folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_writing_parts_missing_or_twice_is_refused(tmp_path):
    model = model_of()
    first = (range(2), initial_params(model, range(2), True, False))
    last = (range(2, 3), initial_params(model, range(2, 3), False, True))
    with pytest.raises(ValueError, match=r"got no stage with transformer.ln_f.weight and 13 more"):
        model.write_weights(str(tmp_path), [first])
    with pytest.raises(ValueError, match=r"h.2.ln_1.weight: got it from two stages"):
        model.write_weights(str(tmp_path), [first, last, last])
    assert not list(tmp_path.iterdir())
