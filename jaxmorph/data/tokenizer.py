"""Turns documents into token ids and back: plain bytes, or a Hugging Face `tokenizer.json`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tokenizers

from jaxmorph.errors import UserError

_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_DOCUMENTS_AT_ONCE = 256  # bounds the memory of encodings before they become arrays


class ByteTokenizer:
    """Every byte is a token; byte 0, which no text contains, separates documents."""

    vocab_size = 256
    separator = 0

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns 1-D uint8 ids."""
        return np.frombuffer(b"\0".join(documents), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids below 256, with U+FFFD in place of invalid UTF-8."""
        return bytes(byte for byte in ids if byte).decode("utf-8", errors="replace")


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`; its end-of-text token, if any, separates documents.

    Raises:
        UserError: the file is missing or is not a tokenizer.
    """

    def __init__(self, path: Path):
        self._tokenizer = _read_tokenizer(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        separators = [vocabulary[name] for name in _SEPARATOR_NAMES if name in vocabulary]
        self.separator = separators[0] if separators else None
        self._between = np.array(separators[:1], self._dtype)

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns 1-D uint16 or uint32 ids, without the special tokens that a template adds."""
        pieces = list(self._pieces(documents))
        return np.concatenate(pieces[1:]) if pieces else np.empty(0, self._dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens and unused ids, U+FFFD for invalid UTF-8."""
        return self._tokenizer.decode([int(token) for token in ids])

    @property
    def _dtype(self) -> type:
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def _pieces(self, documents: Sequence[bytes]) -> Iterator[np.ndarray]:
        """Yields the separator before each document's ids."""
        for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            texts = [text.decode() for text in documents[first : first + _DOCUMENTS_AT_ONCE]]
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield self._between
                yield np.array(encoding.ids, self._dtype)


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer
"""Encodes UTF-8 documents, with a separator between two; every id is below `vocab_size`."""


def open_tokenizer(name: str) -> Tokenizer:
    """Opens the tokenizer that `data.tokenizer` names: `bytes`, or a path of a `tokenizer.json`."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name))


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    expected = "expected bytes or the path of a tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"data.tokenizer: {path}: {error.strerror}, {expected}") from error
    except Exception as error:  # the package raises nothing narrower
        reason = " ".join(str(error).split())
        raise UserError(
            f"data.tokenizer: {path}: not a tokenizer ({reason}), {expected}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
