"""Samples from saved models made here, without a run, and the sizes of presets."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxmorph.cli import models
from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.models.gpt2 import build
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.training.saved_model import SamplingSettings, SavedModel

LENGTH, LAYERS = 8, 3


def saved(vocab_size=256, never=(), **data):
    """A saved model with random parameters that draws any token except some."""
    config = Config.model_validate({"data": {"sequence_length": LENGTH, **data}})
    model = build(
        preset="tiny", sequence_length=LENGTH, vocab_size=vocab_size,
        width=16, num_heads=2, num_layers=LAYERS, tied=False,
    )  # fmt: skip
    init = partial(init_stage_params, model, layers=range(LAYERS), is_first=True, is_last=True)
    shapes = jax.eval_shape(init, jax.random.key(0))
    random = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: np.float32(0.3 * random.normal(size=leaf.shape)), shapes)
    # A token's logit is its row times an activation that has this bias.
    params["head"]["norm"]["bias"][:] = 1.0
    params["head"]["token"][list(never)] = -100.0
    return SavedModel(config=config, model=model, step=7, stages=((range(LAYERS), params),))


@pytest.fixture
def load(monkeypatch):
    """Gives all runs this saved model; returns the arguments with which it was loaded."""
    asked = []

    def load(model):
        def load_saved_model(run_dir, step=None):
            asked.append((run_dir, step))
            return model

        monkeypatch.setattr(models, "load_saved_model", load_saved_model)
        return asked

    return load


def text(prompt="def ", **changes):
    options = {name: changes.pop(name) for name in ("step", "tokenizer") if name in changes}
    settings = SamplingSettings(**{"num_tokens": 12, "temperature": 3.0, **changes})
    return models.sample(Path("runs/a"), prompt, settings, **options)


def test_a_sample_is_the_prompt_and_more_tokens(load):
    asked = load(saved(never=[0, *range(128, 256)]))
    found = text(step=5)
    assert found.startswith("def ")
    assert len(found) == 4 + 12
    assert text() == found  # by the same seed
    assert text(seed=1) != found
    assert asked[0] == (Path("runs/a"), 5)
    assert asked[1] == (Path("runs/a"), None)


def test_a_sample_ends_with_the_document(load, monkeypatch):
    load(saved(never=range(1, 256)))
    assert text() == "def "
    load(saved())  # nothing after the document is shown
    monkeypatch.setattr(models, "continuation", lambda *_, **__: iter([97, 98, 0, 99]))
    assert text() == "def ab"


def test_a_long_prompt_keeps_its_last_tokens(load):
    load(saved(never=[0, *range(128, 256)]))
    assert len(text("")) == 12  # the beginning of a document
    prompt = "x" * 50
    assert len(text(prompt)) == 62
    assert text(prompt)[50:] == text("x" * LENGTH)[LENGTH:]


@pytest.fixture
def words(tmp_path):
    tokenizer = tokenizers.Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_the_tokenizer_joins_words(load, words):
    load(saved(vocab_size=300, tokenizer=words))  # more than the tokenizer knows
    found = text("a  b")
    assert found.startswith("a  b ")
    assert set(found[4:].split()) <= {"?", "a", "b", "c"}
    assert len(found[4:].split()) == 12


def test_packed_documents_begin_with_their_prompt(load):
    load(saved(packing="segments", never=[0, *range(128, 256)]))
    assert len(text("def")) == 3 + 12
    with pytest.raises(UserError, match=r"^--prompt: got '', expected some text: with data"):
        text("")


def test_prompts_that_cannot_be_encoded_are_one_line(load, words):
    load(saved(path="tokens.bin", vocab_size=4))
    with pytest.raises(UserError, match=r"^--tokenizer: got none, expected the tokenizer of the r"):
        text()
    assert text("a", tokenizer=words).startswith("a ")
    with pytest.raises(UserError, match=r"^--prompt: got '', expected some text: the tokenizer h"):
        text("", tokenizer=words)
    with pytest.raises(UserError, match=r"^--prompt: got token 102, expected ids below 4, the mo"):
        text("def", tokenizer="bytes")
    with pytest.raises(UserError, match=r"^--prompt: got '.udcff', expected text in UTF-8"):
        text("\udcff", tokenizer="bytes")


def test_the_command_prints_the_sample(load, run, expect_mistake):
    load(saved(never=[0, *range(128, 256)]))
    words = ["sample", "runs/a", "--prompt", "[red]def", "--tokens", "90", "--temperature"]
    assert run(*words, "3") == (0, text("[red]def", num_tokens=90) + "\n", "")
    expect_mistake("--temperature: got -1.0, expected a number of at least 0", *words, "-1")


@pytest.fixture
def odd_factory(monkeypatch):
    def refuse(preset, **_):
        if preset == "nope":
            raise KeyError(preset)
        raise ValueError("width: got 5, expected an even number")

    monkeypatch.setitem(sys.modules, "odd_model", SimpleNamespace(build=refuse))


def test_presets_have_rows_of_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("model", "--stages", "4")
    assert (code, err) == (0, "")
    lines = [line.split(maxsplit=3) for line in out.splitlines() if line.strip()]
    rows = {line[0]: [word.rstrip() for word in line] for line in lines}
    assert rows["124M"][2:] == ["124,439,808", "60.6 M, 21.3 M, 21.3 M, 59.9 M"]
    assert len(rows) == 15  # twelve presets, the title, the names of the columns and a rule


def test_other_factories_have_presets(run):
    code, out, err = run("model", "--factory", "llama", "--vocab-size", "32000")
    assert (code, err) == (0, "")
    counts = {words[0]: words[2] for line in out.splitlines() if len(words := line.split()) == 3}
    assert counts["7B"] == "6,738,415,616"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "--preset: got 'huge', expected one of tiny, "),
        (["--stages", "9"], "--stages: got 9, expected at most the 8 layers of 'tiny'"),
        (
            ["--factory", "no.such"],
            "--factory: got 'no.such', expected gpt2, llama, or a module with",
        ),
        (["--factory", "odd_model"], "--factory: got 'odd_model' without PRESETS"),
        (
            ["--factory", "odd_model", "--preset", "a"],
            "--factory: odd_model cannot build 'a': width: got 5, expected an even number",
        ),
        (["--factory", "odd_model", "--preset", "nope"], "test_models.py:"),
    ],
)
@pytest.mark.usefixtures("odd_factory")
def test_mistakes_are_one_line_that_names_the_option(expect_mistake, arguments, message):
    expect_mistake(message, "model", *arguments)


def test_a_tokenizer_is_exported_or_said_to_be_gone(tmp_path, load):
    words, run = tmp_path / "words.json", tmp_path / "run"
    tokenizers.Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(words))
    load(saved(tokenizer=str(words)))
    assert models.export_model(run, None, None).endswith(f"bytes in {run}/exported/step_7")
    exported = run / "exported/step_7/tokenizer.json"
    assert exported.read_bytes() == words.read_bytes()
    words.rename(tmp_path / "elsewhere.json")
    line = models.export_model(run, None, tmp_path / "to")
    assert line.endswith(
        f"in {tmp_path}/to, without the tokenizer {words}: No such file or directory"
    )
