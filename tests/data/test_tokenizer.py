import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxmorph.data.tokenizer import open_tokenizer
from jaxmorph.errors import UserError

DOCUMENTS = [b"a b", b"", b"b c a"]


@pytest.fixture
def tokenizer_file(tmp_path):
    def write(vocabulary: dict[str, int], special: list[str]) -> str:
        tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.add_special_tokens(special)
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=7)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path / "tokenizer.json")

    return write


def test_bytes_are_their_own_ids_with_byte_0_between_documents():
    ids = open_tokenizer("bytes").encode(DOCUMENTS)
    assert ids.dtype == np.uint8
    assert bytes(ids) == b"a b\0\0b c a"


def test_a_file_puts_its_end_of_text_token_between_documents(tokenizer_file):
    path = tokenizer_file({"?": 0, "a": 1, "b": 2, "c": 3}, ["<|endoftext|>"])
    tokenizer = open_tokenizer(path)
    ids = tokenizer.encode(DOCUMENTS)
    assert ids.tolist() == [1, 2, 4, 4, 2, 3, 1]
    assert (ids.dtype, tokenizer.vocab_size) == (np.uint16, 5)


def test_a_file_without_such_a_token_puts_nothing_between_documents(tokenizer_file):
    tokenizer = open_tokenizer(tokenizer_file({"?": 0, "a": 1, "b": 2, "c": 70_000}, []))
    ids = tokenizer.encode(DOCUMENTS)
    assert ids.tolist() == [1, 2, 2, 70_000, 1]
    assert (ids.dtype, tokenizer.vocab_size) == (np.uint32, 70_001)


def test_bytes_decode_with_a_mark_for_invalid_utf8():
    tokenizer = open_tokenizer("bytes")
    text = "grün\n€"
    assert tokenizer.decode(tokenizer.encode([text.encode()]).tolist()) == text
    assert tokenizer.decode([0x61, 0xE2, 0x82, 0x62, 0xFF]) == "a\ufffdb\ufffd"
    assert tokenizer.separator is not None
    assert tokenizer.decode([0x61, tokenizer.separator, 0x62]) == "ab"
    assert tokenizer.decode([]) == ""


def test_decoding_skips_separators_and_unused_ids(tokenizer_file):
    tokenizer = open_tokenizer(tokenizer_file({"?": 0, "a": 1, "b": 2, "c": 9}, ["</s>"]))
    assert tokenizer.separator == 4  # an id that no other token had
    assert tokenizer.decode([1, 2, 4, 9]) == "a b c"
    assert tokenizer.decode([1, 7, 2]) == "a b"
    assert open_tokenizer(tokenizer_file({"?": 0, "a": 1}, [])).separator is None


def test_a_missing_or_broken_tokenizer_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^data.tokenizer: byte: No such file or directory, exp"):
        open_tokenizer("byte")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"^data.tokenizer: \S+: not a tokenizer \(.+\), expected"):
        open_tokenizer(str(tmp_path / "broken.json"))
