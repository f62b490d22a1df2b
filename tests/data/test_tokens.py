import numpy as np
import pytest

from jaxmorph.data.tokens import load_tokens
from jaxmorph.errors import UserError


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


def test_small_uint32_tokens_are_not_taken_for_uint16(array_file):
    path = array_file(range(1000), "<u4")
    with pytest.raises(UserError, match=r"expected data.token_dtype: uint32"):
        load_tokens(path, token_dtype="uint16")


def test_uint16_tokens_are_not_taken_for_uint32(array_file):
    path = array_file(range(1000, 2000), "<u2")
    with pytest.raises(UserError, match=r"got token [\d,]+, expected ids below"):
        load_tokens(path, token_dtype="uint32")


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_size_that_is_no_whole_number_of_tokens_is_told(tmp_path, content):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    expected = f"{path}: got {len(content)} bytes, expected uint16 tokens of 2 bytes each"
    with pytest.raises(UserError, match=f"^data.path: {expected}"):
        load_tokens(str(path))


def test_missing_and_empty_files_are_told(tmp_path):
    with pytest.raises(UserError, match=r"^data.path: nope.bin: no such file"):
        load_tokens("nope.bin")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"^data.path: \S+empty.txt: the file is empty"):
        load_tokens(str(tmp_path / "empty.txt"))
