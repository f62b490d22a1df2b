from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from jaxmorph.data.batches import Batches
from jaxmorph.data.tokens import (
    Tokens,
    digest_of,
    hold_out,
    is_token_array,
    load_tokens,
    separator_of,
)
from jaxmorph.errors import UserError

IDS = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)


@pytest.fixture
def array_file(tmp_path):
    def write(ids, dtype: str) -> str:
        np.asarray(ids, dtype).tofile(tmp_path / "tokens.bin")
        return str(tmp_path / "tokens.bin")

    return write


def test_no_path_is_the_standard_library_as_bytes():
    tokens = load_tokens(None)
    assert tokens.vocab_size == 256
    assert b"def " in bytes(tokens.ids[:100_000])


def test_a_text_file_is_encoded_and_may_have_a_larger_vocabulary(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("hello")
    assert bytes(load_tokens(str(path)).ids) == b"hello"
    assert load_tokens(str(path), vocab_size=512).vocab_size == 512
    with pytest.raises(UserError, match=r"^data.vocab_size: got 255, expected at least the 256"):
        load_tokens(str(path), vocab_size=255)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_array_is_mapped_not_read(array_file, dtype):
    tokens = load_tokens(array_file([5, 500, 50_000], dtype), token_dtype=dtype)
    assert isinstance(tokens.ids, np.memmap)
    assert tokens.ids.tolist() == [5, 500, 50_000]
    assert tokens.vocab_size == 50_001
    assert load_tokens(tokens.source, token_dtype=dtype, vocab_size=50_257).vocab_size == 50_257


def test_a_token_array_takes_the_tokenizers_vocabulary(array_file, tmp_path):
    words = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?")).save(words)
    path = array_file([0, 1], "uint16")
    assert load_tokens(path, words).vocab_size == 3
    assert load_tokens(path, words, vocab_size=9).vocab_size == 9
    with pytest.raises(UserError, match=r"^data.tokenizer: "):
        load_tokens(path, str(tmp_path / "none.json"))
    other = array_file([0, 3], "uint16")
    with pytest.raises(UserError, match=r"^data.tokenizer: .* got a vocabulary of 3, .* the 4 of"):
        load_tokens(other, words)


def test_documents_end_with_their_tokenizers_separator(array_file, tmp_path):
    assert separator_of(None, "bytes") == 0
    path = array_file([0, 1], "uint16")
    with pytest.raises(UserError) as caught:
        separator_of(path, "bytes")
    assert str(caught.value) == (
        f"data.packing: got segments, but no tokenizer says which token of {path} ends a document: "
        "expected data.tokenizer, the path of its tokenizer.json"
    )
    words = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(WordLevel({"?": 0, "</s>": 1}, unk_token="?")).save(words)
    assert separator_of(path, words) == 1
    tokenizers.Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?")).save(words)
    with pytest.raises(UserError) as caught:
        separator_of(None, words)
    assert str(caught.value) == (
        "data.packing: got segments, expected a tokenizer with a token that ends documents, such "
        f"as <|endoftext|>: {words} has none"
    )


@pytest.mark.long
def test_an_array_of_a_terabyte_costs_a_few_pages(array_file):
    path = array_file([1, 2], "uint16")
    with Path(path).open("r+b") as file:
        file.truncate(2**40)  # sparse
    before = getrusage(RUSAGE_SELF)
    tokens = load_tokens(path, vocab_size=3)
    digest = digest_of(tokens.ids)
    train, _ = hold_out(tokens, 0.1)
    batches = Batches(train, microbatches=2, microbatch_size=2, sequence_length=1024, seed=0)
    assert batches.inputs(10**6).shape == (2, 2, 1024)
    after = getrusage(RUSAGE_SELF)
    assert digest.num_tokens == 2**39
    assert after.ru_maxrss - before.ru_maxrss < 2**20  # KiB; most of it imports


def test_a_large_array_is_not_read_for_its_vocabulary(array_file, tmp_path):
    path = array_file([1, 2], "uint16")
    with Path(path).open("r+b") as file:
        file.truncate(2**28 + 2)  # sparse
        file.seek(2**27)
        file.write(_array([9], "<u2"))
    with pytest.raises(UserError, match=r"^data.vocab_size: got none, expected the vocabulary of "):
        load_tokens(path)
    assert load_tokens(path, vocab_size=5).vocab_size == 5
    words = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?")).save(words)
    tokens = load_tokens(path, words)
    assert tokens.vocab_size == 3
    at = 2**26
    sizes = {"microbatches": 1, "microbatch_size": 1, "sequence_length": 2, "seed": 0}
    with pytest.raises(UserError, match=r"got token 9, expected ids below 3 "):
        Batches(replace(tokens, ids=tokens.ids[at : at + 4]), **sizes).inputs(0)


def _array(ids, dtype):
    return np.asarray(ids, dtype).tobytes()


@pytest.mark.parametrize(
    ("name", "content", "dtype", "says"),
    [
        ("tokens.bin", _array(range(1000), "<u4"), "uint16", "expected data.token_dtype: uint32"),
        (
            "tokens.bin", _array(range(1000, 2000), "<u2"), "uint32",
            r"got token [\d,]+, expected ids below",
        ),
        (  # ids of bytes: a vocabulary of 16 million would take all memory
            "tokens.bin", _array(IDS[:6000], "<u2"), "uint32",
            r"got token 16,[\d,]+, expected ids below 1,000,000 .*is data.token_dtype wrong",
        ),
        ("tokens.bin", b"", "uint16", r"\S+: got 0 bytes, expected uint16 tokens of 2 bytes each"),
        ("tokens.bin", b"abc", "uint16", r"\S+: got 3 bytes, expected uint16 tokens of 2 bytes e"),
        ("tokens.bin", None, "uint16", r"\S+tokens.bin: no such file"),
        ("empty.txt", b"", "uint16", r"\S+empty.txt: the file is empty"),
    ],
)  # fmt: skip
def test_wrong_token_arrays_are_refused(tmp_path, name, content, dtype, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^data.path: (.*){says}"):
        load_tokens(str(tmp_path / name), token_dtype=dtype)


def test_the_end_is_held_out_and_not_trained_on():
    tokens = Tokens(np.arange(1003, dtype=np.uint16), 2000, "some text")
    training, held_out = hold_out(tokens, 0.1)
    assert held_out is not None
    assert training.ids.tolist() == list(range(903))
    assert held_out.ids.tolist() == list(range(903, 1003))
    assert (training.source, held_out.source) == ("some text", "the held-out end of some text")
    assert training.vocab_size == held_out.vocab_size == 2000
    assert hold_out(tokens, 0.0)[0] is tokens
    assert hold_out(tokens, 0.0)[1] is None


def test_holding_out_keeps_an_array_on_disk(array_file):
    tokens = load_tokens(array_file(range(100), "uint16"), vocab_size=100)
    training, held_out = hold_out(tokens, 0.25)
    assert held_out is not None
    assert isinstance(training.ids, np.memmap)
    assert isinstance(held_out.ids, np.memmap)
    assert (len(training.ids), len(held_out.ids)) == (75, 25)


def test_only_bin_files_are_token_arrays(tmp_path):
    (tmp_path / "folder.bin").mkdir()
    named = ["tokens.bin", str(tmp_path / "folder.bin"), "text.txt", None]
    assert [is_token_array(path) for path in named] == [True, False, False, False]


def test_the_same_tokens_have_the_same_digest_whatever_their_type():
    assert digest_of(IDS) == digest_of(IDS.astype(np.uint32).copy())
    assert digest_of(IDS).num_tokens == 100_000


@pytest.mark.parametrize("changed", [0, 99_999, 390 * 100])
def test_a_changed_token_changes_the_digest(changed):
    ids = IDS.copy()
    ids[changed] ^= 1
    assert digest_of(ids) != digest_of(IDS)


def test_texts_of_different_lengths_have_different_digests():
    found = {digest_of(np.zeros(size, np.uint16)) for size in (0, 1, 2, 255, 256, 9000, 9001)}
    assert len(found) == 7
