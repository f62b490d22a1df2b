"""The run's whole text as one array of token ids, and a digest that detects changes."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from jaxmorph.data.documents import standard_library_documents, text_documents
from jaxmorph.data.tokenizer import open_tokenizer
from jaxmorph.errors import UserError

_LARGEST_VOCABULARY = 1_000_000  # a larger one means that the array was read with the wrong type
_MOST_READ_BYTES = 2**28  # of an array, to find its largest id
_BLOCK_TOKENS = 2**20
_HEAD_TOKENS = 4096
_BYTES = "bytes"
_DIGEST_END_TOKENS = 4096
_DIGEST_SAMPLES = 256  # few, because each may read another page of a file on a network


@dataclass(frozen=True, eq=False)  # arrays have no single equality
class Tokens:
    """A text as token ids.

    Attributes:
        ids: 1-D unsigned integers; memory-mapped for a token array.
        vocab_size: of the model to train on this text.
        source: names the text in errors.
    """

    ids: np.ndarray
    vocab_size: int
    source: str


def load_tokens(
    path: str | None,
    tokenizer: str = _BYTES,
    token_dtype: str = "uint16",
    vocab_size: int | None = None,
) -> Tokens:
    """Loads the tokens that the configuration's `data` section names.

    Args:
        path: a text file, a folder of text files, a `.bin` token array (little-endian ids without
            a header, as nanoGPT and Megatron write them), or None for the standard library's
            sources.
        tokenizer: `bytes` or the path of a `tokenizer.json`. A token array needs none, but takes
            the vocabulary of a given one.
        token_dtype: `uint16` or `uint32`, the type of the ids in a token array.
        vocab_size: None takes the tokenizer's or, for a token array without one, the largest id
            plus one. A token array above 256 MiB is not searched: it needs this or a tokenizer.

    Raises:
        UserError: the path, the tokenizer or the vocabulary cannot be used.
    """
    if path is not None and is_token_array(path):
        ids = _map_token_array(Path(path), token_dtype)
        if vocab_size is None:
            vocab_size = _vocabulary_of(ids, path, tokenizer)
        return Tokens(ids, vocab_size, path)
    if path is None:
        documents, source = standard_library_documents(), "the Python standard library's sources"
    else:
        documents, source = text_documents(Path(path)), path
    encoder = open_tokenizer(tokenizer)
    if vocab_size is not None and vocab_size < encoder.vocab_size:
        raise UserError(
            f"data.vocab_size: got {vocab_size:,}, expected at least the {encoder.vocab_size:,} "
            f"of data.tokenizer ({tokenizer})"
        )
    ids = encoder.encode(documents)
    if not ids.size:
        raise UserError(f"data.path: {source}: the file is empty, expected text")
    return Tokens(ids, vocab_size or encoder.vocab_size, source)


def is_token_array(path: str | None) -> bool:
    """Whether `data.path` names a token array, which needs no tokenizer."""
    return path is not None and path.endswith(".bin") and not Path(path).is_dir()


def separator_of(path: str | None, tokenizer: str) -> int:
    """Returns the token that separates the documents of a text, which packing needs.

    Raises:
        UserError: the tokenizer has none, or the text is a token array without a tokenizer.
    """
    if is_token_array(path) and tokenizer == _BYTES:
        raise UserError(
            f"data.packing: got segments, but no tokenizer says which token of {path} ends a "
            "document: expected data.tokenizer, the path of its tokenizer.json"
        )
    separator = open_tokenizer(tokenizer).separator
    if separator is None:
        raise UserError(
            "data.packing: got segments, expected a tokenizer with a token that ends documents, "
            f"such as <|endoftext|>: {tokenizer} has none"
        )
    return separator


def hold_out(tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens | None]:
    """Splits off the end of a text.

    Args:
        fraction: of the text to hold out, from 0 to below 1.

    Returns:
        The text to train on, and the held-out text, or None for a fraction of 0.
    """
    if not fraction:
        return tokens, None
    cut = tokens.ids.size - int(tokens.ids.size * fraction)
    source = f"the held-out end of {tokens.source}"
    held_out = replace(tokens, ids=tokens.ids[cut:], source=source)
    return replace(tokens, ids=tokens.ids[:cut]), held_out


def check_ids(ids: np.ndarray, vocab_size: int, source: str) -> None:
    """Checks that every id is in the vocabulary.

    Raises:
        UserError: an id is `vocab_size` or more.
    """
    largest = int(ids.max())
    if largest >= vocab_size:
        raise UserError(
            f"data.path: {source}: got token {largest:,}, expected ids below {vocab_size:,} "
            "(data.vocab_size; or is data.token_dtype wrong?)"
        )


def _vocabulary_of(ids: np.ndarray, source: str, tokenizer: str) -> int:
    """The vocabulary of the tokenizer, which must cover all ids; for `bytes`, the smallest.

    Of a large array only the first ids are compared; `Batches` checks all that are trained on.
    """
    is_large = ids.nbytes > _MOST_READ_BYTES
    if is_large and tokenizer == _BYTES:
        raise UserError(
            f"data.vocab_size: got none, expected the vocabulary of {source}: its {ids.nbytes:,} "
            "bytes are too many to look for the largest id (or data.tokenizer)"
        )
    smallest = _smallest_vocabulary(ids[:_HEAD_TOKENS] if is_large else ids, source)
    if tokenizer == _BYTES:
        return smallest
    own = open_tokenizer(tokenizer).vocab_size
    if own < smallest:
        raise UserError(
            f"data.tokenizer: {tokenizer}: got a vocabulary of {own:,}, expected at least the "
            f"{smallest:,} of {source} (or data.vocab_size)"
        )
    return own


def _smallest_vocabulary(ids: np.ndarray, source: str) -> int:
    """The largest id plus one, if that can be a vocabulary; searched block by block."""
    largest = 0
    for start in range(0, ids.size, _BLOCK_TOKENS):
        block = ids[start : start + _BLOCK_TOKENS]
        check_ids(block, _LARGEST_VOCABULARY, source)
        largest = max(largest, int(block.max()))
    return largest + 1


def _map_token_array(path: Path, token_dtype: str) -> np.ndarray:
    """Maps a file of ids into memory; its size and its first ids must fit the type."""
    dtype = np.dtype(token_dtype).newbyteorder("<")
    try:
        num_bytes = path.stat().st_size
        if not num_bytes or num_bytes % dtype.itemsize:
            raise UserError(
                f"data.path: {path}: got {num_bytes:,} bytes, expected {token_dtype} tokens of "
                f"{dtype.itemsize} bytes each (data.token_dtype)"
            )
        ids = np.memmap(path, dtype, mode="r")
    except FileNotFoundError as error:
        raise UserError(f"data.path: {path}: no such file, expected a token array") from error
    except OSError as error:
        raise UserError(f"data.path: {path}: cannot be read: {error.strerror}") from error
    if token_dtype == "uint16" and _is_wider(ids):
        raise UserError(
            f"data.path: {path}: got a 0 at every second uint16, "
            "expected data.token_dtype: uint32 for such a file"
        )
    return ids


def _is_wider(ids: np.ndarray) -> bool:
    """Whether uint16 ids look like the halves of small uint32 ones."""
    head = ids[:_HEAD_TOKENS]
    return head.size > 2 and not head[1::2].any() and bool(head[::2].any())


@dataclass(frozen=True)
class DataDigest:
    """Identifies a text in a checkpoint.

    Attributes:
        digest: BLAKE2b of the first tokens, the last ones and some between them, hexadecimal.
    """

    num_tokens: int
    digest: str


def digest_of(ids: np.ndarray) -> DataDigest:
    """The digest of a text by a few thousand of its tokens, whatever their integer type."""
    ends = ids[:_DIGEST_END_TOKENS], ids[-_DIGEST_END_TOKENS:]
    some = (*ends, ids[:: max(1, ids.size // _DIGEST_SAMPLES)])
    hashed = blake2b(digest_size=16)
    for part in some:
        hashed.update(part.astype("<u4").tobytes())
    return DataDigest(int(ids.size), hashed.hexdigest())
